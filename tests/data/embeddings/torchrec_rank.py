"""A rank of two: TorchRec's planner reads our statistics, and a DLRM of its models is sharded by our plan."""

from __future__ import annotations

import copy
from dataclasses import replace

import numpy as np
import torch
import torch.distributed as dist
from torchrec.distributed.embedding_types import EmbeddingComputeKernel
from torchrec.distributed.embeddingbag import EmbeddingBagCollectionSharder
from torchrec.distributed.model_parallel import DistributedModelParallel
from torchrec.distributed.planner import EmbeddingShardingPlanner, ParameterConstraints, Topology
from torchrec.distributed.planner.proposers import EmbeddingOffloadScaleupProposer
from torchrec.distributed.planner.storage_reservations import (
    FixedPercentageStorageReservation,
    HeuristicalStorageReservation,
)
from torchrec.distributed.sharding_plan import (
    column_wise,
    construct_module_sharding_plan,
    data_parallel,
    table_wise,
)
from torchrec.distributed.types import CacheParams, ShardingPlan
from torchrec.models.dlrm import DLRM
from torchrec.modules.embedding_configs import EmbeddingBagConfig
from torchrec.modules.embedding_modules import EmbeddingBagCollection
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from windtunnel.data.embeddings import synthetic
from windtunnel.data.embeddings.model import EmbeddingTable, MemoryTier
from windtunnel.data.embeddings.policy import PlacementRequest, decide
from windtunnel.data.embeddings.torchrec import cache_statistics, sharding_plan, shardings

DIM, SAMPLES, WORLD = 16, 8, 2


def zipf(name: str, rows: int, pooling: float) -> EmbeddingTable:
    ranks, shares = synthetic.zipf(rows, 1.05)
    return EmbeddingTable(name, rows, DIM, pooling=pooling, ranks=ranks, shares=shares)


TABLES = (zipf("giant", 4000, 60.0), zipf("b", 500, 3.0), zipf("c", 300, 2.0), zipf("d", 200, 1.0))
WANTED = PlacementRequest(
    TABLES, WORLD, MemoryTier(60_000, 1e12), MemoryTier(1e6, 1e10), SAMPLES * WORLD, columns=4
)


def rows_values(weight: torch.Tensor) -> torch.Tensor:
    """Values by row alone, so that a shard of columns begins as the whole table does."""
    values = (torch.arange(len(weight)) % 7 / 7.0)[:, None]
    with torch.no_grad():  # a rank without a shard has no rows and no columns
        return weight.copy_(values.expand_as(weight)) if len(weight) else weight


def collection(tables: tuple[EmbeddingTable, ...], device: str) -> EmbeddingBagCollection:
    configs = [
        EmbeddingBagConfig(
            num_embeddings=table.rows, embedding_dim=table.dim, name=table.name, feature_names=[table.name],
            init_fn=rows_values if device == "cpu" else None,
        )
        for table in tables
    ]  # fmt: skip
    return EmbeddingBagCollection(tables=configs, device=torch.device(device))


def planner_takes_our_statistics() -> None:
    tables = tuple(replace(table, rows=table.rows) for table in TABLES)
    for reservation in (FixedPercentageStorageReservation(0.0), HeuristicalStorageReservation(0.05)):
        planner = EmbeddingShardingPlanner(
            topology=Topology(
                world_size=4, compute_device="cuda", hbm_cap=600_000, ddr_cap=10**9, local_world_size=4
            ),
            batch_size=SAMPLES, storage_reservation=reservation, debug=False,
            proposer=EmbeddingOffloadScaleupProposer(),
            constraints={
                table.name: ParameterConstraints(
                    compute_kernels=[EmbeddingComputeKernel.FUSED_UVM_CACHING.value],
                    sharding_types=["table_wise"], pooling_factors=[table.pooling],
                    cache_params=CacheParams(load_factor=0.1, stats=cache_statistics(table, 4 * SAMPLES)),
                )
                for table in tables
            },
        )  # fmt: skip
        plan = planner.plan(collection(tables, "meta"), [EmbeddingBagCollectionSharder()])
        [sharding] = plan.plan.values()
        kinds = {name: (entry.compute_kernel, entry.cache_params) for name, entry in sharding.items()}
        # it has memory to spare, and gives it to caches by what they would miss
        assert any(kernel == "fused" or cache.load_factor > 0.1 for kernel, cache in kinds.values()), kinds


