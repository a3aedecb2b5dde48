"""Agents in the twin: each fault alone, each guard off alone, and how fast guards may change their mind."""

from __future__ import annotations

from functools import cache
from itertools import pairwise

import pytest

from windtunnel.base.errors import UserError
from windtunnel.control.node import Guards, emulate
from windtunnel.control.node.agents import ActuatorLoop, ModelLoop, Prediction
from windtunnel.control.node.policy import Schedule, decide
from windtunnel.control.node.twin import FAULTS, NodeOutcome

GROUPED = True
ON, OFF = Guards(), Guards(False, False, False, False)
SECONDS = 40.0


@cache
def ran(fault: str, guards: Guards = ON) -> NodeOutcome:
    return emulate("harvest", fault, guards, seconds=SECONDS, seed=1)


def test_guards_cost_next_to_nothing_where_nothing_is_wrong() -> None:
    assert ran("none").harm <= ran("none", OFF).harm
    assert ran("none").gain >= 0.8 * ran("none", OFF).gain > 2.0


@pytest.mark.parametrize("fault", FAULTS[1:])
def test_a_fault_hurts_without_guards_and_does_not_with_them(fault: str) -> None:
    # an operator comes after five seconds to an actuator that stands still: much of so short a run
    assert ran(fault).harm <= (0.03 if fault == "frozen actuator" else 0.02)
    assert ran(fault, OFF).harm >= 2 * ran(fault).harm


def test_bad_samples_cost_no_benefit_where_they_are_rejected() -> None:
    assert ran("bad data").counts["rejected"] > 100
    assert ran("bad data").gain > 1.5 * ran("bad data", Guards(validation=False)).gain


def test_the_guard_of_the_actuator_protects_without_that_of_the_model() -> None:
    alone = ran("broken model", Guards(model=False))
    assert alone.counts["mitigate"] >= 3 and "published default" not in alone.counts
    assert ran("broken model").harm < alone.harm < 0.2 < ran("broken model", OFF).harm


def test_the_guard_of_the_model_protects_without_that_of_the_actuator() -> None:
    alone = ran("broken model", Guards(actuator=False))
    assert alone.counts["distrusted"] >= 1 and "mitigate" not in alone.counts
    assert alone.harm < 0.05 < ran("broken model", OFF).harm


def test_a_late_model_is_survived_by_expiry_alone() -> None:
    alone = ran("late model", Guards(False, False, True, False))
    assert alone.counts["default"] > 100
    assert alone.harm < 0.02 < ran("late model", OFF).harm


def test_pages_that_are_cold_go_and_a_broken_model_takes_no_others() -> None:
    calm, broken = (emulate("memory", fault, seconds=120.0) for fault in ("none", "broken model"))
    assert calm.gain > 0.4 and calm.harm < 0.05
    assert broken.harm < emulate("memory", "broken model", OFF, seconds=120.0).harm
    assert broken.counts["distrusted"] == 1


@cache
def clocked(fault: str = "none", guards: Guards = ON) -> NodeOutcome:
    return emulate("overclock", fault, guards, seconds=1800.0, seed=1)


def test_a_frequency_is_raised_where_that_pays() -> None:
    assert clocked().gain > 0.05 and clocked().harm < 0.005
    assert clocked().gain >= 0.8 * clocked(guards=OFF).gain


@pytest.mark.parametrize("fault", FAULTS[1:])
def test_a_fault_wastes_energy_without_guards(fault: str) -> None:
    # what stands still at the nominal frequency does no harm: with this seed it does so at a boost
    assert clocked(fault).harm < 0.006 < clocked(fault, OFF).harm
    assert clocked(fault, OFF).harm >= 4 * clocked(fault).harm


def test_each_guard_of_a_broken_clock_protects_alone() -> None:
    # that of the actuator knows of idle loads only
    both, neither = clocked("broken model"), clocked("broken model", OFF)
    for guards, count in ((Guards(model=False), "mitigate"), (Guards(actuator=False), "distrusted")):
        alone = clocked("broken model", guards)
        assert alone.counts[count] and both.harm < alone.harm < neither.harm


def test_equal_seeds_give_equal_outcomes() -> None:
    runs = [emulate("harvest", "bad data", seconds=5.0, seed=seed) for seed in (3, 3, 4)]
    assert runs[0] == runs[1] != runs[2]
    with pytest.raises(UserError, match="accepted are"):
        emulate("overclocking")


class Flapping:
    """Is unhealthy at each second assessment, and expects only predictions of its time."""

    def __init__(self) -> None:
        self.now, self.assessed, self.acts = 0.0, 0, list[tuple[float, float | None]]()
        self.stops: list[float] = []

    def act(self, prediction: float | None) -> dict[str, float]:
        self.acts.append((self.now, prediction))
        return {}

    def assess(self) -> bool:
        self.assessed += 1
        return self.assessed % 2 == 1

    def mitigate(self) -> dict[str, float]:
        self.stops.append(self.now)
        return {}

    clean_up = mitigate


def test_a_flapping_guard_holds_and_expired_predictions_are_never_used() -> None:
    schedule, actuator = Schedule(act=0.1, assess=0.1, hold=3.0, deadline=1.0), Flapping()
    loop = ActuatorLoop(actuator, schedule, Guards(), decide)
    for number in range(1, 300):
        actuator.now = number / 10
        instant = actuator.now - number % 7 / 10  # the slot lags behind, also beyond the validity
        loop.turn(actuator.now, Prediction(number, instant + 0.35, instant))
    assert len(actuator.stops) >= 5
    assert all(after - before >= schedule.hold for before, after in pairwise(actuator.stops))
    used = [(now, value) for now, value in actuator.acts if value is not None]
    assert used and all(now < value + 0.35 for now, value in used)


class Untrusted:
    """A model that predicts how often it was updated, and is not trusted in the first second."""

    now, updates = 0.0, 0

    def collect(self, now: float) -> float:
        self.now = now
        return -1.0 if 3 <= now < 4 else 1.0

    def validate(self, sample: float) -> bool:
        return sample > 0

    def update(self, samples: list[float], ask: object) -> None:
        self.updates += 1
        assert samples and min(samples) > 0

    def predict(self) -> int:
        return self.updates

    def assess(self) -> bool:
        return self.now > 1.0


def test_a_model_earns_trust_while_it_is_replaced_and_bad_epochs_give_the_default() -> None:
    published: list[tuple[float, Prediction]] = []
    model, schedule = Untrusted(), Schedule(samples=2, longest=0.5, valid=1.0, hold=2.0)
    loop = ModelLoop(
        model, schedule, Guards(), decide, lambda prediction: published.append((model.now, prediction)), 0.0
    )
    for number in range(60):
        loop.turn(number / 10)
    before = [prediction.value for now, prediction in published if now < 2.0]
    assert before and set(before) == {None} and model.updates > len(before)
    during = [prediction.value for now, prediction in published if 3.4 < now < 4.0]
    assert during and set(during) == {None}
    assert published[-1][1].value == model.updates
    assert [prediction.sequence for _, prediction in published] == list(range(1, len(published) + 1))
