"""Plans flown on this host: host memory as the fast tier, a file past the page cache as the slow one.

All plans get the same tables, batches and fast bytes. Iterations come in turn, and every row has been
written before, so that each slow row is a read of the disk. The devices of a plan fly one after the other in
this process; an iteration takes as long as its slowest device.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import closing
from dataclasses import replace
from functools import partial
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray

from benchmarks.harness.measure import in_turn, ratios, scratch, seconds_of
from benchmarks.harness.rows import Row, figure
from windtunnel.data.embeddings import synthetic
from windtunnel.data.embeddings.files import Statistics, read_statistics, write_statistics
from windtunnel.data.embeddings.live.bag import TieredEmbeddingBag
from windtunnel.data.embeddings.live.build import build
from windtunnel.data.embeddings.live.optim import RowWiseAdagrad
from windtunnel.data.embeddings.model import EmbeddingTable, MemoryTier, Order
from windtunnel.data.embeddings.policy import PlacementRequest, TablePlacement, decide

DEVICES, BATCH, FAST = 2, 512, 0.05
POLICIES = ("size", "lookup", "size-lookup", "recshard")
TRAINED, LOOKED_UP = "step", "lookups"
SLOW = "slow lookups of the best greedy over recshard's"
SOURCE = "RecShard, abstract: 16 GPUs, hundreds of tables"

Batch = dict[str, tuple[torch.Tensor, torch.Tensor, NDArray[np.int64]]]
"""Of each table ids, offsets and ranks."""


def tiers_rows(quick: bool) -> Iterator[Row]:
    tables = tuple(
        replace(table, state_bytes=4) for table in synthetic.tables("small", scale=0.2 if quick else 1.0)
    )
    bytes_each = sum(table.total_bytes for table in tables) / DEVICES
    rng = np.random.default_rng(0)
    with scratch() as folder:
        speeds = [_bandwidth(share, folder) for share in (1.0, 0.0)]
        fast, slow = MemoryTier(FAST * bytes_each, speeds[0]), MemoryTier(4 * bytes_each, speeds[1])
        orders = {table.name: synthetic.order(table.rows, at) for at, table in enumerate(tables)}
        write_statistics(folder / "statistics", tables, orders=orders)
        profiled = read_statistics(folder / "statistics")
        batches = [_batch(tables, orders, rng) for _ in range(6 if quick else 14)]
        request = PlacementRequest(tables, DEVICES, fast, slow, BATCH, columns=0)
        plans = {name: decide(replace(request, policy=name)) for name in POLICIES}
        for share in (2 * FAST, 4 * FAST):
            more = replace(request, fast=replace(fast, capacity=share * bytes_each))
            counts_at = [_slow(decide(replace(more, policy=name)), batches[2:]) for name in POLICIES]
            over = [min(count[at] for count in counts_at[:-1]) / counts_at[-1][at] for at in (0, 1)]
            name, note = f"{SLOW}, {share:.0%} fast", f"distinct rows {over[1]:.1f}x"
            yield figure(name, "x", over[0], note=note)
        flights = {name: _Flight(profiled, plan, folder / name) for name, plan in plans.items()}
        try:
            # the rows of the last batch are kept: lookups come with another one than the step before them
            half = len(batches) // 2
            turns = {TRAINED: batches, LOOKED_UP: batches[half:] + batches[:half]}
            arms = {
                f"{kind}, {name}": partial(flight.next, iter(order), kind)
                for name, flight in flights.items()
                for kind, order in turns.items()
            }
            seconds = in_turn(arms, len(batches))
        finally:
            for flight in flights.values():
                flight.close()
    counts = {name: _slow(plan, batches[2:]) for name, plan in plans.items()}
    for name in POLICIES:
        raw, distinct = counts[name]
        yield figure(f"slow lookups an iteration, {name}", "lookups", raw)
        yield figure(f"distinct slow rows an iteration, {name}", "rows", distinct)
        for kind in (TRAINED, LOOKED_UP):
            yield figure(f"{kind} of an iteration, {name}", "s", seconds[f"{kind}, {name}"][2:])
    best = min(counts[name][0] for name in POLICIES[:-1]) / counts["recshard"][0]
    yield figure(f"{SLOW}, {FAST:.0%} fast", "x", best, "> 1", published=87.0, source=SOURCE)
    for kind in (TRAINED, LOOKED_UP):
        middle = [statistics.median(seconds[f"{kind}, {name}"][2:]) for name in POLICIES]
        best = min(middle[:-1]) / middle[-1]
        name = f"{kind}: time of the best greedy over recshard's"
        yield figure(name, "x", best, "> 1", published=6.0, source=SOURCE)
    yield from _overhead_rows(quick)


class _Flight:
    """One plan's modules, device by device, all rows written."""

    def __init__(self, statistics: Statistics, plan: TablePlacement, folder: Path) -> None:
        self.devices: list[dict[str, TieredEmbeddingBag]] = []
        for device in range(plan.devices):
            (folder / str(device)).mkdir(parents=True)
            make = partial(RowWiseAdagrad, lr=0.01)
            modules = build(
                plan, statistics, device, slow=folder / str(device), optimizer=make, include_last_offset=True
            )
            for bag in modules.values():
                for ids in torch.arange(bag.rows).split(1 << 16):
                    bag.write(ids, bag.read(ids))
            self.devices.append(modules)

    def next(self, batches: Iterator[Batch], kind: str) -> float:
        """Seconds of the slowest device for a step, or for its lookups alone."""
        batch, seconds = next(batches), []
        for modules in self.devices:
            begin = time.perf_counter()
            with torch.set_grad_enabled(kind == TRAINED):
                out = [bag(*batch[name][:2]) for name, bag in modules.items()]
                if kind == TRAINED:
                    torch.cat(out, 1).sum().backward()
                    for bag in modules.values():
                        bag.step()
            seconds.append(time.perf_counter() - begin)
        return max(seconds)

    def close(self) -> None:
        for modules in self.devices:
            for bag in modules.values():
                bag.close()


