"""What replicas of hot and warm rows take off an all-to-all, by skew and rows; emulated.

One table of sequences: 512 samples a device of 1,000 lookups each, rows of 128 float16. Ours and row-wise
sharding are counted by the same formulas, which tests hold against counted bytes. Published are 85 % less
all-to-all bytes and almost 6 times less latency, of production tables whose skew is not said: so here is the
curve. Beside it, what is left of the gain once a device asks only once for each row of its batch.

`ShardedEmbedding` between 4 processes whose links are shaped: bytes and time of an iteration.

Each rank has a network namespace and a link of its own, held to a rate by a token bucket: links are shaped,
processors are this host's. All ranks are one host's to the policy, since their links are alike: row-wise
sharding as it is elsewhere (each lookup asks), row-wise with each row asked for once, and hot rows
replicated. Bytes are counted as they are given to torch.distributed, and held against those predicted for the
same batches.

Pooled tables are another matter: TorchRec's row-wise ``EmbeddingBagCollection`` (gloo, FBGEMM on the CPU)
sums rows where they lie, and sends a partial sum for each sample and rank; ours sends rows, each once, to who
sums them, or, where the bits of one table are not asked for, partial sums too. All train the same tables with
row-wise Adagrad; bytes are those of the interfaces.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from importlib.util import find_spec
from statistics import median
from typing import Any

import numpy as np

from benchmarks.harness.ranks import MBIT, interface_bytes, ranks
from benchmarks.harness.rows import Row, figure, left_out
from windtunnel.cluster.load import load_cluster
from windtunnel.cluster.model import Cluster
from windtunnel.data.embeddings import synthetic, traffic
from windtunnel.data.embeddings.model import EmbeddingTable
from windtunnel.data.embeddings.policy import POLICIES, Replication, ReplicationRequest
from windtunnel.data.embeddings.policy.replicas import decide, memory_of, rowwise, rowwise_memory

SOURCE = "FlexShard, arXiv 2301.02959, abstract"
CLUSTER = "a100-80:16x8"
SKEWS = (0.7, 0.9, 1.05, 1.2)
PUBLISHED = {"bytes": 0.85, "latency": 6.0}


def sequences(rows: int, skew: float) -> EmbeddingTable:
    ranks, shares = synthetic.zipf(rows, skew, points=256)
    return EmbeddingTable("items", rows, 128, "float16", 1000.0, 1.0, True, ranks, shares)


def flexshard_rows(quick: bool) -> Iterator[Row]:
    cluster = load_cluster(CLUSTER)
    for rows in (10_000_000,) if quick else (10_000_000, 100_000_000):
        for skew in SKEWS:
            label = f"{CLUSTER}, {rows / 1e6:g} M rows, Zipf {skew:g}"
            yield from _point(cluster, label, sequences(rows, skew))


def _point(cluster: Cluster, label: str, table: EmbeddingTable) -> Iterator[Row]:
    for distinct in (False, True):
        request = traffic.exchange(cluster, (table,), 512.0, distinct=distinct)
        began = time.process_time()
        ours = decide(request)
        took = time.process_time() - began
        cuts, flat = ours.tables[0], rowwise(request)
        least, moved = (_moved(request, placed) for placed in (ours, flat))
        faster = _seconds(cluster, request, flat) / _seconds(cluster, request, ours)
        memory = memory_of(request, ours) / rowwise_memory(request)
        decision = f"{cuts.hot:,} hot and {cuts.warm - cuts.hot:,} warm rows, decided in {took * 1e3:.0f} ms"
        less = f"{1 - least / moved:.1%} less all-to-all bytes; {memory:.2f} of its memory; {decision}"
        if distinct:
            name = f"{label}, each row asked for once: time of row-wise"
            yield figure(name, "x", emulated=faster, note=less)
            continue
        # not beside it as published: of what skew that was is not said
        published = {
            name: f"published {value:g}, skew not said ({SOURCE})" for name, value in PUBLISHED.items()
        }
        name = f"{label}: all-to-all bytes less than row-wise"
        yield figure(name, "share", emulated=1 - least / moved, note=f"{published['bytes']}; {decision}")
        yield figure(f"{label}: time of row-wise", "x", emulated=faster, note=published["latency"])
        smaller = memory <= 1 + 1e-9
        yield figure(f"{label}: of row-wise's memory", "x", goal="<= 1", emulated=memory, passed=smaller)


def _moved(request: ReplicationRequest, decision: Replication) -> float:
    sent = traffic.expected(request, decision)
    return float(sum(sent[phase].sum() for phase in traffic.ALL_TO_ALL))


def _seconds(cluster: Cluster, request: ReplicationRequest, decision: Replication) -> float:
    latency = (cluster.host.intra.latency, cluster.placement(range(cluster.world_size)).latency)
    return traffic.seconds(request, traffic.expected(request, decision), latency)


THEIRS, POOLING = "TorchRec's row-wise", "ours, each row asked for once"
SUMS = "ours, partial sums"
ROWWISE, OURS = "row-wise, each lookup asks", "flexshard, each lookup asks"
ARMS = {
    ROWWISE: ("row-wise", False),
    "row-wise, each row asked for once": ("row-wise", True),
    OURS: ("flexshard", False),
}
WORLD, SAMPLES, LOOKUPS, DIM = 4, 64, 200, 64
MBITS = 100
NAMES = {
    "bytes": "all-to-all bytes, flexshard less than row-wise",
    "latency": "row-wise's time over flexshard's",
}
TORCHREC = "torchrec.distributed.model_parallel"
POOLED = {1: 3200, 20: 160}
"""Rows that a sample looks up in each of `TABLES` tables, and samples of a rank."""
TABLES = 4


def exchange_rows(quick: bool) -> Iterator[Row]:
    rows, steps = (50_000, 2) if quick else (400_000, 5)
    with ranks("windtunnel.data.embeddings.live.sharded") as run:
        for skew in (1.05,) if quick else (0.8, 1.05, 1.2):
            results = run(f"{__name__}:on_rank", [rows, skew, steps], WORLD, MBITS * MBIT, 240.0)
            for arm, (name, distinct) in ARMS.items():
                yield from _rows(
                    f"Zipf {skew:g}, {arm}", [rank[arm] for rank in results], rows, skew, name, distinct
                )
            pair = [[rank[arm] for rank in results] for arm in (ROWWISE, OURS)]
            base, ours = (median(rank["seconds"] for rank in arm) for arm in pair)
            moved = [
                sum(sum(rank["sent"][phase]) for rank in arm for phase in traffic.ALL_TO_ALL) for arm in pair
            ]
            for measure, unit, value in (
                ("bytes", "share", 1 - moved[1] / moved[0]), ("latency", "x", base / ours)
            ):  # fmt: skip
                name = f"Zipf {skew:g}: {NAMES[measure]}"
                yield figure(name, unit, value, published=PUBLISHED[measure], source=SOURCE)
    yield from _pooled_rows(rows // TABLES, steps)


def _pooled_rows(rows: int, steps: int) -> Iterator[Row]:
    installed = find_spec("torchrec") is not None and find_spec("fbgemm_gpu") is not None
    if not installed:
        yield left_out("pooled tables, TorchRec's row-wise", "TorchRec or FBGEMM is not installed")
    with ranks("windtunnel.data.embeddings.live.sharded", *([TORCHREC] if installed else [])) as run:
        for pooling in POOLED:
            results = run(
                f"{__name__}:on_rank_pooled", [rows, pooling, steps, installed], WORLD, MBITS * MBIT, 240.0
            )
            for arm in results[0]:
                label, wire = (
                    f"{TABLES} tables pooled by {pooling}, {arm}",
                    sum(rank[arm]["wire"] for rank in results),
                )
                yield figure(f"{label}: bytes of an iteration, all ranks", "B", wire)
                yield figure(f"{label}: iteration", "s", (rank[arm]["seconds"] for rank in results))


def _rows(
    label: str, results: Sequence[dict[str, Any]], rows: int, skew: float, name: str, distinct: bool
) -> Iterator[Row]:
    request = _request(rows, skew, distinct)
    decision = POLICIES[name](request)
    assert isinstance(decision, Replication)
    batches = [{"items": _ranks(request, rank)} for rank in range(WORLD)]
    predicted = traffic.exact(request, decision, batches)
    counted = sum(sum(map(sum, rank["sent"].values())) for rank in results)
    total = int(sum(matrix.sum() for matrix in predicted.values()))
    wire = sum(rank["wire"] for rank in results) / counted - 1
    cuts = decision.tables[0]
    yield figure(
        f"{label}: bytes of an iteration, all ranks", "B", counted, "equal", emulated=total,
        note=f"{cuts.hot:,} hot rows; headers and acknowledgements beside them {wire:.1%}",
    )  # fmt: skip
    note, links = f"emulated: the links' time alone, {MBITS} Mb/s", traffic.seconds(request, predicted)
    seconds = [rank["seconds"] for rank in results]
    yield figure(f"{label}: iteration", "s", seconds, emulated=links, note=note)


def _request(rows: int, skew: float, distinct: bool) -> ReplicationRequest:
    points, shares = synthetic.zipf(rows, skew, points=128)
    table = EmbeddingTable(
        "items", rows, DIM, pooling=float(LOOKUPS), sequence=True, ranks=points, shares=shares
    )
    return ReplicationRequest((table,), 1, WORLD, MBITS * MBIT, MBITS * MBIT, float(SAMPLES), distinct)


def _ranks(request: ReplicationRequest, rank: int) -> np.ndarray[Any, np.dtype[np.int64]]:
    return synthetic.draw(request.tables[0], SAMPLES, np.random.default_rng([7, rank]))[1]


def on_rank(arguments: Any) -> dict[str, Any]:
    """Of every arm the median seconds of an iteration, and its bytes."""
    import torch
    import torch.distributed as dist

    from windtunnel.data.embeddings.live.sharded import ShardedEmbedding

    rows, skew, steps = arguments
    results = {}
    for arm, (name, distinct) in ARMS.items():
        request = _request(rows, skew, distinct)
        module = ShardedEmbedding(request, decide=name, optimizer=partial(torch.optim.Adagrad, lr=0.1))
        ids = torch.from_numpy(_ranks(request, dist.get_rank()))

        def once(module: ShardedEmbedding = module, ids: torch.Tensor = ids) -> None:
            module.sent.clear()
            module({"items": ids})["items"].sum().backward()
            module.step()

        results[arm] = {**_timed(once, steps), "sent": dict(module.sent)}
    return results


def on_rank_pooled(arguments: Any) -> dict[str, Any]:
    """The same of pooled tables, with TorchRec's row-wise sharding first where it is ``known``."""
    import torch
    import torch.distributed as dist

    from windtunnel.data.embeddings.live.optim import RowWiseAdagrad
    from windtunnel.data.embeddings.live.sharded import ShardedEmbedding

    rows, pooling, steps, installed = arguments
    points, shares = synthetic.zipf(rows, 1.05, points=128)
    tables = tuple(
        EmbeddingTable(f"t{at}", rows, DIM, pooling=float(pooling), ranks=points, shares=shares)
        for at in range(TABLES)
    )
    rng = np.random.default_rng([7, dist.get_rank()])
    drawn = {table.name: synthetic.draw(table, POOLED[pooling], rng) for table in tables}
    lengths = torch.from_numpy(np.stack([np.diff(offsets) for offsets, _ in drawn.values()]))
    lookups = {
        name: (torch.from_numpy(ids), torch.from_numpy(ends[:-1])) for name, (ends, ids) in drawn.items()
    }
    request = ReplicationRequest(tables, 1, WORLD, MBITS * MBIT, MBITS * MBIT, float(POOLED[pooling]))
    arms: dict[str, Callable[[], torch.Tensor]] = {}
    if installed:
        arms[THEIRS] = _torchrec(tables, lookups, lengths)

    def ours(module: ShardedEmbedding) -> torch.Tensor:
        sums = torch.cat(list(module(lookups).values()), 1)
        sums.sum().backward()
        module.step()
        return sums

    for arm in (POOLING, SUMS):
        module = ShardedEmbedding(
            replace(request, partial_sums=arm == SUMS), optimizer=partial(RowWiseAdagrad, lr=0.1),
            init={table.name: lambda ids: torch.ones(len(ids), DIM) for table in tables},
        )  # fmt: skip
        arms[arm] = partial(ours, module)
    results = {}
    for arm, once in arms.items():
        # rows begin as ones, so the first sums are how many rows there are: all arms do the same work
        assert torch.equal(once().detach()[:, ::DIM], lengths.t().float()), arm
        results[arm] = _timed(once, steps)
    return results


