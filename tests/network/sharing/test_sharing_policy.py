"""Rates from weights, what is lent, and what the gap lets through."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from windtunnel.network.sharing.policy import (
    HEADROOM,
    IDLE,
    SHARE,
    Observation,
    SharingTenant,
    decide,
    fill,
    fixed,
)
from windtunnel.network.sharing.policy.gap import DROP, MARK, PASS, step, virtual_delay
from windtunnel.network.sharing.policy.meter import RateMeter
from windtunnel.network.sharing.policy.units import NEVER, SHIFT, rate_units
from windtunnel.network.sharing.spec import OTHERS

LINE = 1e9
entities = st.lists(
    st.builds(
        SharingTenant,
        name=st.just("a"),
        weight=st.floats(0.1, 100),
        rate=st.none() | st.floats(1e6, 0.05 * LINE),
        offered=st.just(0.0) | st.floats(0, 2 * LINE),
        since_trouble=st.none() | st.floats(0, 1),
    ),
    min_size=1,
    max_size=12,
)


@given(entities)
def test_rates_sum_to_no_more_than_the_line_and_nobody_gets_less_than_his_own(
    given: list[SharingTenant],
) -> None:
    observation = Observation(LINE, tuple(given))
    decision = decide(observation)
    assert sum(decision.own) <= SHARE * LINE * (1 + 1e-9)
    assert all(lent >= own for own, lent in zip(decision.own, decision.lent, strict=True))
    # what is lent is no more than what others leave
    left = SHARE * LINE - sum(decision.own)
    for tenant, own, lent in zip(given, decision.own, decision.lent, strict=True):
        left += (
            0.0 if lent > own else max(0.0, own - (tenant.offered if tenant.offered > IDLE * own else 0.0))
        )
    assert sum(decision.lent) - sum(decision.own) <= left + 1e-6 * LINE
    assert fixed(observation).lent == decision.own == fixed(observation).own


def test_an_idle_neighbours_half_is_lent_whole() -> None:
    observation = Observation(
        LINE, (SharingTenant("a", offered=0.4 * LINE, since_trouble=0.0), SharingTenant("b"))
    )
    assert decide(observation).lent == pytest.approx((SHARE * LINE, SHARE * LINE / 2))
    # a sender that has just halved its window is lent the rest, too: there is nobody else
    observation = Observation(LINE, (SharingTenant("a", offered=0.4 * LINE), SharingTenant("b")))
    assert decide(observation).lent[0] == pytest.approx(SHARE * LINE)


def test_what_a_neighbour_uses_is_not_lent() -> None:
    observation = Observation(
        LINE,
        (SharingTenant("a", offered=0.6 * LINE, since_trouble=0.0), SharingTenant("b", offered=0.1 * LINE)),
    )
    assert decide(observation).lent[0] == pytest.approx((SHARE - HEADROOM * 0.1) * LINE)


def test_promised_rates_come_first_and_weights_share_the_rest() -> None:
    observation = Observation(
        LINE, (SharingTenant("a", rate=0.4 * LINE), SharingTenant("b", 3.0), SharingTenant("c", 1.0))
    )
    rest = (SHARE - 0.4) * LINE
    assert decide(observation).own == pytest.approx((0.4 * LINE, 0.75 * rest, 0.25 * rest))


@pytest.mark.parametrize("others", [(), (SharingTenant("w"),)])
def test_more_than_the_line_is_refused(others: tuple[SharingTenant, ...]) -> None:
    observation = Observation(LINE, (SharingTenant("a", rate=SHARE * LINE + (not others) * 1e6), *others))
    with pytest.raises(ValueError, match=r"accepted is at most 9\.85e\+08"):
        decide(observation)


@given(st.floats(1, 1e6), st.lists(st.tuples(st.floats(0.1, 10), st.floats(0, 1e6)), min_size=1, max_size=8))
def test_filling_is_max_min(whole: float, given: list[tuple[float, float]]) -> None:
    weights, demands = tuple(weight for weight, _ in given), [demand for _, demand in given]
    parts = fill(whole, weights, demands)
    assert sum(parts) == pytest.approx(min(whole, sum(demands)), abs=1e-6 * whole)
    levels = [part / weight for part, weight in zip(parts, weights, strict=True)]
    for part, demand, level in zip(parts, demands, levels, strict=True):
        assert part <= demand * (1 + 1e-9)
        if part < demand * (1 - 1e-9):  # whoever wants more has the highest level
            assert level >= max(levels) * (1 - 1e-6)


packets = st.lists(st.tuples(st.integers(-2_000_000, 5_000_000), st.integers(64, 65_536)), max_size=60)


@settings(max_examples=100)
@given(packets, st.floats(125e3, 12.5e9), st.integers(3000, 300_000))
def test_no_more_passes_in_any_time_than_the_rate_and_the_limit(
    given: list[tuple[int, int]], rate: float, limit: int
) -> None:
    """The clock may go back: then no time has passed until it is where it was."""
    units, now, last, gap, latest = rate_units(rate), 10**9, 0, 0, 0
    passed: list[tuple[int, int]] = []
    for more, length in given:
        now = max(0, now + more)
        latest = max(latest, now)
        verdict, last, gap = step(now, length, last, gap, units, limit, NEVER)
        assert verdict in (PASS, DROP) and 0 <= gap <= limit << SHIFT
        passed.append((latest, 0 if verdict == DROP else length))
    for start in range(len(passed)):
        total = 0
        for time, length in passed[start:]:
            total += length
            assert total <= units * (time - passed[start][0]) / 2**SHIFT + limit


def test_whoever_is_always_behind_gets_exactly_the_rate() -> None:
    units, last, gap, total = rate_units(12.5e6), 0, 0, 0
    for now in range(0, 10**9, 40_000):  # 300 Mb/s of 1,500 bytes for a second
        verdict, last, gap = step(now, 1500, last, gap, units, 150_000, NEVER)
        total += 1500 * (verdict != DROP)
    assert total == pytest.approx(12.5e6 + 150_000, rel=2e-4)
    assert virtual_delay(gap, units) == pytest.approx(150_000 / 12.5e6 * 1e9, rel=0.02)


def test_a_longer_queue_is_marked_before_it_is_dropped() -> None:
    last = gap = 0
    verdicts = []
    for _ in range(5):
        verdict, last, gap = step(7, 1000, last, gap, 1000, 4000, 2000)
        verdicts.append(verdict)
    assert verdicts == [PASS, PASS, MARK, MARK, DROP]


def test_what_is_measured_begins_anew_when_the_others_are_held_back_too() -> None:
    meter, (a, b, others) = RateMeter(), (SharingTenant(name) for name in ("a", "b", OTHERS))
    for turn, trouble in enumerate((0, 10)):
        meter.look(turn * 0.005, 1e9, [a, b], np.array([5, 5]) * turn, np.array([trouble, 0]))
    first = meter.look(0.010, 1e9, [others, a, b], np.array([99, 15, 15]), np.array([0, 10, 0]))
    assert [(tenant.offered, tenant.since_trouble) for tenant in first.entities] == [(0.0, None)] * 3
    after = meter.look(0.015, 1e9, [others, a, b], np.array([99, 20, 25]), np.array([0, 10, 3]))
    assert [tenant.offered for tenant in after.entities] == pytest.approx([0.0, 1000.0, 2000.0])
    assert [tenant.since_trouble for tenant in after.entities] == [None, None, 0.0]
