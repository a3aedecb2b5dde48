"""Cycles of engines."""

from __future__ import annotations

from dataclasses import replace

import pytest

from windtunnel.trust.shield import Engines, Region, ShieldTraffic, cycles, overhead

STREAM = ShieldTraffic(64, 1000.0)


def test_engines_take_what_the_rtl_does() -> None:
    assert Engines(1, 16).aes(16) == 22
    assert Engines(1, 4).aes(16) == 52
    assert Engines(4, 16).aes(4096) == 64 * 22
    assert Engines(mac="hmac").tag(64) == 66 * 5
    assert Engines(4, 16, "pmac").tag(4096) == 65 * 22


def test_a_stream_costs_its_bytes_and_random_access_its_chunks() -> None:
    engines, region = Engines(), Region(0, 1 << 20, 4096)
    assert cycles(STREAM, region, engines) == 64_000 / 4096 * engines.tag(4096)
    assert cycles(STREAM._replace(random=True), region, engines) == 1000 * engines.tag(4096)
    # a write to a part of a chunk reads the rest of it
    assert cycles(ShieldTraffic(64, 0, 10, True), region, engines) == 2 * cycles(
        ShieldTraffic(64, 10, 0, True), region, engines
    )
    assert cycles(ShieldTraffic(4096, 0, 10, True), region, engines) == cycles(
        ShieldTraffic(4096, 10), region, engines
    )


def test_a_tree_costs_its_levels_and_writes_twice() -> None:
    engines, flat = Engines(), Region(0, 4096 * 300, 4096)
    tree = replace(flat, mode="tree")
    nodes = engines.tag(128) + 2 * engines.tag(512)
    more = []
    for accesses in ((5.0, 0.0), (0.0, 5.0)):
        traffic = ShieldTraffic(4096, *accesses)
        more.append(cycles(traffic, tree, engines) - cycles(traffic, flat, engines))
    assert more == pytest.approx([5 * nodes, 10 * nodes])


def test_more_engines_never_cost_more_and_computing_hides_none() -> None:
    region = Region(0, 1 << 20, 4096)
    costs = [overhead(1e4, STREAM, region, Engines(cores, 16)) for cores in (4, 8, 16, 64)]
    assert costs == sorted(costs, reverse=True)
    assert costs[-1] >= 0.0
    assert overhead(1e4, STREAM, region, Engines(4, 4)) > costs[0]
    assert overhead(1e12, STREAM, region, Engines()) == pytest.approx(0.0, abs=1e-6)
    assert overhead(0.0, STREAM, region, Engines(mac="hmac")) > overhead(0.0, STREAM, region, Engines())
    assert overhead(1.0, ShieldTraffic(64, 0.0), region, Engines()) == 0.0
