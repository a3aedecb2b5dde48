"""An iteration of the embedding tables of a plan on a cluster that is not there.

Tables are sharded by tables or columns, samples by devices. Per iteration, every device

1. gets the ids of its shards' lookups from all devices, 8 bytes each;
2. reads the row of every lookup from the tier where it lies, and sums it for its sample;
3. sends each device the sums of its samples, and gets their gradients back (the same bytes);
4. reads a gradient for each lookup from fast memory, and reads and writes each row that was asked for, with
   its optimiser's state, once: as fused kernels sort a batch's ids before they update.

The two tiers of a device are read one after the other, as the policy has it; so it is an upper bound where
kernels overlap them. Exchanges take the busiest device's bytes over its links, those inside hosts and between
them at the same time. Dense layers are not counted. All figures are emulated.

The slow tier is host memory over PCIe (UVM). What hosts have of it is in no catalogue: 128 GB a device unless
said, as RecShard's servers have (section 6).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from windtunnel.cluster.model import Cluster
from windtunnel.data.embeddings import traffic
from windtunnel.data.embeddings.model import ITEM_BYTES, EmbeddingTable, MemoryTier, TableShard
from windtunnel.data.embeddings.policy import (
    Decision,
    Observation,
    PlacementRequest,
    Replication,
    ReplicationRequest,
    TablePlacement,
)
from windtunnel.data.embeddings.policy.pieces import stored_bytes

HOST_MEMORY = 128e9
FAST_SHARE = 0.3
"""Of a device's memory, for rows: 24 of 80 GB, as the paper grants."""
ID_BYTES = 8
Floats = NDArray[np.float64]


def tiers(
    cluster: Cluster, fast: float | None = None, host: float | None = None
) -> tuple[MemoryTier, MemoryTier]:
    """Fast and slow memory of a device; ``fast`` and ``host``: bytes of them for rows."""
    device, pcie = cluster.host.device, cluster.host.pcie
    return (
        MemoryTier(FAST_SHARE * device.memory_bytes if fast is None else fast, device.memory_bandwidth),
        MemoryTier(HOST_MEMORY if host is None else host, pcie.bandwidth * pcie.efficiency),
    )


@dataclass(frozen=True, eq=False)
class Accesses:
    """Of each shard, for the fast tier and the slow one (shards, 2): ``raw``, rows read, one a lookup;
    ``distinct``, rows among them. A row of a shard of some columns counts as those columns' share of one."""

    raw: Floats
    distinct: Floats


def accesses(tables: Sequence[EmbeddingTable], shards: Sequence[TableShard], batch: int) -> Accesses:
    """What an average batch asks of the shards: one to come, where the tables have samples that were held out
    of the counting. Of those all that ask for rows that were not counted are slow, unless all rows are fast.
    """
    named = {table.name: table for table in tables}
    raw, distinct = np.zeros((len(shards), 2)), np.zeros((len(shards), 2))
    for place, shard in enumerate(shards):
        table = named[shard.table]
        (ranks, shares), fast_rows = table.curve(), shard.fast_rows
        if (held_out := table.held_out) is not None:
            ranks, shares = np.array(held_out.ranks, float), np.array(held_out.shares)
            fast_rows = min(fast_rows, held_out.counted) if fast_rows < table.rows else fast_rows
        counts, rows = batch * table.lookups * np.diff(shares), np.diff(ranks)
        fast = np.clip((fast_rows - ranks[:-1]) / rows, 0, 1)
        part = (shard.last - shard.first) / table.dim
        # of rows wanted alike, each stays unasked with the same probability
        expected = rows * -np.expm1(-counts / rows)
        for tier, share in enumerate((fast, 1 - fast)):
            raw[place, tier] = part * (counts * share).sum()
            distinct[place, tier] = part * (expected * share).sum()
    return Accesses(raw, distinct)


@dataclass(frozen=True)
class Iteration:
    """Emulated seconds of an iteration: ``lookups`` and ``updates`` of the slowest device, ``exchange`` of
    the busiest links. ``by_device``: lookups and updates of each. Accesses by tier, fast and slow, of all
    devices: ``raw`` and ``distinct``. ``sent``: bytes that all devices send, inside hosts and between them.
    """

    batch: int
    lookups: float
    updates: float
    exchange: float
    by_device: tuple[float, ...]
    raw: tuple[float, float]
    distinct: tuple[float, float]
    sent: tuple[float, float]

    @property
    def seconds(self) -> float:
        return self.lookups + self.updates + self.exchange

    @property
    def throughput(self) -> float:
        """Samples a second."""
        return self.batch / self.seconds

    @property
    def balance(self) -> tuple[float, float]:
        """The slowest device's time over the fastest's, and over the mean."""
        times = np.array(self.by_device)
        return float(times.max() / max(times.min(), 1e-12)), float(times.max() / times.mean())