def statistics_are_a_curve() -> None:
    curve = cache_statistics(TABLES[0], 64)
    missed = [curve.expected_miss_rate(float(share)) for share in np.linspace(0, 1, 21)]
    assert missed[0] == 1 and missed[-1] == 0 and (np.diff(missed) < 0).all()
    # a cache of a tenth misses less than a tenth less
    assert 0 < curve.expected_miss_rate(0.1) < 0.9 and 0 < curve.cacheability < 0.5
    assert 0 < curve.expected_lookups <= 64 * 60


def plans_are_those_that_torchrec_constructs() -> None:
    plan, kernels = decide(WANTED), set[str]()
    for device in ("cpu", "cuda"):
        sharding = shardings(TABLES, plan, device)
        kernels |= {entry.compute_kernel for entry in sharding.values()}
        ours = sharding_plan(sharding, device)
        wanted = {
            name: table_wise(entry.ranks[0], compute_kernel=entry.compute_kernel)
            if entry.sharding_type == "table_wise"
            else column_wise(ranks=[*entry.ranks], size_per_rank=None, compute_kernel=entry.compute_kernel)
            for name, entry in sharding.items()
        }
        theirs = construct_module_sharding_plan(
            collection(TABLES, "meta"), wanted, EmbeddingBagCollectionSharder(), WORLD, WORLD, device
        )
        for name, entry in theirs.items():
            mine = ours[name]
            assert (mine.sharding_type, mine.compute_kernel, mine.ranks) == (
                entry.sharding_type, entry.compute_kernel, entry.ranks,
            ), name  # fmt: skip
            assert mine.sharding_spec == entry.sharding_spec, name
    assert kernels >= {"fused", "fused_uvm_caching"}, kernels


def a_dlrm_is_sharded_as_planned() -> None:
    tables = (*TABLES, zipf("shared", 50, 1.0))
    bags = collection(tables, "cpu")
    torch.manual_seed(0)
    whole = DLRM(bags, dense_in_features=4, dense_arch_layer_sizes=[8, DIM], over_arch_layer_sizes=[8, 1])
    torch.nn.init.constant_(whole.over_arch.model[-1].bias, 0.1)
    model = copy.deepcopy(whole)
    sharding = shardings(TABLES, decide(WANTED), "cpu")
    assert sharding["giant"].sharding_type == "column_wise" and sharding["b"].sharding_type == "table_wise"
    plan = sharding_plan(sharding, "cpu")
    plan |= construct_module_sharding_plan(
        collection(tables[-1:], "cpu"), {"shared": data_parallel()}, EmbeddingBagCollectionSharder(), WORLD,
        WORLD, "cpu",
    )  # fmt: skip
    path = "sparse_arch.embedding_bag_collection"
    sharded = DistributedModelParallel(
        model, device=torch.device("cpu"), plan=ShardingPlan({path: plan}),
        sharders=[EmbeddingBagCollectionSharder(fused_params={"learning_rate": 0.1})],
    )  # fmt: skip
    rng = np.random.default_rng(dist.get_rank())
    lengths, values = [], []
    for table in tables:
        offsets, ranks = synthetic.draw(table, SAMPLES, rng)
        lengths.append(torch.tensor(np.diff(offsets)))
        values.append(torch.tensor(ranks))
    batch = KeyedJaggedTensor(
        keys=[table.name for table in tables], values=torch.cat(values), lengths=torch.cat(lengths)
    )
    dense = torch.ones(SAMPLES, 4)
    expected = whole(dense, batch)
    torch.testing.assert_close(sharded(dense, batch), expected)
    sharded(dense, batch).sum().backward()  # the tables' optimiser is part of it
    assert not torch.equal(sharded(dense, batch), expected)


if __name__ == "__main__":
    dist.init_process_group("gloo")
    if dist.get_rank() == 0:
        statistics_are_a_curve()
        planner_takes_our_statistics()
        plans_are_those_that_torchrec_constructs()
    a_dlrm_is_sharded_as_planned()
    dist.barrier()
    dist.destroy_process_group()
    print("all held")
