"""Phases and steps lost, from event logs written by hand and by a supervisor."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from fake_agents import begun

from support.waiting import until
from windtunnel.store import eventlog
from windtunnel.training.elastic.events import goodput, recoveries

Event = dict[str, Any]


def at(t: float, kind: str, generation: int, **fields: Any) -> Event:
    return {"t": t, "kind": kind, "generation": generation, "epoch": 1, **fields}


def lost(t: float, generation: int, place: int | None, rank: int | None = None, **fields: Any) -> Event:
    what = "host" if rank is None else "worker"
    about = {"what": what, "place": place, "rank": rank, "evidence": "exit", "own": False, "error": ""}
    return at(t, "lost", generation, host=0, **{**about, **fields})


def steps(t: float, generation: int, *numbers: int) -> list[Event]:
    return [at(t + i, "step", generation, step=s, rank=0) for i, s in enumerate(numbers)]


BEGIN = [at(0, "started", 0), at(0, "decided", 1, reason="the run begins"), at(1, "grouped", 1, rank=0)]


def test_phases_of_one_loss() -> None:
    events = [
        *BEGIN,
        *steps(2, 1, 0, 1, 2),
        at(5.0, "injected", 1, fault="kill:host=1", place=1, rank=None),
        lost(5.5, 1, 1, evidence="connection"),
        at(6.0, "decided", 2, reason="host 1"),
        at(6.25, "grouped", 2, rank=0),
        at(6.5, "grouped", 2, rank=1),
        at(7.0, "restored", 2, rank=0, step=1, tier="memory"),
        at(8.0, "restored", 2, rank=1, step=1, tier="peer"),
        *steps(10, 2, 2, 3, 4),
    ]
    (recovery,) = recoveries(events)
    assert recovery.phases == {"detect": 0.5, "decide": 0.5, "regroup": 0.5, "load": 1.5, "first_step": 2.0}
    assert (recovery.fault, recovery.seconds, recovery.complete) == ("kill:host=1", 5.0, True)
    assert (recovery.newest, recovery.resumed, recovery.steps_lost) == (2, 1, 1)
    assert recovery.tiers == {0: "memory", 1: "peer"}
    used = goodput(events)
    assert (used.steps, used.steps_redone, used.step_seconds) == (5, 1, 1.0)
    assert (used.seconds, used.training, used.starting, used.waiting) == (12.0, 5.0, 1.0, 0.0)
    assert used.recovering == 5.0 and used.redone == 1.0  # step 2, which was left behind
    assert used.fraction == pytest.approx(5 / 12)


def test_a_loss_during_a_recovery_belongs_to_it() -> None:
    events = [
        *BEGIN,
        *steps(2, 1, 0, 1),
        lost(4, 1, 0, 0),
        at(5, "decided", 2, reason="a"),
        at(6, "grouped", 2, rank=1),
        lost(7, 2, 1, 1),
        at(8, "decided", 3, reason="b"),
        at(9, "grouped", 3, rank=0),
        *steps(10, 3, 2),
        lost(12, 3, 0, 0),
        at(13, "decided", 4, reason="c"),
    ]
    first, second = recoveries(events)
    assert (first.generation, first.cause, first.steps_lost) == (3, "b", 0)
    assert first.phases == {"detect": None, "decide": 4, "regroup": 1, "load": None, "first_step": 1}
    assert len(first.lost) == 2
    assert not second.complete and second.seconds is None and second.decided == 13


def test_what_is_no_recovery_and_what_is_no_loss() -> None:
    assert recoveries([*BEGIN, lost(1.5, 1, None), *steps(2, 1, 0, 1)]) == []
    (joined,) = recoveries([*BEGIN, *steps(2, 1, 0), at(4, "decided", 2, reason="+1"), *steps(5, 2, 1)])
    assert (joined.lost, joined.steps_lost, joined.seconds) == ((), 0, 1)
    suspected = at(4, "suspected", 1, rank=0, error="")
    alone = [lost(4.5, 1, 0, 0, evidence="suspect"), at(4.5, "decided", 2, reason="")]
    (doubt,) = recoveries([*BEGIN, *steps(2, 1, 0), suspected, *alone, *steps(5, 2, 1)])
    assert doubt.detected == 4


def test_only_a_fault_that_fits_is_the_cause() -> None:
    """A bit flip that nobody noticed is not what killed rank 1."""
    flip = at(2.5, "injected", 1, fault="flip", place=0, rank=0)
    kill = at(3.0, "injected", 1, fault="kill", place=1, rank=1)
    events = [*BEGIN, *steps(2, 1, 0), flip, kill, lost(3.5, 1, 1, 1), at(4, "decided", 2), *steps(5, 2, 1)]
    (recovery,) = recoveries(events)
    assert (recovery.fault, recovery.injected) == ("kill", 3.0)


def test_goodput_of_little() -> None:
    assert goodput([]).fraction == 0.0
    assert goodput([*BEGIN, *steps(1, 1, 0, 1)]).fraction == 1.0
    assert goodput([*BEGIN, at(9, "finished", 1)]).starting == 9.0


def test_a_run_that_fails() -> None:
    (recovery,) = recoveries(
        [*BEGIN, *steps(2, 1, 0), lost(4, 1, 0), at(5, "finished", 1, status=1, reason="")]
    )
    assert not recovery.complete and recovery.decided is None


def test_redone_steps_cost_time() -> None:
    tail = [lost(12, 1, 0, 0), at(13, "decided", 2, reason=""), *steps(14, 2, *range(4, 14))]
    events = [*BEGIN, *steps(1, 1, *range(10)), *tail]
    (recovery,) = recoveries(events)
    assert recovery.steps_lost == 6
    used = goodput(events)
    assert (used.steps, used.steps_redone, used.redone, used.training) == (14, 6, 6.0, 14.0)


def test_time_without_a_step_is_lost_whatever_its_cause() -> None:
    """Nobody was lost: a launcher was killed, and its successor came 36 s later. One step was in flight."""
    resumed = [at(36, "started", 1), *steps(40, 1, *range(10, 20))]
    used = goodput([*BEGIN, *steps(1, 1, *range(10)), *resumed, at(51, "finished", 1, status=0)])
    assert (used.recoveries, used.recovering, used.redone) == (0, 0.0, 0.0)
    assert (used.seconds, used.training, used.waiting) == (51.0, 21.0, 30.0)  # 10 → 40: two of 30 s
    assert used.fraction == pytest.approx(21 / 51)


@pytest.mark.parametrize("again", [2, 3])
def test_what_was_left_behind_does_not_count(again: int) -> None:
    """Steps 3 and 4 went with a host; whether they are done again does not change that."""
    after = [at(8, "restored", 2, rank=0, step=2, tier="peer"), *steps(9, 2, *range(3, 3 + again))]
    used = goodput([*BEGIN, *steps(1, 1, *range(5)), lost(6, 1, 0), at(7, "decided", 2, reason=""), *after])
    assert (used.redone, used.training) == (2.0, 3.0 + again)


def test_a_program_that_counts_each_epoch_anew_leaves_no_step_behind() -> None:
    events = [*BEGIN, *steps(1, 1, 0, 1, 2, 0, 1, 2), lost(7, 1, 0), *steps(9, 2, 2, 0, 1)]
    used = goodput(events)
    assert (used.redone, used.training, used.recovering) == (1.0, 8.0, 2.0)


def test_from_a_supervisors_log(tmp_path: Path) -> None:
    with begun(tmp_path, 2) as (run, agents):
        agents[0].step(0)
        until(lambda: run.events("step"), "a step")
        agents[0].event("injected", fault="kill:rank=1", place=1, rank=1)
        until(lambda: run.events("injected"), "the injection")
        agents[1].exit(1, signal=9)
        run.formed(2)
        for agent in agents:
            until(lambda a=agent: len(run.events("grouped")) == 4, "the group")
        agents[0].event("restored", generation=2, rank=0, step=0, tier="memory")
        agents[0].step(1)
        until(lambda: len(run.events("step")) == 2, "a step")
        (recovery,) = recoveries(eventlog.read(tmp_path / "events.jsonl"))
        assert (recovery.fault, recovery.steps_lost) == ("kill:rank=1", 0)
        assert all(seconds is not None for seconds in recovery.phases.values())
