"""How fast a log is profiled, and in how much memory, beside ways to count that are at hand.

Rates are lookups for each second of CPU time of all threads, reading the file included, in the best of the
repeats (what disturbs a pass only makes it slower). The rivals count one column's ids, and no more.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from benchmarks.harness.measure import in_new_process, in_turn, most_resident, scratch, seconds_of
from benchmarks.harness.rows import Row, figure, left_out
from windtunnel.data.embeddings import synthetic
from windtunnel.data.embeddings.model import EmbeddingTable
from windtunnel.data.embeddings.profile import profile

HUGE = 1_000_000_000


def profile_rows(quick: bool) -> Iterator[Row]:
    samples, rows = (300_000, 1_000_000) if quick else (1_500_000, 10_000_000)
    ranks, shares = synthetic.zipf(rows, 1.05)
    table = EmbeddingTable("f", rows, 64, pooling=20.0, coverage=0.9, ranks=ranks, shares=shares)
    with scratch() as folder:
        log = folder / "log.parquet"
        lookups = _write(log, {table.name: table}, samples, rows)
        arms: dict[str, Callable[[], int]] = {
            "profile": lambda: profile([str(log)]).facts["f"].lookups,
            "profile, 8 windows": lambda: profile([str(log)], window=samples // 8).facts["f"].lookups,
        }
        for name, rival in (("duckdb", _duckdb), ("polars", _polars)):
            try:
                arms[name] = rival(log)
            except ImportError:
                yield left_out(f"lookups/s, {name}", f"{name} is not installed")
        wide = folder / "wide.parquet"
        small = {table.name: table for table in synthetic.tables("small")}
        many = _write(wide, small, samples // 5, 0)
        arms["profile, 16 features"] = lambda: sum(
            facts.lookups for facts in profile([str(wide)]).facts.values()
        )
        expected = {name: many if "features" in name else lookups for name in arms}
        for name, arm in arms.items():  # the pass that warms caches and compiles
            assert arm() == expected[name], name
        timed = {name: partial(seconds_of, arm, time.process_time) for name, arm in arms.items()}
        times = in_turn(timed, 3 if quick else 5)
        ours = lookups / min(times["profile"])
        for name, seconds in times.items():
            rate = expected[name] / min(seconds)
            goal = ">= 20 M" if name.startswith("profile") else ""
            note = "" if goal else f"profile is {ours / rate:.1f}x as fast"
            yield figure(f"lookups/s a core, {name}", "lookups/s", rate, goal, note=note)
    yield from _memory_rows(quick)


def _write(path: Path, tables: dict[str, EmbeddingTable], samples: int, shuffled: int) -> int:
    """A log of ``samples`` in Parquet, written as pyarrow writes by default; its lookups. ``shuffled``: the
    rows of the table whose hot rows lie anywhere; 0: ids are ranks."""
    order = synthetic.order(shuffled, 1) if shuffled else None
    lookups, step, rng = 0, 250_000, np.random.default_rng(1)
    schema = pa.schema([(name, pa.list_(pa.int64())) for name in tables])
    with pq.ParquetWriter(path, schema) as writer:
        for first in range(0, samples, step):
            columns = []
            for table in tables.values():
                offsets, ids = synthetic.draw(table, min(step, samples - first), rng, order)
                lookups += len(ids)
                columns.append(pa.ListArray.from_arrays(offsets.astype(np.int32), ids))
            writer.write_table(pa.table(columns, schema=schema))
    return lookups


def _duckdb(log: Path) -> Callable[[], int]:
    import duckdb

    connection = duckdb.connect(config={"threads": 1})
    connection.execute("SET enable_progress_bar = false")
    counted = f"SELECT id, count(*) AS n FROM (SELECT unnest(f) AS id FROM read_parquet('{log}')) GROUP BY id"
    return lambda: int(connection.execute(f"SELECT sum(n) FROM ({counted})").fetchall()[0][0])


def _polars(log: Path) -> Callable[[], int]:
    import polars

    # samples without the feature explode to null
    column = polars.scan_parquet(log).select(polars.col("f").explode()).drop_nulls()
    return lambda: int(column.group_by("f").len().collect()["len"].sum())


def _memory_rows(quick: bool) -> Iterator[Row]:
    rows, lookups = (HUGE // 20, 2_000_000) if quick else (HUGE, 40_000_000)
    with scratch() as folder:
        ids = np.random.default_rng(2).integers(-(1 << 63), 1 << 63, lookups)
        for half in range(2):
            part: dict[str, Any] = {"f.ids": ids[half::2]}
            np.savez(folder / f"{half}.npz", **part)
        peak, read, written = in_new_process(_hashed, folder, rows)
    name = f"{rows:,} rows, {lookups / 1e6:.0f} M lookups of raw ids hashed, 2 windows"
    yield figure(f"peak memory, {name}", "bytes", peak, "<= 2 GiB", note="resident, all included")
    yield figure("CPU time of it, without the order", "s", read)
    yield figure("CPU time of it, with the order written", "s", written)


def _hashed(folder: Path, rows: int) -> tuple[int, float, float]:
    """The most memory, and CPU seconds until all is read and until the order is written."""
    begun = time.process_time()
    statistics = profile([f"{folder}/*.npz"], rows={"f": rows}, hashes={"f": "splitmix64"})
    read = time.process_time() - begun
    statistics.save(folder / "out")
    return most_resident(), read, time.process_time() - begun
