"""What emulated jobs are told of switches that add: a curve that holds against the twin; who may use it."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from hypothesis import given
from hypothesis import strategies as st

from windtunnel.base.errors import UserError
from windtunnel.cluster.load import load_cluster
from windtunnel.network.aggregation.policy import RULES
from windtunnel.network.aggregation.twin import fabric
from windtunnel.network.aggregation.twin.fabric import Rack, alternatives, curve, measured
from windtunnel.training.emulate.graph import Alternative, Collective, Group

RACK = Rack(workers=3, racks=1, rate=2.75e9, delay=4e-6, core=1e-6, uplink=1.0, slots=48)
MOST = 3
CLUSTER = load_cluster("v100:4x2,nic=ethernet-25")
EVERYONE = Group("", tuple(range(8)))


@pytest.fixture(autouse=True, scope="module")
def small() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(fabric, "SIZES", (1, 16, 128, 512))
        patch.setattr(fabric, "BURST", 256)
        fabric.table.cache_clear()
        yield
    fabric.table.cache_clear()


def only(cluster: str, policy: str = "esa", neighbours: int = 0) -> Alternative:
    (alternative,) = alternatives(load_cluster(cluster), policy, neighbours)
    return alternative


def test_alone_esa_is_atp_and_that_is_told() -> None:
    assert [measured(RACK, "esa", 0, size) for size in (1, 100)] == [
        measured(RACK, "atp", 0, size) for size in (1, 100)
    ]
    assert "alone esa equals atp" in only("v100:4x2").takes
    assert "alone" not in only("v100:4x2", "esa", 1).takes


@given(
    policy=st.sampled_from(sorted(RULES)),
    fragments=st.lists(st.integers(1, 3000), min_size=2, max_size=2).map(sorted),
    neighbours=st.lists(st.integers(0, MOST), min_size=2, max_size=2).map(sorted),
)
def test_more_bytes_and_more_neighbours_are_never_faster(
    policy: str, fragments: list[int], neighbours: list[int]
) -> None:
    few, many = ((curve(RACK, policy, n, size)) for n, size in zip(neighbours, fragments, strict=True))
    assert 0 < few <= many * (1 + 1e-12)


@pytest.mark.parametrize("policy", sorted(RULES))
def test_between_its_points_the_curve_is_what_the_twin_gives(policy: str) -> None:
    for neighbours, size in ((0, 50), (2, 60), (1, 300), (3, 900)):
        direct = measured(RACK, policy, neighbours, size)
        assert curve(RACK, policy, neighbours, size) == pytest.approx(
            direct, rel=0.12 if neighbours else 0.01
        )


def test_a_sum_takes_at_least_its_bytes_and_half_of_the_bits_save_nothing() -> None:
    way, host = only("v100:4x2,nic=ethernet-25"), CLUSTER.host
    size = 4 << 20
    seconds = way.seconds(Collective("all_reduce", 0, size, size), EVERYONE)
    line = size / (host.nics * host.nic_bandwidth * host.nic.efficiency)
    assert seconds is not None and line < seconds < 1.3 * line
    half = Collective("all_reduce", 0, size // 2, size // 2, "bfloat16")
    assert way.seconds(half, EVERYONE) == pytest.approx(seconds, rel=0.01)


@pytest.mark.parametrize(
    ("cluster", "kind", "dtype", "ranks"),
    [
        ("v100:4x2", "all_reduce", "float64", range(8)), ("v100:4x2", "all_reduce", "int64", range(8)),
        ("v100:4x2", "reduce_scatter", "float32", range(8)), ("v100:4x2", "all_reduce", "float32", range(2)),
        ("v100:4x2,topology=torus,dims=2x2", "all_reduce", "float32", range(8)),
        ("v100:33x1,topology=single-switch", "all_reduce", "float32", range(33)),
        ("v100:4x1,topology=fat-tree-3,hosts_per_leaf=1,leaves_per_pod=2", "all_reduce", "float32", range(4)),
    ],
)  # fmt: skip
def test_who_cannot_use_it(cluster: str, kind: str, dtype: str, ranks: range) -> None:
    call, group = Collective(kind, 0, 1 << 20, 1 << 20, dtype), Group("", tuple(ranks))
    assert only(cluster).seconds(call, group) is None


def test_leaves_of_a_pod_add_in_two_levels() -> None:
    call = Collective("all_reduce", 0, 1 << 20, 1 << 20)
    near, far = (only(f"v100:4x2,hosts_per_leaf={count}").seconds(call, EVERYONE) for count in (4, 2))
    assert near is not None and far is not None and near < far < 1.5 * near


def test_what_there_is_not_is_refused() -> None:
    assert alternatives(CLUSTER, "none", 7) == []
    with pytest.raises(UserError, match=r"`aggregation`: 'sum' is unknown, accepted are none, switchml"):
        alternatives(CLUSTER, "sum", 0)
    for jobs in (-1, 16):
        with pytest.raises(UserError, match=rf"`neighbours`: {jobs} jobs, accepted are 0 to 15"):
            alternatives(CLUSTER, "esa", jobs)