def iteration(cluster: Cluster, request: PlacementRequest, plan: TablePlacement) -> Iteration:
    """An average one on ``cluster``, whose devices are the plan's."""
    shards, named = plan.shards, {table.name: table for table in request.tables}
    mine = [named[shard.table] for shard in shards]
    touched = accesses(request.tables, shards, request.batch)
    device = np.array([shard.device for shard in shards])
    width = np.array([shard.last - shard.first for shard in shards])
    item = np.array([ITEM_BYTES[table.dtype] for table in mine])
    stored = np.array([stored_bytes(table, int(some)) for table, some in zip(mine, width, strict=True)])
    # accesses count parts of rows: back to reads of the shard
    part = (width / np.array([table.dim for table in mine]))[:, None]
    reads, rows = touched.raw / part, touched.distinct / part
    pace = 1 / np.array([request.fast.bandwidth, request.slow.bandwidth])
    lookups = (reads * (width * item)[:, None]) @ pace
    updates = (rows * 2 * stored[:, None]) @ pace + reads.sum(1) * width * item * pace[0]
    ahead, back = (np.bincount(device, some, plan.devices) for some in (lookups, updates))
    samples = request.batch / plan.devices
    requests = np.bincount(device, reads.sum(1) * ID_BYTES / plan.devices, plan.devices)
    pooled = ~np.array([table.sequence for table in mine])
    vectors = np.where(pooled, samples, reads.sum(1) / plan.devices) * width * item
    answers = np.bincount(device, vectors, plan.devices)
    (of_ids, ids), (of_sums, sums) = (_exchange(cluster, some) for some in (requests, answers))
    return Iteration(
        request.batch, float(ahead.max()), float(back.max()), of_ids + 2 * of_sums,
        tuple(map(float, ahead + back)),
        _pair(touched.raw.sum(0)), _pair(touched.distinct.sum(0)), _pair(ids + 2 * sums),
    )  # fmt: skip


def _pair(two: Floats) -> tuple[float, float]:
    return float(two[0]), float(two[1])


def _exchange(cluster: Cluster, between: NDArray[Any]) -> tuple[float, Floats]:
    """``between``: bytes that each device exchanges with any one of the others, as the only one to send or
    the only one to get them. Returns seconds, and the bytes sent inside hosts and between them."""
    world, inside = cluster.world_size, cluster.devices_per_host
    if world == 1:
        return 0.0, np.zeros(2)
    place, total = cluster.placement(range(world)), float(between.sum())
    seconds, sent = 0.0, list[float]()
    in_hosts = between.reshape(cluster.hosts, inside).sum(1).repeat(inside)
    for peers, theirs, rate in (
        (inside - 1, in_hosts - between, place.intra_bandwidth * cluster.host.intra.efficiency),
        (world - inside, total - in_hosts, place.inter_bandwidth * cluster.host.nic.efficiency),
    ):
        sent.append(total * peers)
        if peers:
            seconds = max(seconds, float(np.maximum(between * peers, theirs).max()) / rate)
    return seconds + place.latency, np.array(sent)


def cost(observation: Observation, decision: Decision) -> dict[str, float]:
    """What an average batch takes: modelled seconds of the slowest device, slow accesses, and the balance; of
    tables that are spread by rows what `traffic.cost` says."""
    if isinstance(observation, ReplicationRequest):
        assert isinstance(decision, Replication)
        return traffic.cost(observation, decision)
    assert isinstance(decision, TablePlacement)
    touched = accesses(observation.tables, decision.shards, observation.batch)
    times = np.array(decision.seconds)
    return {
        "seconds": decision.slowest,
        "slow_accesses": float(touched.raw[:, 1].sum()),
        "slow_rows": float(touched.distinct[:, 1].sum()),
        "slowest_over_mean": float(times.max() / times.mean()) if times.any() else 1.0,
    }
