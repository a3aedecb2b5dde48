"""CPU time of a decision, alone and in groups; a task against dbos, a message against gRPC; 10,000 workers of
rows.

It is of this process (of Postgres the client's share), since wall time on a shared host says little.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from statistics import median
from typing import Any

import numpy as np

from benchmarks.control.databases import databases
from benchmarks.harness.measure import in_turn, ratios, scratch
from benchmarks.harness.rows import Row, figure
from windtunnel.control.database import Control, emulate, open_control

WORKERS, BODY = [f"w{number:02}" for number in range(20)], "x" * 256


def _cpu(work: Callable[[], Any], count: int) -> tuple[float, float]:
    """CPU and wall seconds of each of ``count``."""
    cpu, wall = time.process_time(), time.perf_counter()
    work()
    return (time.process_time() - cpu) / count, (time.perf_counter() - wall) / count


def _dictionary(tasks: int) -> None:
    """The least-loaded worker for each of a queue, with nothing kept."""
    free, where = dict.fromkeys(WORKERS, tasks), {}
    for task in range(tasks):
        where[task] = name = max(free, key=free.__getitem__)
        free[name] -= 1


def _placed(control: Control, size: int, count: int) -> tuple[float, float]:
    """What each of ``count`` decisions takes, ``size`` in a transaction."""
    for _ in range(count // 100):
        control.run("submit", tasks=[{"command": ["true"]}] * 100)
    control.run("join", workers=[[name, count, ""] for name in WORKERS], lease=1e6)
    found = _cpu(lambda: [control.runner.run("schedule", most=size) for _ in range(count // size)], count)
    assert control.query("SELECT count(*) FROM task WHERE state = 'pending'")[1] == [(0,)]
    control.run("join", workers=[[name, 0, ""] for name in WORKERS], lease=1e6)
    with control.engine.begin() as connection:
        connection.exec_driver_sql("DELETE FROM task")
    return found


def decisions_rows(quick: bool) -> Iterator[Row]:
    """One decision: read the queue and the workers, decide, assign, write down why."""
    alone, grouped = (100, 1000) if quick else (500, 5000)
    cost, _ = _cpu(lambda: _dictionary(grouped), grouped)
    yield figure("a dictionary of Python, which nothing outlives", "s", cost)
    with databases() as urls:
        for engine, durable in (("SQLite", False), ("SQLite", True), ("Postgres", True)):
            control = open_control(urls[engine], create=True, durable=durable)
            for size, count, goal in ((1, alone, "<= 100 us"), (100, grouped, "<= 25 us")):
                # the first round also prepares the statements, which a scheduler does once
                rounds = [_placed(control, size, count) for _ in range(3 if quick else 9)]
                cpu, wall = zip(*rounds, strict=True)
                name = f"{engine}, in groups of {size}, outlives the {'host' if durable else 'process'}"
                words = f"{1 / median(wall):,.0f} decisions/s of wall time"
                yield figure(name, "s", cpu, "" if durable else goal, note=words)
            control.engine.dispose()


def tasks_rows(quick: bool) -> Iterator[Row]:
    """Tasks that do nothing, submitted one by one and done in groups, against a queue of workflows of
    dbos."""
    from dbos import DBOS

    count = 50 if quick else 300
    with databases() as urls:
        for engine, url in urls.items():
            control = open_control(url, create=True)
            epochs = list(control.run("join", workers=[["w", 1000, ""]], lease=1e6).items())
            config: Any = {"name": "bench", "system_database_url": url.replace("control.db", "dbos.db")}
            DBOS(config=config | {"log_level": "ERROR", "run_admin_server": False})

            @DBOS.workflow(name=f"nothing-{engine}")
            def nothing(number: int) -> int:
                return number

            DBOS.launch()
            queue = DBOS.register_queue("bench", polling_interval_sec=0.05)

            def tasks(control: Control = control, epochs: Any = epochs) -> None:
                for _ in range(count):
                    control.run("submit", tasks=[{"command": ["true"]}])
                while control.run("schedule"):
                    begun = control.run("claim", workers=epochs)
                    results = [[one["task"], "w", one["epoch"], 0, "", ""] for one in begun]
                    assert len(control.run("finish", results=results)) == len(begun)

            def workflows(queue: Any = queue, nothing: Any = nothing) -> None:
                for handle in [queue.enqueue(nothing, number) for number in range(count)]:
                    handle.get_result()

            try:
                arms = {
                    "a task": partial(_cpu, tasks, count),
                    "a dbos workflow": partial(_cpu, workflows, count),
                }
                found = in_turn(arms, 2)
            finally:
                DBOS.destroy(destroy_registry=True)
            cpu = {name: [cost for cost, _ in each] for name, each in found.items()}
            for name, costs in cpu.items():
                wall = median(took for _, took in found[name])
                yield figure(f"{engine}: {name}", "s", costs, note=f"{wall * 1e6:,.0f} us of wall time")
            over = ratios(cpu["a dbos workflow"], cpu["a task"])
            yield figure(f"{engine}: dbos / tables", "times", over, ">= 1 times")
            control.engine.dispose()


def messages_rows(quick: bool) -> Iterator[Row]:
    """Messages of 256 bytes, sent and received by one process, against calls of gRPC."""
    import grpc

    count = 400 if quick else 2000
    echo = grpc.unary_unary_rpc_method_handler(lambda request, context: request)
    server = grpc.server(ThreadPoolExecutor(1))
    server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler("bench", {"echo": echo}),))
    port = server.add_insecure_port("127.0.0.1:0")
    server.start()
    with scratch() as folder, grpc.insecure_channel(f"127.0.0.1:{port}") as channel:
        call = channel.unary_unary("/bench/echo")
        calls, _ = _cpu(lambda: [call(BODY.encode()) for _ in range(count)], count)
        yield figure("gRPC, unary, client and server", "s", calls)
        control = open_control(f"sqlite:///{folder}/control.db", create=True, durable=False)
        for size in (1, 100):

            def exchange(size: int = size) -> None:
                for _ in range(count // size):
                    control.run("send", messages=[["r", BODY]] * size)
                    assert len(control.run("receive", receiver="r", most=size)) == size

            cost, _ = _cpu(exchange, count)
            yield figure(f"SQLite, in groups of {size}", "s", cost, f"<= {calls * 1e6:.0f} us, as gRPC")
        control.engine.dispose()
    server.stop(None)


def twin_rows(quick: bool) -> Iterator[Row]:
    """Tasks of 50 to 150 s that keep 90 % of 10,000 workers at work, through the same handlers."""
    workers, tasks = (2000, 20_000) if quick else (10_000, 1_000_000)
    rng = np.random.default_rng(1)
    durations, began = rng.uniform(50, 150, tasks), time.process_time()
    arrivals = np.sort(rng.uniform(0, durations.sum() / (0.9 * workers), tasks))
    found = emulate([(f"w{number:05}", 1, "") for number in range(workers)], arrivals, durations, 0)
    cpu, goal = time.process_time() - began, "" if quick else "<= 120 s"
    yield figure(f"{workers:,} workers, {tasks:,} tasks: CPU time", "s", cpu, goal)
    yield figure("tasks done", "", emulated=found.done / tasks, goal="100 %")
    yield figure("slots held", "", emulated=found.used)
