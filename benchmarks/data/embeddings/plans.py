"""RecShard beside its rivals: the paper's greedy ones, and TorchRec's own planners, on the same tables.

All plans are read by one twin, which knows nothing of who made them. TorchRec's planners get the tables' true
curves, as statistics of their caches, and a device's memory as their limit; of it they also hold buffers, so
what they leave for rows differs. Its caches are taken to hold the rows asked for most. They place tables
whole here (with columns as well, planning takes them six times as long, for worse plans by this twin).
"""

from __future__ import annotations

import logging
import time
from collections.abc import Iterator
from dataclasses import replace

import numpy as np

from benchmarks.figures import figure
from benchmarks.harness.rows import Row, left_out
from windtunnel.cluster.load import load_cluster
from windtunnel.cluster.model import Cluster
from windtunnel.data.embeddings import synthetic
from windtunnel.data.embeddings.model import Shard, Table, Tier
from windtunnel.data.embeddings.policy import Placed, Wanted, decide
from windtunnel.data.embeddings.policy.pieces import stored_bytes
from windtunnel.data.embeddings.twin import Iteration, iteration, tiers

CLUSTER = "a100-80:2x8"
BATCH = 16_384
GRANTED = 24e9
"""Bytes of a device's memory for rows in the paper (section 6)."""
SOURCE = "RecShard, ASPLOS 2022, abstract: on average, models that do not fit, 16 GPUs"
PUBLISHED = {"slow accesses": 87.0, "balance": 12.0, "reading and updating": 6.0}
GREEDY = ("size", "lookup", "size-lookup")


def _tables(name: str, count: int | None = None, values: float = 1.0) -> tuple[Table, ...]:
    """With the state of a row-wise optimiser."""
    return tuple(replace(one, state_bytes=4) for one in synthetic.tables(name, values=values)[:count])


def _decided(wanted: Wanted) -> tuple[Placed, float]:
    begin = time.perf_counter()
    return decide(wanted), time.perf_counter() - begin


def _work(found: Iteration) -> float:
    return found.lookups + found.updates


def planner_rows(quick: bool) -> Iterator[Row]:
    cluster = load_cluster(CLUSTER)
    for name in ("rm3",) if quick else ("rm2", "rm3"):
        tables = _tables(name)
        total = sum(one.total_bytes for one in tables)
        # 24 GB, as in the paper, hold all rows of rm2 that are ever asked for: less shows what cuts gain
        for label, granted in (("24 GB", GRANTED), ("5% fast", 0.05 * total / cluster.world_size)):
            yield from _greedy(cluster, f"{name}, {label}", tables, granted)
    # all rows used, or many never asked for: it hangs on that whether the scale-up planner ties
    used = _tables("rm1", 40 if quick else 100, values=10.0)
    yield from _torchrec(load_cluster("a100-80:1x8"), f"{len(used)} tables, all rows used", used, 0.2)
    some = _tables("rm3", 60 if quick else None)
    yield from _torchrec(cluster, f"{len(some)} tables of rm3", some, 0.1)


def _greedy(cluster: Cluster, label: str, tables: tuple[Table, ...], granted: float) -> Iterator[Row]:
    wanted = Wanted(tables, cluster.world_size, *tiers(cluster, granted), BATCH)
    ours, planning = _decided(wanted)
    mine = iteration(cluster, wanted, ours)
    yield figure("planners", f"{label}: planning", "s", planning, note=ours.reason)
    for policy in GREEDY:
        plan = decide(replace(wanted, policy=policy))
        theirs = iteration(cluster, wanted, plan)
        ratios = {
            "slow accesses": (theirs.raw[1], mine.raw[1]),
            "slow rows": (theirs.distinct[1], mine.distinct[1]),
            "balance": (_spread(plan), _spread(ours)), "reading and updating": (_work(theirs), _work(mine)),
            "iteration": (theirs.seconds, mine.seconds),
        }  # fmt: skip
        for what, (other, own) in ratios.items():
            published = PUBLISHED.get(what) if granted == GRANTED else None
            shown = f"{label}: {what}, {policy} over recshard"
            if not own:
                yield left_out("planners", shown, "recshard has no slow access at all")
                continue
            goal = f"> {published:g}" if published else ""
            yield figure(
                "planners", shown, "x", goal=goal, emulated=other / own, published=published, source=SOURCE
            )


