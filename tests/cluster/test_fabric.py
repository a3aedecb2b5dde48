"""A cluster as a graph: routes are whole, collectives put on links what theory says, jobs meet on cables."""

from __future__ import annotations

from collections import defaultdict
from math import prod

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from windtunnel.base.errors import UserError
from windtunnel.cluster.fabric import ALGORITHMS, Fabric, placements
from windtunnel.cluster.load import load_cluster
from windtunnel.cluster.model import place
from windtunnel.engines.flows import World
from windtunnel.training.emulate.twin.costs.collectives import bus_factor

NAMES = (
    "h100-sxm:4x8", "h100-sxm:8x8,hosts_per_leaf=2,oversubscription=2", "v100:4x8,nics=4",
    "h100-sxm:16x8,topology=fat-tree-3,hosts_per_leaf=2,leaves_per_pod=2", "v100:1x8",
    "h100-sxm:16x8,hosts_per_leaf=2,leaves_per_pod=4", "a100-80:12x8,topology=torus,dims=3x4",
    "a100-80:6x8,topology=optical-torus,dims=3x2", "gb200:2x72", "t4:3x4,topology=single-switch",
)  # fmt: skip
clusters = st.sampled_from([load_cluster(name) for name in NAMES])


@settings(max_examples=150, deadline=None)
@given(clusters, st.data())
def test_routes_are_whole_and_take_as_long_as_the_placement_says(
    cluster: object, data: st.DataObject
) -> None:
    fabric = Fabric(cluster, data.draw(st.integers(0, 9)))  # type: ignore[arg-type]
    rank = st.integers(0, fabric.cluster.world_size - 1)
    a, b = data.draw(rank), data.draw(rank)
    route = fabric.path(a, b)
    assert route == fabric.path(a, b) and len(set(route)) == len(route)
    assert all(0 <= link < len(fabric.rates) and fabric.rates[link] > 0 for link in route)
    assert (route == []) == (a == b)
    if a == b:
        return
    kinds = [fabric.name(link).rsplit(" ", 1)[0] for link in route]
    expected = place(fabric.cluster, [a, b])
    host = fabric.cluster.host
    if expected.tier == 0:
        assert set(kinds) <= {"device out", "device in", "lanes"}
        assert fabric.latency(route) == pytest.approx(expected.latency)
        return
    network = [
        link for link, kind in zip(route, kinds, strict=True) if "device" not in kind and kind != "lanes"
    ]
    if expected.tier and "torus" in kinds:
        dims = fabric.cluster.topology.dims
        assert prod(dims) == fabric.cluster.hosts and len(network) <= sum(size // 2 for size in dims)
        return
    assert fabric.latency(network) == pytest.approx(expected.latency)
    assert kinds[-1] == "NIC in" and kinds.count("NIC out") == 1 and len(network) == 2 * expected.tier
    slowest = min(fabric.rates[link] for link in (network[0], network[-1]))
    share = host.nics / min(host.nics, host.devices)
    assert slowest == pytest.approx(share * host.nic_bandwidth * host.nic.efficiency)


@settings(max_examples=80, deadline=None)
@given(clusters, st.data())
def test_what_collectives_send_is_what_every_rank_must_and_goes_in_where_it_comes_out(
    cluster: object, data: st.DataObject
) -> None:
    fabric = Fabric(cluster)  # type: ignore[arg-type]
    hosts = data.draw(st.lists(st.integers(0, fabric.cluster.hosts - 1), min_size=1, max_size=4, unique=True))
    members = data.draw(st.integers(1, fabric.cluster.host.devices))
    ranks = [host * fabric.cluster.host.devices + local for host in hosts for local in range(members)]
    n, size = len(ranks), 1e6
    kind = data.draw(st.sampled_from(sorted(ALGORITHMS)))
    for algorithm in ALGORITHMS[kind]:
        loads = fabric.collective(kind, ranks, size, algorithm=algorithm)
        if n == 1:
            assert loads == {}
            continue
        total = defaultdict(float)
        for link, load in loads.items():
            assert load > 0
            total[fabric.name(link).rsplit(" ", 1)[0]] += load
        for out, back in (
            ("NIC out", "NIC in"),
            ("device out", "device in"),
            ("leaf to spine", "spine to leaf"),
        ):
            assert total[out] == pytest.approx(total[back])
        ends = total["NIC out"] if fabric.cluster.topology.kind not in ("torus", "optical-torus") else 0.0
        if len(hosts) > 1 and ends and fabric.cluster.host.intra_hosts == 1:
            if algorithm == "ring":  # a circle; of a broadcast it is open beside the root, in its host or not
                steps = [len(hosts)] if kind not in ("broadcast", "reduce") else [len(hosts) - 1, len(hosts)]
                each = size * bus_factor(kind, n)
                assert steps[0] * each * 0.999 <= ends <= steps[-1] * each * 1.001
            elif algorithm == "tree":  # two with half of the data, both ways
                assert ends == pytest.approx(2 * (len(hosts) - 1) * size)
            else:  # all that is not for the own host
                part = size / n if kind in ("gather", "scatter") else size
                assert ends == pytest.approx(part * (n - members))


def test_a_ring_alone_takes_what_the_bus_bandwidth_says() -> None:
    fabric = Fabric(load_cluster("h100-sxm:4x8"))
    world = World(fabric.rates)
    size = 1e9
    loads = fabric.collective("all_reduce", range(32), size)
    world.start(size, {link: load / size for link, load in loads.items()})
    world.advance()
    nic = fabric.cluster.host.nic
    assert world.now == pytest.approx(2 * 31 / 32 * size / (8 * nic.bandwidth * nic.efficiency))
    other = Fabric(load_cluster("v100:1x8"))
    mesh = other.collective("all_reduce", range(8), size)
    assert len(mesh) == 56 and sum(mesh.values()) == pytest.approx(8 * 2 * 7 / 8 * size)


def test_two_jobs_meet_above_the_leaves_only_where_they_share_them() -> None:
    cluster = load_cluster("h100-sxm:8x8,hosts_per_leaf=2,oversubscription=2")
    fabric = Fabric(cluster)
    used = {}
    for how in ("packed", "spread", "shared"):
        jobs = placements(cluster, [32, 32], how)
        assert sorted(rank for job in jobs for rank in job) == list(range(64))
        used[how] = [set(fabric.collective("all_reduce", job, 1e6)) for job in jobs]
    assert not used["packed"][0] & used["packed"][1]
    assert {rank // 8 % 2 for rank in placements(cluster, [32, 32], "spread")[0]} == {0}
    assert {rank // 8 for rank in placements(cluster, [32, 32], "shared")[0]} == set(range(8))
    fabric = Fabric(load_cluster("h100-sxm:8x8,hosts_per_leaf=4"))
    ways = {tuple(fabric.path(0, 32, flow)) for flow in range(40)}
    assert len(ways) == 4 and len({route[0] for route in ways}) == 1


def test_what_is_not_there_is_refused() -> None:
    cluster = load_cluster("h100-sxm:2x8")
    fabric = Fabric(cluster)
    for call, words in (
        (lambda: fabric.path(0, 16), "rank 16, cluster .* has ranks 0 to 15"),
        (
            lambda: fabric.collective("sum", [0, 1], 1.0),
            "collective 'sum' is unknown; accepted are all_reduce",
        ),
        (lambda: fabric.collective("broadcast", [0], 1.0, algorithm="tree"), "by 'tree' is unknown"),
        (lambda: placements(cluster, [8], "near"), "placement 'near' is unknown"),
        (lambda: placements(cluster, [9, 1]), "jobs of 9, 1 ranks are placed packed on h100-sxm:2x8"),
    ):
        with pytest.raises(UserError, match=words):
            call()
