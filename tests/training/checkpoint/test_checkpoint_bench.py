"""The comparison's own arithmetic; what it measures is not tested."""

from __future__ import annotations

import pytest

from benchmarks.training.checkpoint import cost, wasted
from benchmarks.training.checkpoint.wasted import Save
from windtunnel.training.elastic.events import Event


def event(kind: str, t: float, generation: int = 1, **fields: object) -> Event:
    return {"kind": kind, "t": t, "generation": generation, **fields}


# --- wasted -------------------------------------------------------------------------------------------------


def test_a_save_counts_when_the_last_rank_has_it() -> None:
    events = [event("step", 1.0, step=0, ended=0.9), event("step", 2.0, step=1, ended=1.9)]
    events += [event("saved", 1.5 + rank, rank=rank, step=0) for rank in range(4)]
    events += [event("saved", 2.5, rank=rank, step=1) for rank in range(3)]
    assert wasted.saves_of(events, 4) == [Save(0, 0.9, 4.5)]
    events.append(event("committed", 2.2, step=1))
    assert [save.step for save in wasted.saves_of(events, 4)] == [1, 0]
    # an older one that becomes whole later changes nothing
    assert wasted.lost_work(wasted.saves_of(events, 4), 5.0) == pytest.approx(3.1)


# --- cost ---------------------------------------------------------------------------------------------------


def test_the_cost_of_a_way_is_held_against_the_steps_without() -> None:
    for seconds, passed in ((0.109, True), (0.112, False)):
        step, stall = cost.time_rows("concurrent", [seconds] * 5, [0.004] * 5, [0.1] * 5, "")
        assert step.passed is passed and stall.measured == 0.004


# --- idle ---------------------------------------------------------------------------------------------------


def test_figures_are_over_the_steps_without_checkpoints() -> None:
    alone = [0.50, 0.50, 0.52]
    median, high, inside = cost.rows(cost.Phase("idle", 0.5, 4096, [0.51, 0.51, 0.55], inside=0.75), alone)
    assert median.measured == pytest.approx(2.0)
    assert median.passed is True
    assert high.measured == pytest.approx(100 * (0.55 / 0.52 - 1))
    assert inside.measured == 75.0
    missed, _ = cost.rows(cost.Phase("idle", 0.5, 4096, [0.6]), alone)
    assert missed.passed is False
    free, _ = cost.rows(cost.Phase("concurrent", 0.5, 4096, [0.6]), alone)
    assert free.passed is None
