"""Collectives: published nccl-tests figures, bounds that no network can beat, NCCL's choices."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from windtunnel.cluster.load import load_cluster
from windtunnel.training.emulate.graph import Collective, Group
from windtunnel.training.emulate.twin.costs.collectives import (
    bus_factor,
    call_cost,
    collective_cost,
    full_bytes,
    sharing_of,
)
from windtunnel.training.emulate.twin.costs.profile import DeviceProfile

KINDS = (
    "all_reduce",
    "all_gather",
    "reduce_scatter",
    "broadcast",
    "reduce",
    "all_to_all",
    "gather",
    "scatter",
)
BIG = 8 << 30


def cost(spec, ranks, kind, nbytes, **more):
    cluster = load_cluster(spec)
    placement = cluster.placement(list(ranks))
    return collective_cost(kind, nbytes, placement, cluster, sharing=sharing_of(cluster, placement), **more)


@pytest.mark.parametrize(
    ("spec", "ranks", "kind", "low", "high"),
    [
        # nccl-tests on DGX H100: 480 GB/s with NVLS, 360 to 370 by rings; DGX A100: 230 to 240.
        ("h100-sxm:1x8", range(8), "all_reduce", 430e9, 485e9),
        ("h100-sxm:1x8", range(8), "all_gather", 340e9, 380e9),
        ("a100-80:1x8", range(8), "all_reduce", 225e9, 245e9),
        ("v100:1x8", range(8), "all_reduce", 120e9, 140e9),
        # Eight NICs of 400 Gb/s for each host.
        ("h100-sxm:16x8", range(128), "all_gather", 330e9, 390e9),
        ("h100-sxm:16x8", range(128), "reduce_scatter", 330e9, 390e9),
        # One NIC of 400 Gb/s.
        ("h100-sxm:16x8", range(0, 128, 8), "all_gather", 42e9, 49e9),
    ],
)
def test_large_bus_bandwidths_lie_where_published_ones_do(spec, ranks, kind, low, high):
    assert low <= cost(spec, ranks, kind, BIG).bus_bandwidth <= high


def test_small_all_reduce_in_a_host_takes_15_to_25_microseconds():
    assert 13e-6 <= cost("h100-sxm:1x8", range(8), "all_reduce", 1024).seconds <= 25e-6
    assert 13e-6 <= cost("a100-80:1x8", range(8), "all_reduce", 1024).seconds <= 25e-6


def test_choices_are_ncclss():
    assert cost("h100-sxm:1x8", range(8), "all_reduce", 1024).protocol == "LL"
    assert cost("h100-sxm:1x8", range(8), "all_reduce", BIG).algorithm == "nvls"
    assert cost("a100-80:1x8", range(8), "all_reduce", BIG).algorithm == "ring"
    assert cost("h100-sxm:64x8", range(512), "all_reduce", 1024).algorithm == "tree"
    assert cost("h100-sxm:64x8", range(0, 512, 8), "all_gather", 1024).algorithm == "pat"
    # LL128 is for NVLink: on PCIe it is not safe and never chosen.
    sizes = [1 << power for power in range(2, 33)]
    assert "LL128" not in {cost("l4:1x8", range(8), "all_reduce", size).protocol for size in sizes}
    assert "LL128" in {cost("a100-80:1x8", range(8), "all_reduce", size).protocol for size in sizes}


GROUPS = [
    ("h100-sxm:1x8", range(8)), ("h100-sxm:1x8", range(2)), ("h100-sxm:16x8", range(128)),
    ("a100-80:2x8", range(16)),
    ("a100-80:8x8", range(0, 64, 8)), ("l4:2x8", range(16)), ("mi300x:1x8", range(4)),
    ("v100:4x8", range(3, 32, 8)),
    ("h100-sxm:64x8,topology=fat-tree-2,oversubscription=4", range(512)),
]  # fmt: skip


@settings(max_examples=150, deadline=None)
@given(
    where=st.sampled_from(GROUPS),
    kind=st.sampled_from(KINDS),
    nbytes=st.integers(0, 1 << 34),
    more=st.integers(0, 1 << 34),
)
def test_time_grows_with_bytes_and_never_beats_the_wires(where, kind, nbytes, more):
    spec, ranks = where
    small, large = cost(spec, ranks, kind, nbytes), cost(spec, ranks, kind, nbytes + more)
    assert 0 < small.seconds <= large.seconds
    # What must go in or out of one host (of one rank inside a host), at the line rate of all it has.
    host = load_cluster(spec).host
    ranks = list(ranks)
    hosts = {rank // host.devices for rank in ranks}
    if len(hosts) == 1:
        share = 1.0 if small.algorithm == "nvls" else bus_factor(kind, len(ranks))
        assert small.seconds >= nbytes * share / host.intra.bandwidth
    elif kind in ("all_reduce", "all_gather", "reduce_scatter"):
        # A host lacks what the others hold, and it has so many NICs.
        lacking = nbytes * (len(hosts) - 1) / len(hosts)
        assert small.seconds >= lacking / (host.nics * host.nic_bandwidth)


def test_groups_that_share_nics_are_slower():
    # The V100 host has four NICs for eight devices: eight rank-wise groups share them.
    cluster = load_cluster("v100:4x8")
    placement = cluster.placement([0, 8, 16, 24])
    assert sharing_of(cluster, placement) == 2.0
    alone, shared = (
        collective_cost("all_gather", 2 * BIG, placement, cluster, sharing=sharing).seconds
        - collective_cost("all_gather", BIG, placement, cluster, sharing=sharing).seconds
        for sharing in (1.0, 2.0)
    )
    assert shared == pytest.approx(2 * alone)
    assert (
        sharing_of(load_cluster("h100-sxm:4x8"), load_cluster("h100-sxm:4x8").placement([0, 8, 16, 24]))
        == 1.0
    )


def test_messages_take_the_link_between_the_two_ends():
    cluster = load_cluster("h100-sxm:2x8")
    near = collective_cost("send", BIG, cluster.placement([0, 1]), cluster)
    far = collective_cost("send", BIG, cluster.placement([0, 8]), cluster)
    assert near.bus_bandwidth == pytest.approx(450e9 * 0.82, rel=0.02)
    assert far.bus_bandwidth == pytest.approx(50e9 * 0.92, rel=0.02)
    ends = Group("", (0, 8), "world")
    sent = call_cost(Collective("send", 0, BIG, 0, peer=8), ends, cluster)
    received = call_cost(Collective("recv", 0, 0, BIG, peer=0), ends, cluster)
    assert sent.seconds == received.seconds == far.seconds


def test_sizes_mean_what_nccl_tests_means():
    assert full_bytes(Collective("all_gather", 0, 100, 800), 8) == 800
    assert full_bytes(Collective("reduce_scatter", 0, 800, 100), 8) == 800
    assert full_bytes(Collective("all_reduce", 0, 100, 100), 8) == 100
    assert full_bytes(Collective("gather", 0, 100, 0), 8) == 800
    assert full_bytes(Collective("scatter", 0, 0, 100), 8) == 800


def test_a_group_of_one_costs_a_copy_and_a_barrier_costs_latency():
    assert cost("h100-sxm:1x8", [3], "all_gather", 1 << 30).algorithm == "copy"
    assert (
        cost("h100-sxm:2x8", range(16), "barrier", 0).seconds
        > cost("h100-sxm:1x8", range(8), "barrier", 0).seconds
    )


def test_an_unknown_kind_is_refused():
    with pytest.raises(ValueError, match="all_swap"):
        cost("h100-sxm:1x8", range(8), "all_swap", 8)


def test_gloo_takes_measured_times_and_scales_them_to_more_ranks():
    points = [("all_reduce", 2, 1000, 1e-3), ("all_reduce", 2, 2001000, 3e-3)]
    profile = DeviceProfile("cpu", collectives=points)
    at = {
        n: cost("cpu:1x4", range(n), "all_reduce", 1001000, backend="gloo", profile=profile).seconds
        for n in (2, 4)
    }
    assert at[2] == pytest.approx(2e-3)
    assert at[4] > at[2]
    # Below the smallest size measured nothing is faster; without a profile the model answers.
    assert cost("cpu:1x4", range(2), "all_reduce", 1, backend="gloo", profile=profile).seconds == 1e-3
    assert cost("cpu:1x4", range(2), "all_reduce", 1, backend="gloo").seconds > 0


def test_gloo_receives_in_the_time_that_sending_was_measured_to_take():
    profile = DeviceProfile("cpu", collectives=[("send", 2, 1000, 5e-6)])
    sent, received = (
        cost("cpu:1x2", range(2), kind, 1000, backend="gloo", profile=profile) for kind in ("send", "recv")
    )
    assert sent.seconds == received.seconds == 5e-6


def test_gloo_scatters_sums_by_making_all_of_them():
    seconds = {
        kind: cost("cpu:4x1", range(4), kind, 1 << 26, backend="gloo").seconds
        for kind in ("all_gather", "reduce_scatter", "all_reduce")
    }
    assert seconds["reduce_scatter"] == seconds["all_reduce"] > 1.9 * seconds["all_gather"]
