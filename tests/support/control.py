"""A control plane for tests: a model in plain dictionaries, a server of Postgres, and what must always
hold."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import closing, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from sqlalchemy import Connection, Engine, text

from support.postgres import start
from windtunnel.control.database.handlers import HANDLERS
from windtunnel.control.database.live.control import Control
from windtunnel.control.database.policy import POLICIES, Observation, Task, Worker
from windtunnel.control.database.tables import open_tables
from windtunnel.control.database.twin import EmulatedCall, EmulatedDatabase
from windtunnel.store.eventlog import EventLog
from windtunnel.store.transactions import Call, Transactions, is_readonly, transact


def rows(engine: Engine, statement: str) -> list[tuple[Any, ...]]:
    with engine.connect() as connection:
        return [tuple(row) for row in connection.execute(text(statement))]


def slots_add_up(engine: Engine) -> None:
    """Free and held slots are all that a worker has, and who has a task is at work on it."""
    assert rows(engine, """SELECT name FROM worker WHERE slots <> free +
        (SELECT coalesce(sum(slots), 0) FROM task WHERE holder = worker.name)""") == []  # fmt: skip
    assert rows(engine, """SELECT id FROM task
        WHERE (holder IS NOT NULL) <> (state IN ('assigned', 'running'))""") == []  # fmt: skip


@contextmanager
def postgres(folder: Path) -> Iterator[Any]:
    """A server with its data in ``folder``; skips the test where there is none. As root it runs as a user of
    its own, which the package makes."""
    folder.mkdir(parents=True, exist_ok=True)
    for attempt in range(3):  # the package gives it ten seconds, which a busy host may need longer than
        try:
            server = start(folder, "stop")
            break
        except Exception as error:
            if attempt == 2:
                pytest.skip(f"no server of Postgres can be started here: {error}")
    try:
        yield server
    finally:
        server.cleanup()


@dataclass
class Model:
    """What the handlers do, in dictionaries."""

    now: float = 0.0
    tasks: dict[int, dict[str, Any]] = field(default_factory=dict)
    keys: dict[str, int] = field(default_factory=dict)
    workers: dict[str, dict[str, Any]] = field(default_factory=dict)
    messages: dict[str, list[tuple[str, str]]] = field(default_factory=dict)
    used: int = 0

    def submit(self, tasks: list[dict[str, Any]]) -> list[int]:
        numbers = []
        for spec in tasks:
            if spec["key"] not in self.keys:
                self.used += 1
                defaults = {
                    "slots": 1,
                    "priority": 0,
                    "data": "",
                    "gang": "",
                    "members": 1,
                    "attempts": 3,
                    "not_before": 0.0,
                }
                self.tasks[self.used] = (
                    defaults | spec | {"state": "pending", "holder": "", "epoch": 0, "attempt": 0}
                )
                self.keys[spec["key"]] = self.used
            numbers.append(self.keys[spec["key"]])
        return numbers

    def free(self, name: str) -> int:
        return self.workers[name]["slots"] - sum(
            t["slots"] for t in self.tasks.values() if t["holder"] == name
        )

    def schedule(self, policy: str, most: int) -> list[tuple[int, str]]:
        live = {
            name: row for name, row in self.workers.items() if row["lease"] >= self.now and row["lease"] > 0
        }
        largest = max((row["slots"] for row in live.values()), default=0)
        pending = {
            n: t for n, t in self.tasks.items() if t["state"] == "pending" and t["not_before"] <= self.now
        }

        def complete(task: dict[str, Any]) -> bool:
            members = [t for t in self.tasks.values() if t["gang"] == task["gang"]]
            there = sum(t["state"] != "pending" or t["not_before"] <= self.now for t in members)
            return not task["gang"] or there >= task["members"]

        order = sorted(pending, key=lambda n: (-pending[n]["priority"], n))
        window = [n for n in order if pending[n]["slots"] <= largest and complete(pending[n])][:most]
        gangs = {pending[n]["gang"] for n in window} - {""}
        window = [n for n in window if not pending[n]["gang"]] + [
            n for n in pending if pending[n]["gang"] in gangs
        ]
        room = sorted((-self.free(name), name) for name in live if self.free(name) > 0)[:most]
        if not window or not room:
            return []
        tasks = [pending[n] for n in window]
        observation = Observation(
            tuple(
                Task(n, t["slots"], t["priority"], t["data"], t["gang"])
                for n, t in zip(window, tasks, strict=True)
            ),
            tuple(
                Worker(name, -free, self.workers[name]["slots"], self.workers[name]["data"])
                for free, name in room
            ),
        )
        placed = POLICIES[policy](observation).assignments
        for assignment in placed:
            self.tasks[assignment.task] |= {
                "state": "assigned",
                "holder": assignment.worker,
                "epoch": self.workers[assignment.worker]["epoch"],
            }
        return sorted((assignment.task, assignment.worker) for assignment in placed)

    def claim(self, workers: list[tuple[str, int]]) -> list[int]:
        numbers = sorted(
            n
            for n, t in self.tasks.items()
            if t["state"] == "assigned" and (t["holder"], t["epoch"]) in workers
        )
        for number in numbers:
            self.tasks[number]["state"] = "running"
            self.tasks[number]["attempt"] += 1
        return numbers

    def finish(self, results: list[list[Any]]) -> list[int]:
        done = []
        for number, name, epoch, _, error, _ in results:
            task = self.tasks.get(number)
            if task and task["state"] == "running" and (task["holder"], task["epoch"]) == (name, epoch):
                again = "failed" if task["attempt"] >= task["attempts"] else "pending"
                task |= {"state": again if error else "done", "holder": ""}
                done.append(number)
        return sorted(done)

    def lose(self, name: str) -> None:
        for task in self.tasks.values():
            if task["holder"] == name:
                ended = task["state"] == "running" and task["attempt"] >= task["attempts"]
                task |= {"state": "failed" if ended else "pending", "holder": ""}

    def join(self, workers: list[list[Any]], lease: float) -> dict[str, int]:
        for name, slots, data in workers:
            self.lose(name)
            epoch = self.workers[name]["epoch"] + 1 if name in self.workers else 1
            self.workers[name] = {"slots": slots, "data": data, "epoch": epoch, "lease": self.now + lease}
        return {name: self.workers[name]["epoch"] for name, _, _ in workers}

    def renew(self, worker: str, epoch: int, lease: float) -> bool:
        known = self.workers.get(worker)
        if known and known["epoch"] == epoch:
            known["lease"] = self.now + lease
        return bool(known and known["epoch"] == epoch)

    def expire(self) -> list[str]:
        names = sorted(name for name, row in self.workers.items() if 0 < row["lease"] <= self.now)
        for name in names:
            self.lose(name)
            self.workers[name] |= {"epoch": self.workers[name]["epoch"] + 1, "lease": 0}
        return names

    def send(self, messages: list[list[str]], sender: str) -> None:
        for receiver, body in messages:
            self.messages.setdefault(receiver, []).append((sender, body))

    def receive(self, receiver: str, most: int) -> list[tuple[str, str]]:
        waiting = self.messages.get(receiver, [])
        taken, self.messages[receiver] = waiting[:most], waiting[most:]
        return taken


def emulated(url: str) -> EmulatedDatabase:
    """Handlers on the database at ``url``, at a time that the test sets."""
    return EmulatedDatabase(
        np.random.default_rng(0), 1.0, open_tables(url, "url", create=True, durable=False)
    )


# --- for tests/parity


@dataclass
class Recording(Call):
    """A call that writes down the times and identifiers that it gives."""

    given: list[Any] = field(default_factory=list)

    def now(self) -> float:
        self.given.append(super().now())
        return self.given[-1]

    def uuid(self) -> str:
        self.given.append(super().uuid())
        return self.given[-1]


@dataclass(frozen=True)
class Recorder:
    """Runs handlers and logs each call, with what it was given: enough to make all of them anew."""

    transactions: Transactions
    log: EventLog

    def run(self, name: str, **arguments: Any) -> Any:
        given: list[Any] = []

        def body(connection: Connection) -> Any:
            given.clear()
            return HANDLERS[name](Recording(connection, given), **arguments)

        result = transact(self.transactions.engine, body, readonly=is_readonly(HANDLERS[name]))
        self.log.append("call", name=name, arguments=json.dumps(arguments), given=given)
        return result


@dataclass
class Replayed(EmulatedCall):
    given: list[Any] = field(default_factory=list)

    def now(self) -> float:
        return float(self.given.pop(0))

    def uuid(self) -> str:
        return str(self.given.pop(0))


@contextmanager
def logged(folder: Path, policy: str) -> Iterator[tuple[Control, EventLog]]:
    """A control plane at SQLite in ``folder`` whose calls go to the log that is given too."""
    engine = open_tables(f"sqlite:///{folder}/{policy}.db", "url", create=True, durable=False)
    with closing(EventLog(folder / f"{policy}.jsonl")) as log:
        yield Control(engine, Recorder(Transactions(engine, HANDLERS), log)), log
    engine.dispose()
