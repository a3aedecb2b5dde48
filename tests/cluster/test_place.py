"""Placements, against counts made by hand and by brute force."""

import itertools
from collections import deque
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from windtunnel.base.errors import UserError
from windtunnel.cluster.load import load_cluster
from windtunnel.cluster.model import coordinates, torus_distance


def test_inside_a_host() -> None:
    placement = load_cluster("h100-sxm:16x8").placement(range(8, 16))
    assert (placement.tier, placement.hosts, placement.ranks_per_host) == (0, 1, 8)
    assert placement.inter is None
    assert placement.intra_bandwidth == 450e9


def test_one_rank_alone_crosses_nothing() -> None:
    placement = load_cluster("h100-sxm:16x8").placement([5])
    assert (placement.tier, placement.intra, placement.inter, placement.latency) == (0, None, None, 0.0)


def test_rails_leaves_and_pods_of_the_h100_superpod() -> None:
    # RA-11333-001: 32 hosts a scalable unit; 8 units are the most that one layer of spines joins.
    cluster = load_cluster("h100-sxm:1024x8")
    hosts = {1: range(32), 2: range(256), 3: range(257)}
    for tier, members in hosts.items():
        assert cluster.placement([8 * host for host in members]).tier == tier
    assert cluster.leaves == 32


def test_a_group_drives_the_nics_nearest_to_its_ranks() -> None:
    cluster = load_cluster("h100-sxm:4x8")
    one_each = cluster.placement([0, 8, 16, 24])
    assert (one_each.nics_per_rank, one_each.inter_bandwidth, one_each.intra) == (1.0, 50e9, None)
    assert cluster.placement(range(32)).inter_bandwidth == 50e9
    # DGX-1: 4 NICs for 8 devices. Ranks 0 and 1 of a host share NIC 0; ranks 0 and 2 have one each.
    dgx1 = load_cluster("v100:2x8")
    assert dgx1.placement([0, 1, 8, 9]).nics_per_rank == 0.5
    assert dgx1.placement([0, 2, 8, 10]).nics_per_rank == 1.0
    assert dgx1.placement(range(16)).inter_bandwidth == 12.5e9 / 2


def test_the_host_with_the_fewest_nics_a_rank_decides() -> None:
    assert load_cluster("v100:2x8").placement([0, 8, 9]).nics_per_rank == 0.5


def test_a_nic_is_no_faster_than_its_slot() -> None:
    assert load_cluster("v100:2x8,nic=ib-800").placement([0, 8]).inter_bandwidth == 15.75e9


def test_a_mesh_gives_a_pair_one_link() -> None:
    cluster = load_cluster("mi300x:1x8")
    assert cluster.placement([0, 1]).intra_bandwidth == pytest.approx(64e9)  # one of seven links
    assert cluster.placement(range(8)).intra_bandwidth == 448e9


def test_trays_of_one_rack_are_one_domain() -> None:
    cluster = load_cluster("gb200:36x4")
    rack, two = cluster.placement(range(72)), cluster.placement(range(144))
    assert (rack.tier, rack.hosts, rack.ranks_per_host, rack.inter) == (0, 1, 72, None)
    assert (two.hosts, two.ranks_per_host, two.tier) == (2, 72, 1)
    whole = load_cluster("gb200:2x72").placement(range(144))
    assert (whole.hosts, whole.ranks_per_host, whole.inter_bandwidth) == (2, 72, two.inter_bandwidth)


def test_oversubscription_bites_only_above_a_leaf() -> None:
    cluster = load_cluster("h100-sxm:16x8,topology=fat-tree-2,oversubscription=4,hosts_per_leaf=4")
    assert cluster.placement(range(32)).inter_bandwidth == 50e9
    assert cluster.placement(range(33)).inter_bandwidth == 12.5e9


def test_a_ring_in_host_order_hardly_uses_the_uplinks() -> None:
    cluster = load_cluster("h100-sxm:16x8,topology=fat-tree-2,oversubscription=4,hosts_per_leaf=4")
    # In order one of each leaf's four hosts sends out of the leaf, just what 4:1 leaves room for.
    assert cluster.placement(range(128)).ring_bandwidth == 50e9
    # With a stride of one leaf every hop leaves it.
    strided = cluster.placement(range(0, 128, 32))
    assert strided.ring_bandwidth == strided.inter_bandwidth == 12.5e9


def test_latency_counts_the_switches() -> None:
    cluster = load_cluster("h100-sxm:1024x8")
    link, hop = cluster.host.nic.latency, cluster.topology.hop_latency
    latencies = [cluster.placement([0, 8 * host]).latency for host in (1, 32, 256)]
    assert latencies == pytest.approx([link + hop, link + 3 * hop, link + 5 * hop])


