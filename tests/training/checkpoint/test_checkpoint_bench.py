"""The comparison's own arithmetic, and its smallest jobs; what it measures is not tested."""

from __future__ import annotations

import math
from itertools import pairwise
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from benchmarks.training.checkpoint import cost, recovery, wasted
from benchmarks.training.checkpoint.recovery import GROUP, KINDS, RANKS, JobRun, Truth
from benchmarks.training.checkpoint.wasted import Save
from windtunnel.training.elastic.events import Event
from windtunnel.training.elastic.faults import parse


def event(kind: str, t: float, generation: int = 1, **fields: object) -> Event:
    return {"kind": kind, "t": t, "generation": generation, **fields}


def membership(generation: int, t: float) -> Event:
    return event("decided", t, generation, membership={"generation": generation})


# --- recovery -----------------------------------------------------------------------------------------------


@given(st.integers(1, 60), st.integers(0, 1000))
def test_strokes_never_take_both_copies(count: int, seed: int) -> None:
    texts, last = recovery.plan(count, seed)
    faults = [parse(text) for text in texts]
    assert len(faults) == count and (texts, last) == recovery.plan(count, seed)
    counts = [sum(text.startswith(kind) for text in texts) for kind in KINDS.values()]
    assert max(counts) - min(counts) <= 1
    groups = [(fault.rank if fault.host is None else fault.host) // GROUP for fault in faults]  # type: ignore[operator]
    assert all(one != other for one, other in pairwise(groups)) and max(groups) < RANKS // GROUP
    steps = [fault.step for fault in faults if not fault.during]
    assert all(other - one >= recovery.GAP for one, other in pairwise(steps))  # type: ignore[operator]
    assert len(steps) == count - count // recovery.WITHIN and not faults[0].during


def a_run(losses: dict[int, str]) -> list[Event]:
    """Rank 1 is killed after step 1; step 1 is done again."""
    return [
        membership(1, 0.0),
        event("step", 1.0, step=0, loss=losses[0]),
        event("step", 2.0, step=1, loss=losses[1]),
        event("injected", 2.5, fault="kill:rank=1,step=1", place=1, rank=1),
        event("lost", 2.6, what="worker", place=1, rank=1, evidence="exit"),
        membership(2, 2.7),
        *(event("grouped", 3.0, 2, rank=rank) for rank in range(RANKS)),
        *(event("restored", 3.2, 2, rank=rank, step=0, tier="memory", seconds=0.1) for rank in range(RANKS)),
        event("step", 3.5, 2, step=1, loss=losses[1]),
    ]


@pytest.mark.parametrize("right", [True, False])
def test_a_loss_that_differs_in_the_last_bit_misses_the_target(right: bool) -> None:
    truth = Truth({0: (1.0).hex(), 1: (2.0).hex()}, {rank: {"1": "state"} for rank in range(RANKS)})
    losses = {**truth.losses, **({} if right else {1: math.nextafter(2.0, 3.0).hex()})}
    ran = JobRun(["kill:rank=1,step=1"], 1, a_run(losses), dict.fromkeys(range(RANKS), "state"))
    rows = {row.name: row for row in recovery.result_rows([ran], truth)}
    assert rows["kills survived"].met
    assert rows["finished steps lost by a failure, most"].measured == 1
    assert rows["losses as in a run that nothing disturbed"].met is right
    assert rows["final states as in a run that nothing disturbed"].met
    phases = {row.name: row.measured for row in recovery.phase_rows([ran])}
    assert phases["worker killed: to the first new step"] == pytest.approx(1.0)
    assert phases["worker killed: detect"] == pytest.approx(0.1)
    assert phases["host killed: recovery"] is None


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
    for seconds, met in ((0.109, True), (0.112, False)):
        step, stall = cost.time_rows("concurrent", [seconds] * 5, [0.004] * 5, [0.1] * 5, "")
        assert step.met is met and stall.measured == 0.004


@pytest.mark.conformance
@pytest.mark.slow
@pytest.mark.usefixtures("quick_launch")
def test_a_real_stroke_is_survived_to_the_bit(tmp_path: Path) -> None:
    ran = recovery.run_job(tmp_path / "struck", ["kill:host=1,step=3"], 12)
    assert not ran.failure and ran.struck
    truth = recovery.undisturbed(tmp_path / "calm", [ran.last])
    assert all(row.met for row in recovery.result_rows([ran], truth) if row.target)


# --- idle ---------------------------------------------------------------------------------------------------


def test_figures_are_over_the_steps_without_checkpoints() -> None:
    alone = [0.50, 0.50, 0.52]
    median, high, inside = cost.rows(cost.Phase("idle", 0.5, 4096, [0.51, 0.51, 0.55], inside=0.75), alone)
    assert median.measured == pytest.approx(2.0)
    assert median.met is True
    assert high.measured == pytest.approx(100 * (0.55 / 0.52 - 1))
    assert inside.measured == 75.0
    missed, _ = cost.rows(cost.Phase("idle", 0.5, 4096, [0.6]), alone)
    assert missed.met is False
    free, _ = cost.rows(cost.Phase("concurrent", 0.5, 4096, [0.6]), alone)
    assert free.met is None