def _torchrec(
    tables: tuple[EmbeddingTable, ...], lookups: dict[str, tuple[Any, Any]], lengths: Any
) -> Callable[[], Any]:
    """An iteration of TorchRec's ``EmbeddingBagCollection``, row-wise."""
    import torch
    from fbgemm_gpu.split_embedding_configs import EmbOptimType
    from torchrec.distributed.embeddingbag import EmbeddingBagCollectionSharder
    from torchrec.distributed.model_parallel import DistributedModelParallel
    from torchrec.distributed.sharding_plan import construct_module_sharding_plan, row_wise
    from torchrec.distributed.types import ShardingPlan
    from torchrec.modules.embedding_configs import EmbeddingBagConfig
    from torchrec.modules.embedding_modules import EmbeddingBagCollection
    from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

    cpu, names = torch.device("cpu"), [table.name for table in tables]
    configs = [
        EmbeddingBagConfig(
            num_embeddings=table.rows, embedding_dim=DIM, name=table.name, feature_names=[table.name],
            init_fn=torch.nn.init.ones_,
        )
        for table in tables
    ]  # fmt: skip
    bags = EmbeddingBagCollection(tables=configs, device=cpu)
    sharder = EmbeddingBagCollectionSharder(
        fused_params={"optimizer": EmbOptimType.EXACT_ROWWISE_ADAGRAD, "learning_rate": 0.1}
    )
    plan = construct_module_sharding_plan(
        bags, {name: row_wise() for name in names}, sharder, WORLD, WORLD, "cpu"
    )
    sharded = DistributedModelParallel(bags, device=cpu, plan=ShardingPlan({"": plan}), sharders=[sharder])
    batch = KeyedJaggedTensor(
        keys=names, values=torch.cat([ids for ids, _ in lookups.values()]), lengths=lengths.flatten()
    )

    def once() -> Any:
        sums = sharded(batch).wait().values()
        sums.sum().backward()
        return sums

    return once


def _timed(once: Callable[[], object], steps: int) -> dict[str, Any]:
    """The median seconds of ``once`` on all ranks together, after a first time, and the bytes of the last."""
    import torch.distributed as dist

    seconds, before = [], 0
    for _ in range(steps + 1):
        dist.barrier()
        began, before = time.perf_counter(), interface_bytes()
        once()
        dist.barrier()
        seconds.append(time.perf_counter() - began)
    return {"seconds": median(seconds[1:]), "wire": interface_bytes() - before}
