"""RecShard beside the paper's greedy plans, on the same tables; and what is proven optimal.

All plans are read by one twin, which knows nothing of who made them.

What a plan says of slow accesses, beside what another log of the same distribution finds in it.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.harness.measure import scratch
from benchmarks.harness.rows import Row, figure, left_out
from windtunnel.cluster.load import load_cluster
from windtunnel.cluster.model import Cluster
from windtunnel.data.embeddings import read_statistics, synthetic
from windtunnel.data.embeddings.model import EmbeddingTable, MemoryTier
from windtunnel.data.embeddings.policy import PlacementRequest, TablePlacement, decide
from windtunnel.data.embeddings.profile import profile
from windtunnel.data.embeddings.twin import Iteration, accesses, iteration, tiers

CLUSTER = "a100-80:2x8"
BATCH = 16_384
GRANTED = 24e9
"""Bytes of a device's memory for rows in the paper (section 6)."""
SOURCE = "RecShard, ASPLOS 2022, abstract: on average, models that do not fit, 16 GPUs"
PUBLISHED = {"slow accesses": 87.0, "balance": 12.0, "reading and updating": 6.0}
GREEDY = ("size", "lookup", "size-lookup")


def _tables(name: str, count: int | None = None) -> tuple[EmbeddingTable, ...]:
    """With the state of a row-wise optimiser."""
    return tuple(replace(table, state_bytes=4) for table in synthetic.tables(name)[:count])


def _decided(request: PlacementRequest) -> tuple[TablePlacement, float]:
    begin = time.perf_counter()
    return decide(request), time.perf_counter() - begin


def _tight(tables: tuple[EmbeddingTable, ...], devices: int) -> PlacementRequest:
    """A tenth of the bytes is fast."""
    total = float(sum(table.total_bytes for table in tables))
    fast, slow = MemoryTier(0.1 * total / devices, 2e12), MemoryTier(total, 26e9)
    return PlacementRequest(tables, devices, fast, slow, BATCH)


def _work(priced: Iteration) -> float:
    return priced.lookups + priced.updates


def planners_rows(quick: bool) -> Iterator[Row]:
    cluster = load_cluster(CLUSTER)
    for name in ("rm3",) if quick else ("rm2", "rm3"):
        tables = _tables(name)
        total = sum(table.total_bytes for table in tables)
        # 24 GB, as in the paper, hold all rows of rm2 that are ever asked for: less shows what cuts gain
        for label, granted in (("24 GB", GRANTED), ("5% fast", 0.05 * total / cluster.world_size)):
            yield from _greedy(cluster, f"{name}, {label}", tables, granted)


def _greedy(
    cluster: Cluster, label: str, tables: tuple[EmbeddingTable, ...], granted: float
) -> Iterator[Row]:
    request = PlacementRequest(tables, cluster.world_size, *tiers(cluster, granted), BATCH)
    ours, planning = _decided(request)
    mine = iteration(cluster, request, ours)
    yield figure(f"{label}: planning", "s", planning, note=ours.reason)
    for policy in GREEDY:
        plan = decide(replace(request, policy=policy))
        theirs = iteration(cluster, request, plan)
        ratios = {
            "slow accesses": (theirs.raw[1], mine.raw[1]),
            "slow rows": (theirs.distinct[1], mine.distinct[1]),
            "balance": (_spread(plan), _spread(ours)), "reading and updating": (_work(theirs), _work(mine)),
            "iteration": (theirs.seconds, mine.seconds),
        }  # fmt: skip
        for quantity, (other, own) in ratios.items():
            published = PUBLISHED.get(quantity) if granted == GRANTED else None
            row = f"{label}: {quantity}, {policy} over recshard"
            if not own:
                yield left_out(row, "recshard has no slow access at all")
                continue
            goal = f"> {published:g}" if published else ""
            yield figure(row, "x", goal=goal, emulated=other / own, published=published, source=SOURCE)


def _spread(plan: TablePlacement) -> float:
    """The slowest device's reading over the fastest's."""
    return plan.slowest / max(min(plan.seconds), 1e-9)


def milp_rows(quick: bool) -> Iterator[Row]:
    """What is proven, at growing sizes; and how near the search comes."""
    for count, devices in ((24, 4), (50, 2), *(() if quick else ((50, 4), (30, 8)))):
        request = _tight(_tables("rm2", count), devices)
        plan, seconds = _decided(request)
        searched, quickly = _decided(replace(request, policy="search"))
        label, solved = f"{count} tables on {devices} devices", count == 50
        note = f"{plan.reason}; solver: {plan.solver}, {len(plan.shards)} shards"
        goal = "<= 1 ppm" if solved else ""
        yield figure(f"{label}: gap", "ppm", goal=goal, emulated=plan.gap * 1e6, note=note)
        yield figure(f"{label}: time", "s", seconds, "<= 60 s" if solved else "")
        name, over = f"{label}: search over the best", searched.slowest / plan.slowest - 1
        yield figure(name, "", goal="<= 2%", emulated=over, note=f"{quickly:.2f} s")


PAIR = "a100-80:1x2"


def forecast_rows(quick: bool) -> Iterator[Row]:
    samples, sizes = (10_000, (20e6,)) if quick else (100_000, (20e6, 40e6, 60e6, 100e6))
    tables = synthetic.tables("small")
    orders = {table.name: synthetic.order(table.rows, 3) for table in tables}
    rows = {table.name: table.rows for table in tables}
    with scratch() as folder:
        for seed in (1, 2):
            _write(folder / f"{seed}.npz", tables, orders, samples, seed)
        profile([str(folder / "1.npz")], rows=rows).save(folder / "statistics")
        statistics, later = read_statistics(folder / "statistics"), np.load(folder / "2.npz")
        for size in sizes:
            fast, slow = tiers(load_cluster(PAIR), size, 1e9)
            plan = decide(PlacementRequest(statistics.tables, 2, fast, slow, BATCH))
            truth = 0.0
            for table in plan.shards:
                in_fast = np.zeros(rows[table.table], bool)
                in_fast[np.asarray(statistics.order(table.table))[: table.fast_rows]] = True
                part = (table.last - table.first) / synthetic.DIM
                truth += part * float((~in_fast[later[f"{table.table}.ids"]]).sum()) * BATCH / samples
            bare = tuple(replace(table, held_out=None) for table in statistics.tables)
            for name, profiled in (("forecast", statistics.tables), ("in the sample itself", bare)):
                forecast = float(accesses(profiled, plan.shards, BATCH).raw[:, 1].sum())
                words, note = f"slow accesses, {name}, {size / 1e6:.0f} MB a device", "measured: another log"
                yield figure(words, "rows", truth, emulated=forecast, note=note)


def _write(path: Path, tables: Any, orders: dict[str, Any], samples: int, seed: int) -> None:
    columns: dict[str, Any] = {}
    for number, table in enumerate(tables):
        rng = np.random.default_rng([seed, number])
        offsets, columns[f"{table.name}.ids"] = synthetic.draw(table, samples, rng, orders[table.name])
        columns[f"{table.name}.offsets"] = offsets
    np.savez(path, **columns)