def _spread(plan: Placed) -> float:
    """The slowest device's reading over the fastest's."""
    return plan.slowest / max(min(plan.seconds), 1e-9)


def _torchrec(cluster: Cluster, words: str, tables: tuple[Table, ...], share: float) -> Iterator[Row]:
    """``share``: of the tables' bytes, the fast memory of all devices."""
    total = sum(one.total_bytes for one in tables)
    fast, slow = tiers(cluster, share * total / cluster.world_size)
    wanted = Wanted(tables, cluster.world_size, fast, replace(slow, capacity=float(total)), BATCH)
    try:
        import torchrec  # noqa: F401
    except (ImportError, OSError) as error:
        yield left_out("planners", "TorchRec's planners", f"TorchRec cannot be imported: {error}")
        return
    for name, scaleup in (("TorchRec's default", False), ("TorchRec's scale-up with true curves", True)):
        plan, planning = _planned_by_torchrec(cluster, wanted, scaleup)
        used = float(sum(plan.fast_bytes))
        # the same bytes in all, or the same limit of each device: then what theirs leave empty counts
        same, _ = _decided(replace(wanted, fast=Tier(used / cluster.world_size, fast.bandwidth)))
        full, own = _decided(wanted)
        found, equal, more = (iteration(cluster, wanted, one) for one in (plan, same, full))
        label = f"{words}, {name}"
        yield figure("planners", f"{label}: planning", "s", planning, note=f"recshard: {own:.1f} s")
        part = used / (fast.capacity * cluster.world_size)
        yield figure("planners", f"{label}: fast bytes of those granted", "", emulated=part)
        for basis, ours in (("same fast bytes", equal), ("same memory", more)):
            for what, theirs, mine in (
                ("slow accesses", found.raw[1], ours.raw[1]),
                ("slow rows", found.distinct[1], ours.distinct[1]),
                ("slowest over mean device", found.balance[1], ours.balance[1]),
                ("reading and updating", _work(found), _work(ours)),
                ("iteration", found.seconds, ours.seconds),
            ):
                ratio = theirs / mine if mine else None
                yield figure("planners", f"{label}: {what} over recshard's, {basis}", "x", emulated=ratio)


