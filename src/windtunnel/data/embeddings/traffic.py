"""What spread tables move between devices in an iteration: exactly for given batches, on average by formula.

Phases, each an entry of a `Sent`: ``counts`` of what follows; ``ids``, requests for rows; ``vectors``, what
they are answered with; ``gradients`` to the rows' devices; ``sums`` of hot and warm rows' gradients, from
host to host and back; ``copies`` of hot rows' sums to all devices of a host. Bytes are what is handed to the
network, without its headers.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from windtunnel.cluster.model import Cluster
from windtunnel.data.embeddings.layout import layouts
from windtunnel.data.embeddings.model import EmbeddingTable
from windtunnel.data.embeddings.policy.replicas import (
    INDEX_BYTES,
    Replication,
    ReplicationRequest,
    crossing,
    memory_of,
    segments,
    tiers_of,
)

PHASES = ("counts", "ids", "vectors", "gradients", "sums", "copies")
ALL_TO_ALL = ("ids", "vectors", "gradients")
COUNT_BYTES = 8
HEAD = 1
"""Counts that go before a request's: whether the sender's batch is wrong."""
SentRows = dict[str, NDArray[Any]]
"""Of each phase the bytes sent, (devices, 2) or (2,): inside the host, and to others."""


def exchange(
    cluster: Cluster, tables: tuple[EmbeddingTable, ...], samples: float, **more: Any
) -> ReplicationRequest:
    """What spreading ``tables`` over all devices of a cluster asks: line rates, less what links lose."""
    place = cluster.placement(range(cluster.world_size))
    inside = cluster.host.intra.bandwidth if place.intra is None else place.intra_bandwidth
    inter = place.inter_bandwidth or cluster.host.nic_bandwidth
    return ReplicationRequest(
        tables, cluster.hosts, cluster.devices_per_host, inside * cluster.host.intra.efficiency,
        inter * cluster.host.nic.efficiency, samples, **more,
    )  # fmt: skip


def exact(
    exchange: ReplicationRequest, decision: Replication, batches: Sequence[Mapping[str, NDArray[np.int64]]],
    offsets: Sequence[Mapping[str, NDArray[np.int64]]] = (),
) -> SentRows:  # fmt: skip
    """Bytes that every device sends in one iteration. ``batches``: of each device the ranks that it looks
    up, by table; one that is absent is empty. ``offsets``: likewise where bags begin, of tables of which sums
    cross."""
    sent = {phase: np.zeros((exchange.world, 2), np.int64) for phase in PHASES}
    everyone = np.arange(exchange.world)
    host = everyone // exchange.devices
    where = layouts(
        decision.tables, [table.rows for table in exchange.tables], exchange.hosts, exchange.devices
    )
    for table, layout in zip(exchange.tables, where, strict=True):
        by_host = [np.empty(0, np.int64)] * exchange.hosts
        for device, batch in enumerate(batches):
            ranks = np.asarray(batch.get(table.name, ()), np.int64)
            once = np.unique(ranks)
            requested = once if exchange.distinct else ranks
            requested = requested[requested >= layout.hot]
            by_host[host[device]] = np.union1d(by_host[host[device]], once[once < layout.warm])
            to_all, hot = (
                np.bincount(layout.destination(some, int(host[device])), minlength=exchange.world)
                for some in (requested, once[once < layout.hot])
            )
            requests, answers, gradients = to_all, to_all, to_all + hot
            if exchange.sums(table):
                to = layout.destination(ranks, int(host[device]))
                bags = np.searchsorted(offsets[device].get(table.name, ()), np.arange(len(ranks)), "right")
                requests = np.bincount(to, minlength=exchange.world)
                parts = np.unique(np.stack([to, bags]), axis=1)[0]
                answers = gradients = np.bincount(parts, minlength=exchange.world)
            for peer in range(exchange.world):
                if peer != device:
                    link = int(host[peer] != host[device])
                    sent["ids"][device, link] += requests[peer] * INDEX_BYTES
                    sent["vectors"][peer, link] += answers[peer] * table.row_bytes
                    sent["gradients"][device, link] += gradients[peer] * (table.row_bytes + INDEX_BYTES)
        if layout.warm == 0:
            continue
        distinct_rows = np.empty(0, np.int64)
        forth = []
        for rows in by_host:
            distinct_rows = np.union1d(distinct_rows, rows)
            forth.append(
                np.bincount((distinct_rows + layout.number) % exchange.devices, minlength=exchange.devices)
            )
        hot = np.bincount(
            (distinct_rows[distinct_rows < layout.hot] + layout.number) % exchange.devices,
            minlength=exchange.devices,
        )
        vector = table.row_bytes + INDEX_BYTES
        for number in range(exchange.hosts):
            own = slice(number * exchange.devices, (number + 1) * exchange.devices)
            sent["sums"][own, 1] += vector * forth[number] * (number < exchange.hosts - 1)
            sent["sums"][own, 1] += vector * forth[-1] * (number > 0)
            sent["copies"][own, 0] += vector * hot * (exchange.devices - 1)
    _count(exchange, decision, sent["counts"])
    return sent


def _count(exchange: ReplicationRequest, decision: Replication, counts: NDArray[np.int64]) -> None:
    """Bytes of the counts, which depend on no batch."""
    of_tables = COUNT_BYTES * len(exchange.tables)
    both = 3 * of_tables + HEAD * COUNT_BYTES  # of requests; of gradients, with which tables step
    counts += both * np.array([exchange.devices - 1, exchange.world - exchange.devices])
    if any(table.warm for table in decision.tables):
        host = np.arange(exchange.world) // exchange.devices
        counts[:, 1] += of_tables * exchange.stripes * ((host > 0).astype(int) + (host < exchange.hosts - 1))
    if any(table.hot for table in decision.tables):
        counts[:, 0] += of_tables * (exchange.devices - 1)


def expected(exchange: ReplicationRequest, decision: Replication) -> SentRows:
    """Bytes that a device sends on average, if every lookup is drawn for itself."""
    sent = {phase: np.zeros(2) for phase in PHASES}
    for table, cuts in zip(exchange.tables, decision.tables, strict=True):
        rows, p = segments(table)
        crosses, tiers = crossing(exchange, table, p), tiers_of(rows, cuts)[:, None]
        vector = table.row_bytes + INDEX_BYTES
        if exchange.sums(table):  # bags of ``pooling`` rows, which every device has alike
            peers = exchange.samples * np.array([exchange.devices - 1, exchange.world - exchange.devices])
            parts = table.coverage * (1 - (1 - 1 / exchange.world) ** table.pooling) * peers
            sent["ids"] += INDEX_BYTES * table.lookups / exchange.world * peers
            sent["vectors"] += table.row_bytes * parts
            sent["gradients"] += vector * parts
            continue
        for phase, kind, size in (
            ("ids", crosses.requests, INDEX_BYTES), ("vectors", crosses.requests, table.row_bytes),
            ("gradients", crosses.gradients, vector), ("sums", crosses.sums, vector),
            ("copies", crosses.copies, vector),
        ):  # fmt: skip
            sent[phase] += size * (kind * tiers).sum((0, 2))
    counts = np.zeros((exchange.world, 2), np.int64)
    _count(exchange, decision, counts)
    sent["counts"] += counts.mean(0)
    return sent


def seconds(exchange: ReplicationRequest, sent: SentRows, latency: tuple[float, float] = (0.0, 0.0)) -> float:
    """Modelled time of an iteration's exchange, the links of the busiest device being busy all the time.
    ``latency``: of a message inside a host, and between hosts. Sums wait for the first parts of them; what
    devices compute is not counted."""
    pace = np.array([1 / exchange.intra, 1 / exchange.inter])
    total = 0.0
    for phase, amounts in sent.items():
        if not np.any(amounts):
            continue
        busiest = float((np.atleast_2d(amounts) * pace).sum(1).max())
        if phase == "sums":
            filling = (exchange.stripes + max(0, exchange.hosts - 2)) / exchange.stripes
            total += busiest * filling + 2 * (exchange.hosts - 1) * latency[1]
        elif phase != "counts":  # they go with the latency of what they count
            total += busiest + max(latency[0] * (exchange.devices > 1), latency[1] * (exchange.hosts > 1)) * 2
    return total


def cost(observation: ReplicationRequest, decision: Replication) -> dict[str, float]:
    """What is expected of an iteration: modelled seconds, bytes of all devices, memory of one."""
    sent = expected(observation, decision)
    inside, between = (float(sum(amounts[link] for amounts in sent.values())) for link in (0, 1))
    return {
        "seconds": seconds(observation, sent),
        "bytes_inside_hosts": inside * observation.world,
        "bytes_between_hosts": between * observation.world,
        "memory_bytes": memory_of(observation, decision),
    }
