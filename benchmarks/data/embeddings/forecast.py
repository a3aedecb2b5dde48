"""What a plan says of slow accesses, beside what another log of the same distribution finds in it."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.harness.measure import scratch
from benchmarks.harness.rows import Row, figure
from windtunnel.cluster.load import load_cluster
from windtunnel.data.embeddings import read_statistics, synthetic
from windtunnel.data.embeddings.policy import PlacementRequest, decide
from windtunnel.data.embeddings.profile import profile
from windtunnel.data.embeddings.twin import accesses, tiers

BATCH = 16_384
CLUSTER = "a100-80:1x2"


def forecast_rows(quick: bool) -> Iterator[Row]:
    samples, sizes = (10_000, (20e6,)) if quick else (100_000, (20e6, 40e6, 60e6, 100e6))
    tables = synthetic.tables("small")
    orders = {one.name: synthetic.order(one.rows, 3) for one in tables}
    rows = {one.name: one.rows for one in tables}
    with scratch() as folder:
        for seed in (1, 2):
            _write(folder / f"{seed}.npz", tables, orders, samples, seed)
        profile([str(folder / "1.npz")], rows=rows).save(folder / "statistics")
        statistics, later = read_statistics(folder / "statistics"), np.load(folder / "2.npz")
        for size in sizes:
            fast, slow = tiers(load_cluster(CLUSTER), size, 1e9)
            plan = decide(PlacementRequest(statistics.tables, 2, fast, slow, BATCH))
            truth = 0.0
            for one in plan.shards:
                kept = np.zeros(rows[one.table], bool)
                kept[np.asarray(statistics.order(one.table))[: one.fast_rows]] = True
                part = (one.last - one.first) / synthetic.DIM
                truth += part * float((~kept[later[f"{one.table}.ids"]]).sum()) * BATCH / samples
            bare = tuple(replace(one, held_out=None) for one in statistics.tables)
            for name, known in (("forecast", statistics.tables), ("in the sample itself", bare)):
                said = float(accesses(known, plan.shards, BATCH).raw[:, 1].sum())
                words, note = f"slow accesses, {name}, {size / 1e6:.0f} MB a device", "measured: another log"
                yield figure(words, "rows", truth, emulated=said, note=note)


def _write(path: Path, tables: Any, orders: dict[str, Any], samples: int, seed: int) -> None:
    columns: dict[str, Any] = {}
    for number, one in enumerate(tables):
        rng = np.random.default_rng([seed, number])
        offsets, columns[f"{one.name}.ids"] = synthetic.draw(one, samples, rng, orders[one.name])
        columns[f"{one.name}.offsets"] = offsets
    np.savez(path, **columns)
