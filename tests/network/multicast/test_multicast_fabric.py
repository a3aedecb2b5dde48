"""Splitters beside a network: what broadcasts and all_gathers take over them, and which can stand."""

from __future__ import annotations

from pathlib import Path

import pytest

from windtunnel.base.errors import UserError
from windtunnel.cluster.draw import picture
from windtunnel.cluster.load import load_cluster
from windtunnel.fabrics import alternatives
from windtunnel.network.multicast.twin.fabric import alternative
from windtunnel.training.emulate.graph import Collective, Group

LIT = load_cluster("v100:32x8,nic=ethernet-25,multicast=shufflecast,splitter=4,planes=4")
NIC = LIT.host.nic_bandwidth * LIT.host.nic.efficiency
ALL = Group("", tuple(range(256)))


def seconds(kind: str, size: int, group: Group = ALL, cluster: str = "") -> float:
    own = size // len(group.ranks) if kind == "all_gather" else size
    way = alternative(load_cluster(cluster) if cluster else LIT)
    duration = way.seconds(Collective(kind, 0, own, size, peer=group.ranks[0]), group)
    assert duration is not None
    return duration


def test_a_broadcast_takes_its_bytes_over_all_planes_and_three_hops() -> None:
    few, many = seconds("broadcast", 0), seconds("broadcast", 1 << 30)
    assert many - few == pytest.approx((1 << 30) / (4 * NIC))
    hop = LIT.topology.hop_latency
    assert few == pytest.approx(LIT.host.nic.latency + 3 * hop + 2 * 9000 / (4 * NIC) + 7 * 0.6e-6)
    single = LIT.name.replace("planes=4", "planes=1")
    assert seconds("broadcast", 1 << 30, cluster=single) == pytest.approx(4 * many, rel=0.01)


def test_an_all_gather_is_bound_by_what_a_rack_takes_in() -> None:
    assert seconds("all_gather", 1 << 30) - seconds("all_gather", 0) == pytest.approx(
        (1 << 30) * 31 / 32 / (4 * NIC)
    )
    # with one plane the eight rounds of four trees each are what takes longest
    single = LIT.name.replace("planes=4", "planes=1")
    assert seconds("all_gather", 1 << 30, cluster=single) == pytest.approx((1 << 30) / 4 / NIC, rel=0.01)


def test_groups_that_do_the_same_share_time() -> None:
    each = Group("", tuple(range(0, 256, 8)))
    assert seconds("broadcast", 1 << 30, each) == pytest.approx(8 * seconds("broadcast", 1 << 30), rel=0.01)


def test_other_calls_and_those_inside_a_host_are_not_for_it() -> None:
    way = alternative(LIT)
    assert way.seconds(Collective("all_reduce", 0, 8, 8), ALL) is None
    assert way.seconds(Collective("broadcast", 0, 8, 8), Group("", (0, 1))) is None


def test_a_file_names_it_too_and_it_is_drawn(tmp_path: Path) -> None:
    file = tmp_path / "lit.yaml"
    file.write_text("base: v100:8x8\nmulticast: {kind: shufflecast, splitter: 2}\n")
    cluster = load_cluster(str(file))
    assert cluster.fabrics == ("shufflecast",)
    assert "splitters 1:2 for multicasts, planes: 1" in picture(cluster)
    assert [alternative.name for alternative in alternatives(cluster)] == ["shufflecast"]
    assert load_cluster("v100:8x8").fabrics == ()


@pytest.mark.parametrize(
    ("spec", "message"),
    [
        ("multicast=shufflecast,splitter=4", r"multicast: racks: 8 do not fit .* accepted are 4 and 32"),
        ("splitter=4", r"multicast\.kind is missing, accepted is shufflecast"),
        ("multicast=shufflecast", r"multicast\.splitter is missing, accepted is how many outputs"),
        ("multicast=mirrors,splitter=4", r"multicast\.kind is 'mirrors', accepted is 'shufflecast'"),
        ("multicast=shufflecast,splitter=2,planes=0", r"multicast\.planes is '0', accepted is a number"),
    ],
)
def test_what_cannot_stand_is_told(spec: str, message: str) -> None:
    with pytest.raises(UserError, match=message):
        alternatives(load_cluster(f"v100:8x8,{spec}"))
