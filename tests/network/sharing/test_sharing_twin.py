"""Entities on a link of the packet engine: the gap gives each its own, whoever sends how."""

from __future__ import annotations

import pytest

from windtunnel.network.sharing.policy import SHARE, Decision, Observation, SharingTenant, decide, fixed
from windtunnel.network.sharing.twin import SharedLink, TenantTraffic, cost, emulate

SMALL = SharedLink(line=1.25e8, rtt=200e-6, packets=400, limit=200)
UDP = (TenantTraffic("udp", 1, "udp", sends=1e8), TenantTraffic("reno", 8))


def test_the_gap_keeps_udp_from_taking_what_is_not_its_own() -> None:
    fifo, aq = (emulate(UDP, arm, 0.3, 1, SMALL) for arm in ("fifo", "aq"))
    assert fifo.goodput[0] > 0.7 * SMALL.line
    assert aq.goodput[0] == pytest.approx(aq.promised[0], rel=0.02)
    assert aq.goodput[1] > 3 * fifo.goodput[1] / 2 and sum(aq.goodput) <= SHARE * SMALL.line * 1.05
    assert aq.wait < fifo.wait / 4
    again = emulate(UDP, "aq", 0.3, 1, SMALL)
    assert again == aq


@pytest.mark.parametrize("arm", ["policer", "drr", "csfq"])
def test_the_baselines_hold_udp_back_too(arm: str) -> None:
    assert emulate(UDP, arm, 0.2, 1, SMALL).goodput[0] < 0.66 * SMALL.line


def test_what_an_idle_neighbour_leaves_is_lent() -> None:
    tenants = (TenantTraffic("busy", 1, "udp", sends=1e8), TenantTraffic("idle", stops=True))
    worlds = [emulate(tenants, "aq", 0.2, 1, SMALL, policy=policy) for policy in (fixed, decide)]
    kept, lent = (world.goodput[0] for world in worlds)
    assert kept == pytest.approx(SHARE * SMALL.line / 2, rel=0.02)
    assert lent == pytest.approx(1e8, rel=0.02)


def test_an_unknown_arm_is_refused() -> None:
    with pytest.raises(ValueError, match="arm 'red' with 2 tenants; at most 64 on aq, fifo"):
        emulate(UDP, "red", 0.1, 1, SMALL)


def test_a_decision_that_lends_misses_less() -> None:
    observation = Observation(1e9, (SharingTenant("a", offered=5e8, since_trouble=0.0), SharingTenant("b")))
    assert (
        cost(observation, decide(observation))["missed bytes"]
        < cost(observation, fixed(observation))["missed bytes"]
    )
    assert cost(observation, Decision((0.0, 0.0), (0.0, 0.0))) == {"missed bytes": 1e9, "unused bytes": 1e9}
