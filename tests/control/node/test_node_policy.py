"""The rules of the loops, and what the learners learn."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from windtunnel.control.node.policy import (
    UNKNOWN,
    Action,
    Epoch,
    Forecast,
    Frequency,
    Harvest,
    Memory,
    Overclock,
    Scanned,
    Turn,
    decide,
    features,
    unguarded,
)

EPOCH = Epoch(now=10, good=5, wanted=5, elapsed=0.05, longest=0.2, trusted=True, distrusted=None, hold=5)
TURN = Turn(
    now=10, sequence=3, expires=10.1, applied=2, acted=9.95, healthy=None, mitigated=None, deadline=0.15,
    hold=5,
)  # fmt: skip


@pytest.mark.parametrize(
    ("change", "learn", "publish", "distrusted"),
    [
        ({}, True, "prediction", None),
        ({"good": 4}, False, "", None),
        ({"good": 4, "elapsed": 0.2}, False, "default", None),
        ({"trusted": False}, True, "default", 10),
        ({"trusted": False, "distrusted": 7}, True, "default", 7),
        ({"distrusted": 6}, True, "default", 6),
        ({"distrusted": 5}, True, "prediction", None),
        ({"trusted": False, "guard": False}, True, "prediction", None),
    ],
)
def test_what_the_model_publishes(change: dict, learn: bool, publish: str, distrusted: float | None) -> None:
    decision = decide(replace(EPOCH, **change))
    assert (decision.learn, decision.publish, decision.distrusted) == (learn, publish, distrusted)


@pytest.mark.parametrize(
    ("change", "kind"),
    [
        ({}, "predict"),
        ({"expires": 10}, "wait"),
        ({"expires": 10, "acted": 9.8}, "default"),
        ({"expires": 10, "expiry": False}, "predict"),
        ({"applied": 3}, "wait"),
        ({"applied": 3, "acted": 9.8}, "default"),
        ({"applied": 3, "acted": 9.8, "expiry": False}, "wait"),
        ({"sequence": 0, "acted": 0}, "default"),
        ({"healthy": False}, "mitigate"),
        ({"healthy": False, "guard": False}, "predict"),
        ({"healthy": True, "mitigated": 5.1}, "wait"),
        ({"healthy": True, "mitigated": 5}, "resume"),
        ({"healthy": False, "mitigated": 5}, "wait"),
        ({"healthy": None, "mitigated": 1}, "wait"),
    ],
)
def test_what_the_actuator_does(change: dict, kind: str) -> None:
    decision = decide(replace(TURN, **change))
    assert decision == Action(kind, 3 if kind == "predict" else 0)


def test_without_guards_a_harmful_agent_goes_on() -> None:
    assert unguarded(replace(TURN, healthy=False)).kind == "predict"
    assert unguarded(replace(EPOCH, trusted=False)).publish == "prediction"


def peaks(values: list[float], cores: float = 8.0) -> list[Forecast]:
    """Forecasts after epochs of which each has one peak, seen five times."""
    last, before, forecasts = Forecast((), 0.0), (), []
    for value in values:
        latest = features([value] * 5, cores)
        last = decide(Harvest(last.weights, before, last.need, value, latest, 17, cores))
        before = latest
        forecasts.append(last)
    return forecasts


def test_harvest_begins_with_all_cores_and_learns_what_is_needed() -> None:
    forecasts = peaks([2.2] * 400)
    assert forecasts[0].need == 8.0
    assert 2.2 < forecasts[-1].need <= 3.5
    assert not any(forecast.harmed for forecast in forecasts[-50:])


def test_harvest_tells_low_load_from_high_load() -> None:
    draw = np.random.default_rng(1)
    values = [float(load) for load in draw.choice([1.2, 5.2], 60) for _ in range(20)]
    forecasts = peaks(values)
    low = [forecast.need for forecast, load in zip(forecasts[600:], values[600:], strict=True) if load == 1.2]
    high = [
        forecast.need for forecast, load in zip(forecasts[600:], values[600:], strict=True) if load == 5.2
    ]
    assert np.mean(high) > np.mean(low) + 1 and np.mean(high) > 5.2


def test_a_load_that_uses_all_that_was_left_counts_as_harmed() -> None:
    """Nobody can see what a starved load would have used."""
    base = Harvest((), features([1.0] * 5, 8), 1.0, 1.0, features([1.0] * 5, 8), 17, 8.0)
    assert decide(base).harmed
    assert not decide(replace(base, peak=0.5)).harmed
    assert not decide(replace(base, before=())).harmed
    assert not decide(replace(base, need=8.0, peak=8.0)).harmed


def scanned(accessed: tuple[bool, ...], last: Scanned, draws: tuple[float, ...] = (0.5, 0.5, 0.5)) -> Scanned:
    return decide(Memory(last, 2.0, accessed, 4.0, draws))


def test_scans_are_well_timed_when_some_regions_are_accessed_and_some_are_not() -> None:
    middle = Scanned(period=1)
    assert scanned((True, False, False), middle).hits == (0, 1, 0)
    assert scanned((True, True, True), middle).misses == (0, 1, 0)
    assert scanned((False, False, False), middle).misses == (0, 1, 0)
    assert scanned((True, True, True), replace(middle, period=0)).hits == (1, 0, 0)
    assert scanned((False, False, False), replace(middle, period=2)).hits == (0, 0, 1)


def test_the_slower_period_wins_where_draws_are_equal_and_the_better_one_else() -> None:
    assert scanned((True, False), Scanned()).period == 2
    assert scanned((True, False), Scanned(), (0.9, 0.5, 0.2)).period == 0


def test_a_region_is_cold_after_patience_and_warm_after_an_access() -> None:
    state = Scanned()
    for accessed in ((True, False), (True, False)):
        state = scanned(accessed, state)
    assert (state.idle, state.cold) == ((0.0, 4.0), (1,))
    state = scanned((True, True), state)
    assert (state.cold, state.returned) == ((), 1)


GREEDY, CALM = (0.5, 0.0), 0.3
"""Draws that do not explore, and an activity of the second quarter."""


def test_nominal_is_measured_before_a_boost_is_tried() -> None:
    first = decide(Overclock(Frequency(), 0, CALM, 0.4, (0.0, 0.99)))
    assert (first.level, first.nominal, first.reward) == (2, (0.0, 0.4, 0.0, 0.0), 0.0)
    unknown = decide(Overclock(first, 2, 0.9, 0.4, (0.0, 0.99)))
    assert (unknown.level, unknown.reward) == (0, UNKNOWN)


def test_one_epoch_in_ten_explores_any_level() -> None:
    known = decide(Overclock(Frequency(), 0, CALM, 0.4, GREEDY))
    levels = [decide(Overclock(known, 0, CALM, 0.4, (0.0999, draw))).level for draw in (0.0, 0.34, 0.99)]
    assert levels == [0, 1, 2]
    assert decide(Overclock(known, 0, CALM, 0.4, (0.1, 0.99))).level == 0


@pytest.mark.parametrize(("efficiency", "chosen"), [(0.5, 2), (0.4, 0), (0.3, 0)])
def test_a_boost_stays_where_it_does_more_for_a_joule(efficiency: float, chosen: int) -> None:
    state = decide(Overclock(Frequency(), 0, CALM, 0.4, GREEDY))
    state = decide(Overclock(state, 2, CALM, efficiency, GREEDY))
    assert state.reward == pytest.approx(efficiency / 0.4 - 1, abs=1e-3) and state.level == chosen
    assert decide(Overclock(state, 2, 0.9, 0.4, GREEDY)).level == 0  # another activity knows nothing of it


def test_a_value_looks_ahead_to_the_state_that_follows() -> None:
    values = ((0.0,) * 3, (0.0,) * 3, (0.0, 0.0, 0.4), (0.0,) * 3)
    last = Frequency(values, (0.4,) * 4, state=1, level=1)
    after = decide(Overclock(last, 1, 0.6, 0.5, GREEDY))
    assert after.values[1][1] == pytest.approx(0.1 * (0.25 + 0.5 * 0.4)) and after.level == 2
