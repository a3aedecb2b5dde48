"""An emulated iteration is what its parts are by hand, and drawn batches are what the average says."""

from __future__ import annotations

import numpy as np

from benchmarks.data.embeddings import plans
from windtunnel.cluster.load import load_cluster
from windtunnel.data.embeddings import synthetic, twin
from windtunnel.data.embeddings.model import EmbeddingTable, MemoryTier, TableShard
from windtunnel.data.embeddings.policy import PlacementRequest, TablePlacement, decide

CLUSTER = load_cluster("a100-80:2x2")


def test_an_iteration_is_the_sum_of_what_is_read_and_sent() -> None:
    table = EmbeddingTable(
        "a", 1000, 64, pooling=10.0, coverage=0.5, ranks=(0, 100, 1000), shares=(0.0, 0.9, 1.0)
    )
    wanted = PlacementRequest((table,), 4, MemoryTier(1e6, 1e12), MemoryTier(1e6, 1e10), 4000)
    plan = TablePlacement(
        (TableShard("a", 1, 0, 64, 100),), (0.0,) * 4, (0,) * 4, (0,) * 4, 0.0, 0.0, 0.0, "", ""
    )
    iteration = twin.iteration(CLUSTER, wanted, plan)
    reads = 4000 * 5
    np.testing.assert_allclose(iteration.raw, [0.9 * reads, 0.1 * reads])
    fast, slow = 100 * -np.expm1(-0.9 * reads / 100), 900 * -np.expm1(-0.1 * reads / 900)
    np.testing.assert_allclose(iteration.distinct, [fast, slow])
    np.testing.assert_allclose(iteration.lookups, 256 * (0.9 * reads / 1e12 + 0.1 * reads / 1e10))
    np.testing.assert_allclose(iteration.updates, 512 * (fast / 1e12 + slow / 1e10) + 256 * reads / 1e12)
    # one peer in the host, two in the other; ids come, vectors go, gradients come
    sent = np.array([1, 2]) * (reads / 4 * 8 + 2 * 1000 * 256)
    np.testing.assert_allclose(iteration.sent, sent)
    nic = 25e9 * 0.92
    np.testing.assert_allclose(iteration.exchange, sent[1] / nic, rtol=0.2)
    assert iteration.balance == (iteration.by_device[1] / 1e-12, 4.0)


def test_drawn_accesses_are_those_of_lookups_drawn_one_by_one() -> None:
    table = next(candidate for candidate in synthetic.tables("small") if candidate.lookups > 5)
    shard = TableShard(table.name, 0, 0, table.dim, table.rows // 50)
    rng = np.random.default_rng(0)
    ranks = [synthetic.draw(table, 512, rng)[1] for _ in range(40)]
    raw = np.mean(
        [[(sample < shard.fast_rows).sum(), (sample >= shard.fast_rows).sum()] for sample in ranks], 0
    )
    distinct = np.mean(
        [
            [(np.unique(sample) < shard.fast_rows).sum(), (np.unique(sample) >= shard.fast_rows).sum()]
            for sample in ranks
        ],
        0,
    )
    expected = twin.accesses((table,), (shard,), 512)
    np.testing.assert_allclose(raw, expected.raw[0], rtol=0.1)
    np.testing.assert_allclose(distinct, expected.distinct[0], rtol=0.1)


def test_shards_of_columns_count_as_parts_of_rows() -> None:
    table = EmbeddingTable("a", 100, 64)
    whole = twin.accesses((table,), (TableShard("a", 0, 0, 64, 20),), 50)
    halves = twin.accesses((table,), (TableShard("a", 0, 0, 32, 20), TableShard("a", 1, 32, 64, 20)), 50)
    np.testing.assert_allclose(halves.raw.sum(0), whole.raw[0])
    np.testing.assert_allclose(halves.distinct.sum(0), whole.distinct[0])


def test_the_cost_of_a_decision_is_that_of_its_slowest_device() -> None:
    some = synthetic.tables("small")
    wanted = PlacementRequest(some, 2, MemoryTier(1e7, 1e12), MemoryTier(1e9, 1e10), 4096, "size")
    plan = decide(wanted)
    costs = twin.cost(wanted, plan)
    assert costs["seconds"] == plan.slowest and costs["slow_accesses"] > costs["slow_rows"] > 0


def test_a_bench_shows_every_rival_beside_recshard() -> None:
    rows = list(plans._greedy(CLUSTER, "small", synthetic.tables("small"), 5e6))
    names = {row.name for row in rows}
    for policy in plans.GREEDY:
        assert f"small: slow accesses, {policy} over recshard" in names
        [ratio] = [row for row in rows if row.name == f"small: reading and updating, {policy} over recshard"]
        assert ratio.emulated is not None and ratio.emulated > 1 and ratio.published is None