def test_torus_lines_use_two_ports_and_planes_four() -> None:
    cluster = load_cluster("h100-sxm:16x8,topology=torus,dims=4x4")
    line = cluster.placement([0, 8, 16, 24])
    assert (line.tier, line.ring_bandwidth) == (1, 25e9)  # one of two dimensions, its ring closes in one step
    assert line.inter_bandwidth == 18.75e9  # but one of the three others is two hops away
    stride = cluster.placement([0, 16])
    assert (stride.tier, stride.inter_bandwidth) == (2, 12.5e9)  # two hosts apart, both ways


@given(dims=st.lists(st.integers(1, 4), min_size=1, max_size=3).filter(lambda dims: _product(dims) > 1))
def test_all_to_all_in_a_torus_takes_no_more_than_all_ports_carry(dims: list[int]) -> None:
    shape = "x".join(map(str, dims))
    hosts = _product(dims)
    for kind in ("torus", "optical-torus"):
        cluster = load_cluster(f"h100-sxm:{hosts}x1,topology={kind},dims={shape}")
        points = [coordinates(host, dims) for host in range(hosts)]
        hops = sum(torus_distance(a, b, dims) for a in points for b in points) / (hosts - 1) / hosts
        used = sum(size > 1 for size in dims) / len(dims)
        placement = cluster.placement(range(hosts))
        assert placement.inter_bandwidth * hops == pytest.approx(used * cluster.host.nic_bandwidth)


@given(dims=st.lists(st.integers(1, 4), min_size=1, max_size=3), data=st.data())
def test_torus_distance_is_the_shortest_path(dims: list[int], data: st.DataObject) -> None:
    points = [coordinates(host, dims) for host in range(_product(dims))]
    assert points == list(itertools.product(*map(range, dims)))
    start = data.draw(st.sampled_from(points))
    distances = {start: 0}
    queue = deque([start])
    while queue:
        point = queue.popleft()
        for axis, size in enumerate(dims):
            for step in (1, -1):
                near = (*point[:axis], (point[axis] + step) % size, *point[axis + 1 :])
                if near not in distances:
                    distances[near] = distances[point] + 1
                    queue.append(near)
    assert {point: torus_distance(start, point, dims) for point in points} == distances


def _product(dims: list[int]) -> int:
    total = 1
    for size in dims:
        total *= size
    return total


@given(
    hosts=st.integers(2, 12),
    per_leaf=st.integers(1, 4),
    oversubscription=st.sampled_from([1.0, 2.0, 5.0]),
    data=st.data(),
)
def test_no_uplink_carries_more_than_it_can(
    hosts: int, per_leaf: int, oversubscription: float, data: st.DataObject
) -> None:
    """Brute force: every host of the group sends at ``ring_bandwidth`` to the next, the rest of its leaf is
    filled with groups of the same shape; count what each leaf's uplinks carry."""
    base = load_cluster("h100-sxm:12x1,topology=fat-tree-2")
    topology = replace(base.topology, hosts_per_leaf=per_leaf, oversubscription=oversubscription)
    cluster = replace(base, hosts=hosts, topology=topology)
    group = data.draw(st.lists(st.integers(0, hosts - 1), min_size=2, unique=True))
    placement = cluster.placement(group)
    assert placement.inter_bandwidth <= placement.ring_bandwidth <= 50e9
    uplink = per_leaf * 50e9 / oversubscription
    tightest = 1.0
    for leaf in {host // per_leaf for host in group}:
        inside = [i for i, host in enumerate(group) if host // per_leaf == leaf]
        out = sum(group[(i + 1) % len(group)] // per_leaf != leaf for i in inside)
        copies = per_leaf / len(inside)
        carried = out * copies * placement.ring_bandwidth
        assert carried <= uplink * (1 + 1e-9)
        tightest = min(tightest, 1 - carried / uplink)
    assert placement.ring_bandwidth == 50e9 or tightest == pytest.approx(0, abs=1e-9)


@pytest.mark.parametrize(
    ("ranks", "words"),
    [
        ([], "at least one rank"),
        ([0, 3, 3], "rank 3 more than once"),
        ([0, 16], "ranks 0 to 15"),
        ([-1], "rank -1"),
    ],
)
def test_groups_that_cannot_be_are_refused(ranks: list[int], words: str) -> None:
    with pytest.raises(UserError, match=words):
        load_cluster("h100-sxm:2x8").placement(ranks)
