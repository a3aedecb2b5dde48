"""The emulated control plane: small truths, the same bytes from the same seed, and the same handlers."""

from __future__ import annotations

import numpy as np
import pytest

from windtunnel.control.database.policy import POLICIES, Assignment, Decision, Observation, Task, Worker
from windtunnel.control.database.twin import cost, emulate


def test_a_queue_by_hand() -> None:
    """Two slots, four tasks of 10 s at once: two begin, two wait for 10 s."""
    report = emulate([("a", 1, ""), ("b", 1, "")], np.zeros(4), np.full(4, 10.0), 0)
    assert report.waits.tolist() == [0, 0, 10, 10]
    assert (report.makespan, report.used, report.decisions, report.done) == (20.0, 1.0, 4, 4)


def test_what_never_fits_is_left() -> None:
    report = emulate([("a", 1, "")], np.array([0.0, 1.5, 100.0]), np.full(3, 2.0), 0, tasks={1: {"slots": 2}})
    assert np.isnan(report.waits).tolist() == [False, True, False]
    assert (report.done, report.makespan) == (2, 102.0)


def test_locality_and_priority_show() -> None:
    workers, data = [("a", 2, "x"), ("b", 3, "y")], {0: {"data": "x"}}
    decisions: list[Decision] = []

    def watched(observation: Observation) -> Decision:
        decisions.append(POLICIES["locality"](observation))
        return decisions[-1]

    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(POLICIES, "watched", watched)  # type: ignore[arg-type]
        emulate(workers, np.zeros(1), np.ones(1), 0, policy="watched", tasks=data)
    assert decisions[0].assignments == (Assignment(1, "a"),)
    late = emulate(
        [("a", 1, "")], np.zeros(3), np.full(3, 5.0), 0, policy="priority", tasks={2: {"priority": 1}}
    )
    assert late.waits.tolist() == [5, 10, 0]


@pytest.mark.parametrize("policy", list(POLICIES))
def test_the_same_seed_gives_the_same(policy: str) -> None:
    rng = np.random.default_rng(5)
    arrivals, durations = np.sort(rng.uniform(0, 60, 150)), rng.uniform(1, 20, 150)
    workers = [(f"w{number}", 3, "xy"[number % 2]) for number in range(5)]
    special = {
        place: {"slots": 1 + place % 3, "priority": place % 2, "data": "xyz"[place % 3]}
        for place in range(150)
    }
    special |= {place: {"gang": f"g{place // 4}", "members": 4, "slots": 2} for place in range(40, 60)}
    first, other = (emulate(workers, arrivals, durations, 3, policy=policy, tasks=special) for _ in range(2))
    assert first.done == 150 and first.decisions == 150
    assert (first.waits == other.waits).all() and first.makespan == other.makespan
    assert 0 < first.used <= 1 + 1e-9


def test_a_decision_has_a_price() -> None:
    observation = Observation(
        (Task(1, data="x"), Task(2), Task(3)), (Worker("a", 1, 1, "y"), Worker("b", 1, 1))
    )
    decision = Decision((Assignment(1, "a"), Assignment(2, "b")))
    assert cost(observation, decision) == {"tasks waiting": 1.0, "tasks away from data": 1.0}
