"""A small scheduler with a double start in it: two claimers may find the same task before either starts it.

python examples/control/scheduler.py        # records a run, in which that happens
windtunnel debug sql last "SELECT key, count(*) FROM writes WHERE table_name = 'start' GROUP BY 1"
windtunnel debug replay last
windtunnel debug retro last --code examples/control/fixed.py
"""

from __future__ import annotations

import argparse
import functools
import random
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from sqlalchemy import Column, Float, Integer, MetaData, String, Table, insert, select, update

from windtunnel.control.debug import Recorder, request
from windtunnel.store.runs import Store
from windtunnel.store.transactions import Call, Runner, Transactions, open_database, readonly

metadata = MetaData()
tasks = Table("task", metadata, Column("id", Integer, primary_key=True), Column("state", String))
starts = Table(
    "start", metadata, Column("id", String, primary_key=True), Column("task", Integer),
    Column("worker", Integer), Column("at", Float),
)  # fmt: skip


def submit(call: Call, task: int) -> None:
    call.connection.execute(insert(tasks).values(id=task, state="pending"))


@readonly
def pending(call: Call) -> int | None:
    """The first task that nobody has started."""
    return call.connection.scalar(select(tasks.c.id).where(tasks.c.state == "pending").order_by(tasks.c.id))


def start(call: Call, task: int, worker: int) -> bool:
    """The task runs on the worker from now on. It was pending in another transaction: that is the defect."""
    call.connection.execute(update(tasks).where(tasks.c.id == task).values(state="running"))
    call.connection.execute(insert(starts).values(id=call.uuid(), task=task, worker=worker, at=call.now()))
    return True


@request
def claim(runner: Runner, worker: int) -> bool:
    """Start a task on the worker, if there is one."""
    task = runner.run("pending")
    return task is not None and runner.run("start", task=task, worker=worker)


HANDLERS = {"submit": submit, "pending": pending, "start": start, "claim": claim}


def record(count: int = 8, seed: int = 0) -> str:
    """Two claimers take ``count`` tasks; in one round, drawn by ``seed``, both look before either starts.
    The run's id."""
    run = Store.open().begin("control.debug", {"script": "scheduler.py", "tasks": count}, seed)
    engine = open_database(f"sqlite:///{run.directory / 'scheduler.db'}", "database")
    metadata.create_all(engine)
    meet, close = threading.Barrier(2, timeout=30), threading.Event()

    @functools.wraps(pending)
    def together(call: Call) -> int | None:
        found = pending(call)
        if close.is_set():
            meet.wait()
        return found

    service = Transactions(engine, {**HANDLERS, "pending": together})
    place = f"{Path(__file__).resolve()}:HANDLERS"
    with run.failing(), Recorder(service, run.directory, handlers=place) as recorder:
        for task in range(count):
            recorder.run("submit", task=task)
        racing = random.Random(seed).randrange(count // 2)
        with ThreadPoolExecutor(2) as pool:
            for turn in range(count // 2):
                (close.set if turn == racing else close.clear)()
                if turn == racing:
                    list(pool.map(lambda worker: recorder.run("claim", worker=worker), (0, 1)))
                else:
                    for worker in (0, 1):
                        recorder.run("claim", worker=worker)
        run.finish({})
    return run.id


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--tasks", type=int, default=8)
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    print(f"run {record(arguments.tasks, arguments.seed)}: two claimers took {arguments.tasks} tasks")
