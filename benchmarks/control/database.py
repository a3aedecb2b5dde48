"""CPU time of a decision, alone and in groups; a task against dbos; 10,000 workers of rows.

It is of this process (of Postgres the client's share), since wall time on a shared host says little.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from functools import partial
from statistics import median
from typing import Any

import numpy as np

from benchmarks.control.databases import databases
from benchmarks.harness.measure import in_turn, ratios
from benchmarks.harness.rows import Row, figure
from windtunnel.control.database import Control, emulate, open_control

WORKERS = [f"w{number:02}" for number in range(20)]


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
    costs = _cpu(lambda: [control.runner.run("schedule", most=size) for _ in range(count // size)], count)
    assert control.query("SELECT count(*) FROM task WHERE state = 'pending'")[1] == [(0,)]
    control.run("join", workers=[[name, 0, ""] for name in WORKERS], lease=1e6)
    with control.engine.begin() as connection:
        connection.exec_driver_sql("DELETE FROM task")
    return costs


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
                    results = [[task["task"], "w", task["epoch"], 0, "", ""] for task in begun]
                    assert len(control.run("finish", results=results)) == len(begun)

            def workflows(queue: Any = queue, nothing: Any = nothing) -> None:
                for handle in [queue.enqueue(nothing, number) for number in range(count)]:
                    handle.get_result()

            try:
                arms = {
                    "a task": partial(_cpu, tasks, count),
                    "a dbos workflow": partial(_cpu, workflows, count),
                }
                samples = in_turn(arms, 2)
            finally:
                DBOS.destroy(destroy_registry=True)
            cpu = {name: [cost for cost, _ in each] for name, each in samples.items()}
            for name, costs in cpu.items():
                wall = median(took for _, took in samples[name])
                yield figure(f"{engine}: {name}", "s", costs, note=f"{wall * 1e6:,.0f} us of wall time")
            over = ratios(cpu["a dbos workflow"], cpu["a task"])
            yield figure(f"{engine}: dbos / tables", "times", over, ">= 1 times")
            control.engine.dispose()


def twin_rows(quick: bool) -> Iterator[Row]:
    """Tasks of 50 to 150 s that keep 90 % of 10,000 workers at work, through the same handlers."""
    workers, tasks = (2000, 20_000) if quick else (10_000, 1_000_000)
    rng = np.random.default_rng(1)
    durations, began = rng.uniform(50, 150, tasks), time.process_time()
    arrivals = np.sort(rng.uniform(0, durations.sum() / (0.9 * workers), tasks))
    outcome = emulate([(f"w{number:05}", 1, "") for number in range(workers)], arrivals, durations, 0)
    cpu, goal = time.process_time() - began, "" if quick else "<= 120 s"
    yield figure(f"{workers:,} workers, {tasks:,} tasks: CPU time", "s", cpu, goal)
    yield figure("tasks done", "", emulated=outcome.done / tasks, goal="100 %")
    yield figure("slots held", "", emulated=outcome.used)