def _batch(
    tables: tuple[EmbeddingTable, ...], orders: Mapping[str, Order], rng: np.random.Generator
) -> Batch:
    drawn: Batch = {}
    for table in tables:
        ends, ranks = synthetic.draw(table, BATCH, rng)
        ids = orders[table.name][ranks].astype(np.int64)
        drawn[table.name] = torch.from_numpy(ids), torch.from_numpy(ends), ranks
    return drawn


def _bandwidth(share: float, folder: Path) -> float:
    """Bytes/s of rows in a step over a flat table of which this ``share`` is fast."""
    rows, batch = 100_000, 4096
    ids = torch.from_numpy(np.random.default_rng(1).permutation(rows)[: 6 * batch]).split(batch)
    bag = TieredEmbeddingBag(
        rows, 64, round(rows * share), slow=folder / "speed.rows", optimizer=partial(RowWiseAdagrad, lr=0.01)
    )

    def step(some: torch.Tensor) -> None:
        bag(some.view(-1, 8)).sum().backward()
        bag.step()

    with closing(bag):
        for some in torch.arange(rows).split(1 << 14):
            bag.write(some, bag.read(some))
        seconds = [seconds_of(partial(step, some)) for some in ids]
    return batch * 64 * 4 / statistics.median(seconds[1:])


def _slow(plan: TablePlacement, batches: list[Batch]) -> tuple[float, float]:
    """Lookups of slow rows, and such rows, of an average iteration on all devices."""
    raw = distinct = 0
    for batch in batches:
        for shard in plan.shards:
            ranks = batch[shard.table][2]
            below = ranks[ranks >= shard.fast_rows]
            raw, distinct = raw + len(below), distinct + len(np.unique(below))
    return raw / len(batches), distinct / len(batches)


def _overhead_rows(quick: bool) -> Iterator[Row]:
    """Beside ``torch.nn.EmbeddingBag``, all rows in memory."""
    rows, dim = 200_000, 64
    rng = np.random.default_rng(0)
    weight = torch.randn(rows, dim, generator=torch.Generator().manual_seed(0))
    ranks, shares = synthetic.zipf(rows, 1.05)
    table = EmbeddingTable("f", rows, dim, pooling=20.0, ranks=ranks, shares=shares)
    order = synthetic.order(rows, 0)
    drawn = [synthetic.draw(table, 2048, rng, order) for _ in range(8 if quick else 20)]
    batches = [(torch.from_numpy(ids), torch.from_numpy(ends)) for ends, ids in drawn]
    for name, make in (("Adagrad", torch.optim.Adagrad), ("SGD", torch.optim.SGD)):
        plain = torch.nn.EmbeddingBag(
            rows, dim, mode="sum", sparse=True, include_last_offset=True, _weight=weight.clone()
        )
        optimizer = make(plain.parameters(), lr=0.1)
        tiered = {
            share: TieredEmbeddingBag(
                rows, dim, round(rows * share), order=order, optimizer=partial(make, lr=0.1), init=weight,
                include_last_offset=True,
            )
            for share in (1.0, 0.2)
        }  # fmt: skip

        def once(
            module: torch.nn.Module, step: Callable[[], object], cursor: Iterator[tuple[torch.Tensor, ...]]
        ) -> float:
            ids, ends = next(cursor)
            begin = time.perf_counter()
            module(ids, ends).sum().backward()
            step()
            module.zero_grad()
            return time.perf_counter() - begin

        arms = {"plain": partial(once, plain, optimizer.step, iter(batches))}
        arms |= {str(share): partial(once, bag, bag.step, iter(batches)) for share, bag in tiered.items()}
        seconds = in_turn(arms, len(batches))
        for share in tiered:
            words, goal = f"step over nn.EmbeddingBag's, {name}, {share:.0%} fast", "<= 1.5" * (share == 1)
            yield figure(words, "x", ratios(seconds[str(share)][2:], seconds["plain"][2:]), goal)