def _planned_by_torchrec(cluster: Cluster, wanted: Wanted, scaleup: bool) -> tuple[Placed, float]:
    """Its plan as one of ours, and seconds of planning."""
    import torch
    from fbgemm_gpu.split_embedding_configs import EmbOptimType
    from torchrec.distributed.embeddingbag import EmbeddingBagCollectionSharder
    from torchrec.distributed.planner import EmbeddingShardingPlanner, ParameterConstraints, Topology
    from torchrec.distributed.planner.proposers import EmbeddingOffloadScaleupProposer
    from torchrec.distributed.planner.storage_reservations import FixedPercentageStorageReservation
    from torchrec.distributed.types import CacheParams
    from torchrec.modules.embedding_configs import EmbeddingBagConfig
    from torchrec.modules.embedding_modules import EmbeddingBagCollection

    from windtunnel.data.embeddings.torchrec import cache_statistics

    named = {one.name: one for one in wanted.tables}
    cache = {
        one.name: CacheParams(load_factor=0.02, stats=cache_statistics(one, wanted.batch))
        for one in wanted.tables
    }
    constraints = {
        name: ParameterConstraints(
            sharding_types=["table_wise"], pooling_factors=[one.lookups],
            compute_kernels=["fused_uvm_caching"] if scaleup else None,
            cache_params=cache[name] if scaleup else None,
        )
        for name, one in named.items()
    }  # fmt: skip
    configs = [
        EmbeddingBagConfig(
            num_embeddings=one.rows, embedding_dim=one.dim, name=name, feature_names=[name]
        )
        for name, one in named.items()
    ]  # fmt: skip
    sharder = EmbeddingBagCollectionSharder(fused_params={"optimizer": EmbOptimType.EXACT_ROWWISE_ADAGRAD})
    logging.disable(logging.WARNING)  # a line for each table
    try:
        planner = EmbeddingShardingPlanner(
            topology=Topology(
                world_size=wanted.devices, local_world_size=cluster.devices_per_host, compute_device="cuda",
                hbm_cap=int(wanted.fast.capacity), ddr_cap=int(wanted.slow.capacity),
                hbm_mem_bw=wanted.fast.bandwidth / 1e3, hbm_to_ddr_mem_bw=wanted.slow.bandwidth / 1e3,
            ),
            batch_size=wanted.batch // wanted.devices, constraints=constraints, debug=False,
            storage_reservation=FixedPercentageStorageReservation(0.0),
            proposer=EmbeddingOffloadScaleupProposer() if scaleup else None,
        )  # fmt: skip
        begin = time.perf_counter()
        made = planner.plan(EmbeddingBagCollection(tables=configs, device=torch.device("meta")), [sharder])
        planning = time.perf_counter() - begin
    finally:
        logging.disable(logging.NOTSET)
    [found] = made.plan.values()
    shards, fast = list[Shard](), np.zeros(wanted.devices)
    for name, one in found.items():
        cached = one.cache_params.load_factor if one.cache_params else None
        share = {"fused": 1.0, "fused_uvm": 0.0}.get(one.compute_kernel, 0.2 if cached is None else cached)
        [part] = one.sharding_spec.shards
        table, device = named[name], part.placement.rank()
        shards.append(Shard(name, device, 0, table.dim, int(share * table.rows)))
        fast[device] += shards[-1].fast_rows * stored_bytes(table, table.dim)
    nothing = (0.0,) * wanted.devices
    return Placed(
        tuple(shards), nothing, tuple(map(int, fast)), (0,) * wanted.devices, 0.0, 0.0, 0.0, "torchrec", ""
    ), planning


def milp_rows(quick: bool) -> Iterator[Row]:
    """What is proven, at growing sizes; and how near the search comes."""
    for count, devices in ((24, 4), (50, 2), *(() if quick else ((50, 4), (30, 8)))):
        tables = _tables("rm2", count)
        total = sum(one.total_bytes for one in tables)
        wanted = Wanted(tables, devices, Tier(0.1 * total / devices, 2e12), Tier(float(total), 26e9), BATCH)
        plan, seconds = _decided(wanted)
        searched, quickly = _decided(replace(wanted, policy="search"))
        label, solved = f"{count} tables on {devices} devices", count == 50
        note = f"{plan.reason}; solver: {plan.solver}, {len(plan.shards)} shards"
        goal = "<= 1 ppm" if solved else ""
        yield figure("milp", f"{label}: gap", "ppm", goal=goal, emulated=plan.gap * 1e6, note=note)
        yield figure("milp", f"{label}: time", "s", seconds, "<= 60 s" if solved else "")
        name, over = f"{label}: search over the best", searched.slowest / plan.slowest - 1
        yield figure("milp", name, "", goal="<= 2%", emulated=over, note=f"{quickly:.2f} s")


def scale_rows(quick: bool) -> Iterator[Row]:
    """2,000 tables: those of dlrm2021 and rm1, again and again."""
    tables = tuple(
        replace(one, name=f"{one.name}-{place}")
        for place, one in enumerate((*_tables("dlrm2021"), *_tables("rm1"), *_tables("dlrm2021")))
    )[:2000]
    total = sum(one.total_bytes for one in tables)
    for devices in (64,) if quick else (64, 256, 1024):
        wanted = Wanted(tables, devices, Tier(0.1 * total / devices, 2e12), Tier(float(total), 26e9), BATCH)
        plan, seconds = _decided(wanted)
        label = f"{len(tables)} tables on {devices} devices"
        note = f"{len(plan.shards)} shards; {plan.reason}"
        yield figure("scale", f"{label}: time", "s", seconds, "<= 60 s")
        yield figure("scale", f"{label}: above the bounds", "", emulated=plan.gap, note=note)
