"""What replicas of hot and warm rows take off an all-to-all, by skew, rows and cluster; emulated.

One table of sequences: 512 samples a device of 1,000 lookups each, rows of 128 float16. Ours and row-wise
sharding are counted by the same formulas, which tests hold against counted bytes. Published are 85 % less
all-to-all bytes and almost 6 times less latency, of production tables whose skew is not said: so here is the
curve. Beside it, what is left of the gain once a device asks only once for each row of its batch.
"""

from __future__ import annotations

import time
from collections.abc import Iterator

from benchmarks.harness.rows import Row, figure
from windtunnel.cluster.load import load_cluster
from windtunnel.cluster.model import Cluster
from windtunnel.data.embeddings import synthetic, traffic
from windtunnel.data.embeddings.model import EmbeddingTable
from windtunnel.data.embeddings.policy import Replication, ReplicationRequest
from windtunnel.data.embeddings.policy.replicas import decide, memory_of, rowwise, rowwise_memory

SOURCE = "FlexShard, arXiv 2301.02959, abstract"
CLUSTERS = ("a100-80:16x8", "h100-sxm:16x8", "a100-80:2x8")
SKEWS = (0.7, 0.9, 1.05, 1.2)
PUBLISHED = {"bytes": 0.85, "latency": 6.0}


def sequences(rows: int, skew: float) -> EmbeddingTable:
    ranks, shares = synthetic.zipf(rows, skew, points=256)
    return EmbeddingTable("items", rows, 128, "float16", 1000.0, 1.0, True, ranks, shares)


def flexshard_rows(quick: bool) -> Iterator[Row]:
    for number, name in enumerate(CLUSTERS[: 1 if quick else None]):
        cluster = load_cluster(name)
        for rows in (10_000_000,) if quick or number else (10_000_000, 100_000_000):
            for skew in SKEWS:
                label = f"{name}, {rows / 1e6:g} M rows, Zipf {skew:g}"
                yield from _point(cluster, label, sequences(rows, skew))


def _point(cluster: Cluster, label: str, table: EmbeddingTable) -> Iterator[Row]:
    for distinct in (False, True):
        seen = traffic.exchange(cluster, (table,), 512.0, distinct=distinct)
        began = time.process_time()
        ours = decide(seen)
        took = time.process_time() - began
        cuts, flat = ours.tables[0], rowwise(seen)
        kept, moved = (_moved(seen, one) for one in (ours, flat))
        faster = _seconds(cluster, seen, flat) / _seconds(cluster, seen, ours)
        held = memory_of(seen, ours) / rowwise_memory(seen)
        found = f"{cuts.hot:,} hot and {cuts.warm - cuts.hot:,} warm rows, decided in {took * 1e3:.0f} ms"
        less = f"{1 - kept / moved:.1%} less all-to-all bytes; {held:.2f} of its memory; {found}"
        if distinct:
            name = f"{label}, each row asked for once: time of row-wise"
            yield figure(name, "x", emulated=faster, note=less)
            continue
        # not beside it as published: of what skew that was is not said
        said = {name: f"published {one:g}, skew not said ({SOURCE})" for name, one in PUBLISHED.items()}
        name = f"{label}: all-to-all bytes less than row-wise"
        yield figure(name, "share", emulated=1 - kept / moved, note=f"{said['bytes']}; {found}")
        yield figure(f"{label}: time of row-wise", "x", emulated=faster, note=said["latency"])
        met = held <= 1 + 1e-9
        yield figure(f"{label}: of row-wise's memory", "x", goal="<= 1", emulated=held, met=met)


def _moved(seen: ReplicationRequest, decision: Replication) -> float:
    sent = traffic.expected(seen, decision)
    return float(sum(sent[phase].sum() for phase in traffic.ALL_TO_ALL))


def _seconds(cluster: Cluster, seen: ReplicationRequest, decision: Replication) -> float:
    latency = (cluster.host.intra.latency, cluster.placement(range(cluster.world_size)).latency)
    return traffic.seconds(seen, traffic.expected(seen, decision), latency)
