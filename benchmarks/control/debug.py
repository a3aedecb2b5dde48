"""Point and TPC-C-like transactions, plain, recorded, and under OpenTelemetry."""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack
from functools import partial
from statistics import median
from typing import Any

from sqlalchemy import text

from benchmarks.control.databases import databases
from benchmarks.harness.measure import in_turn, ratios, scratch
from benchmarks.harness.rows import Row, figure
from windtunnel.control.debug import Recorder
from windtunnel.store.transactions import Call, Runner, Transactions, open_database, readonly

PAPER = "R3, PVLDB 16(11), 2023, abstract: point queries under 25 %, TPC-C-like under 0.1 %"
ITEMS = 1000
GET, PUT = (
    text("SELECT amount FROM stock WHERE id = :k"),
    text("UPDATE stock SET amount = amount - 1 WHERE id = :k"),
)
NEXT = text("UPDATE district SET orders = orders + 1 WHERE id = :k RETURNING orders")
LINE = text("INSERT INTO line (id, number, item, at) VALUES (:id, :number, :k, :at)")
TABLES = ("stock (id INTEGER PRIMARY KEY, amount INTEGER)",
          "district (id INTEGER PRIMARY KEY, orders INTEGER)",
          "line (id VARCHAR(40) PRIMARY KEY, number INTEGER, item INTEGER, at FLOAT)")  # fmt: skip


@readonly
def point_read(call: Call, k: int) -> Any:
    return call.connection.execute(GET, {"k": k}).scalar()


def point_write(call: Call, k: int) -> None:
    call.connection.execute(PUT, {"k": k})


def new_order(call: Call, k: int, items: list[int]) -> Any:
    """TPC-C's new order: a number of the district, then each item is read, taken, and written to a line."""
    number = call.connection.execute(NEXT, {"k": k % 10}).scalar()
    for item in items:
        point_read(call, item)
        point_write(call, item)
        line = {"id": call.uuid(), "number": number, "k": item, "at": call.now()}
        call.connection.execute(LINE, line)
    return number


HANDLERS: Mapping[str, Callable[..., Any]] = {
    "point read": point_read, "point write": point_write, "new order": new_order,
}  # fmt: skip
COUNTS = {"point read": (25, 200), "point write": (25, 100), "new order": (5, 30)}
"""Percent that recording may add, and transactions of a round."""
PLACE = f"{__name__}:HANDLERS"


def service(url: str) -> Transactions:
    engine = open_database(url, "benchmark")
    with engine.begin() as connection:
        for table in TABLES:
            connection.execute(text(f"DROP TABLE IF EXISTS {table.partition(' ')[0]}"))
            connection.execute(text(f"CREATE TABLE {table}"))
        for table, count in (("stock", ITEMS), ("district", 10)):
            connection.execute(
                text(f"INSERT INTO {table} VALUES (:k, 1000)"), [{"k": k} for k in range(count)]
            )
    return Transactions(engine, HANDLERS)


def ask(runner: Runner, kind: str, draw: random.Random) -> None:
    more = {"items": sorted(draw.sample(range(ITEMS), 10))} if kind == "new order" else {}
    runner.run(kind, k=draw.randrange(ITEMS), **more)


def overhead_rows(quick: bool) -> Iterator[Row]:
    """Seconds of a transaction on one connection, arms in turn, each commit on the disk."""
    from opentelemetry.instrumentation.sqlalchemy import SQLAlchemyInstrumentor
    from opentelemetry.sdk.trace import TracerProvider
    from opentelemetry.sdk.trace.export import BatchSpanProcessor, ConsoleSpanExporter

    with databases() as urls, scratch() as folder, ExitStack() as stack:
        spans = stack.enter_context((folder / "spans").open("w"))
        provider = TracerProvider()
        provider.add_span_processor(BatchSpanProcessor(ConsoleSpanExporter(out=spans)))
        for name, url in urls.items():
            plain, recorded, telemetry = (
                service(url.replace("control", arm)) for arm in ("plain", "recorded", "telemetry")
            )
            recorder = stack.enter_context(Recorder(recorded, folder / name, handlers=PLACE))
            SQLAlchemyInstrumentor().instrument(
                engine=telemetry.engine, tracer_provider=provider, skip_dep_check=True
            )
            arms: dict[str, Runner] = {"plain": plain, "recorded": recorder, "OpenTelemetry": telemetry}
            for kind, (goal, count) in COUNTS.items():
                calls = {arm: partial(measured, arms[arm], kind, count) for arm in arms}
                times = in_turn(calls, 3 if quick else 21)
                rounds = {arm: [*zip(*each, strict=True)] for arm, each in times.items()}
                for arm, (wall, cpu) in rounds.items():
                    note = f"{median(wall) * 1e6:.0f} us of wall time"
                    yield figure(f"{name}, {kind}, {arm}: CPU", "s", cpu, note=note)
                    if arm != "plain":
                        claim = (0.25 if goal == 25 else 0.001) if arm == "recorded" else None
                        # each round beside the plain one of its turn
                        more = [over - 1 for over in ratios(cpu, rounds["plain"][1])]
                        words, row = f"<= {goal} %" if claim else "", f"{name}, {kind}, {arm}: more CPU"
                        yield figure(row, "", more, words, published=claim, source=PAPER)
        provider.shutdown()


def measured(runner: Runner, kind: str, count: int) -> tuple[float, float]:
    """Mean seconds of a transaction, and of this thread's CPU."""
    draw, wall, cpu = random.Random(1), time.perf_counter(), time.thread_time()
    for _ in range(count):
        ask(runner, kind, draw)
    return (time.perf_counter() - wall) / count, (time.thread_time() - cpu) / count
