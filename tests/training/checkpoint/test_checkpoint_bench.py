"""The comparison's own arithmetic, and its smallest jobs; what it measures is not tested."""

from __future__ import annotations

import math
from itertools import pairwise
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from benchmarks.training.checkpoint import cost, idle, recovery, wasted
from benchmarks.training.checkpoint.recovery import GROUP, KINDS, RANKS, JobRun, Kill, Truth
from benchmarks.training.checkpoint.wasted import Save
from windtunnel.linux import network
from windtunnel.training.elastic.events import Event


def event(kind: str, t: float, generation: int = 1, **fields: object) -> Event:
    return {"kind": kind, "t": t, "generation": generation, **fields}


def membership(generation: int, t: float) -> Event:
    return event("decided", t, generation, membership={"generation": generation})


# --- recovery -----------------------------------------------------------------------------------------------


@settings(deadline=None)
@given(st.integers(1, 60), st.integers(0, 1000))
def test_strokes_never_take_both_copies(count: int, seed: int) -> None:
    kills = recovery.plan(count, seed)
    assert len(kills) == count
    assert kills == recovery.plan(count, seed)
    counts = [sum(kill.kind == kind for kill in kills) for kind in KINDS]
    assert max(counts) - min(counts) <= 1
    assert not kills[0].within
    for before, kill in pairwise(kills):
        assert 0 <= kill.rank < RANKS
        if kill.within:
            assert not before.within
            assert kill.rank // GROUP != before.rank // GROUP


def test_a_job_is_settled_when_the_newest_generation_stepped_and_committed() -> None:
    events = [membership(1, 0.0), event("step", 1.0, step=0)]
    assert not recovery.settled(events, 0)
    events.append(event("committed", 1.1, step=0))
    assert recovery.settled(events, 0)
    struck = len(events)
    assert not recovery.settled(events, struck)
    events += [membership(2, 2.0), event("committed", 2.5, 2, step=0), event("step", 3.0, 2, step=1)]
    assert not recovery.settled(events, struck)  # what was committed is what it came back to
    events.append(event("committed", 3.1, 2, step=1))
    assert recovery.settled(events, struck)
    assert not recovery.settled([*events, membership(3, 4.0)], struck)


def a_run(losses: dict[int, str]) -> list[Event]:
    """Rank 1 is killed after step 1; step 1 is done again."""
    return [
        membership(1, 0.0),
        event("step", 1.0, step=0, loss=losses[0]),
        event("step", 2.0, step=1, loss=losses[1]),
        event("injected", 2.5, fault="kill_worker(1)", place=1, rank=1),
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
    ran = JobRun(
        [Kill("worker killed", 1, 0.0, False)], 1, 1, a_run(losses), dict.fromkeys(range(RANKS), "state")
    )
    rows = {row.name: row for row in recovery.result_rows([ran], truth, "")}
    assert rows["kills survived"].met
    assert rows["finished steps lost by a failure, most"].measured == 1
    assert rows["losses as in a run that nothing disturbed"].met is right
    assert rows["final states as in a run that nothing disturbed"].met
    phases = {row.name: row.measured for row in recovery.phase_rows([ran])}
    assert phases["worker killed: to the first new step"] == pytest.approx(1.0)
    assert phases["worker killed: detect"] == pytest.approx(0.1)
    assert phases["host killed: recovery"] is None


def test_two_strokes_in_one_recovery_are_several_at_once() -> None:
    events = a_run({0: "", 1: ""})
    events.insert(5, event("injected", 2.65, fault="kill_host(2)", place=2, rank=None))
    kills = [Kill("worker killed", 1, 0.0, False), Kill("host killed", 2, 0.0, True)]
    assert list(recovery.kinds_of([JobRun(kills, 2, 1, events)])) == [recovery.SEVERAL]


# --- wasted -------------------------------------------------------------------------------------------------


@settings(deadline=None)
@given(st.floats(0.1, 5.0), st.integers(1, 20), st.floats(0.01, 3.0), st.integers(0, 9))
def test_what_instants_lose_is_what_the_formula_says(
    step: float, every: int, share: float, seed: int
) -> None:
    interval = every * step
    complete = min(share, 1.0) * interval
    saves = [Save(n * every, n * interval, n * interval + complete) for n in range(6)]
    assert wasted.complete(saves) == pytest.approx(complete)
    assert wasted.interval(saves) == pytest.approx(interval)
    lost = [wasted.lost_work(saves, at) for at in wasted.instants(saves, 4000, seed)]
    assert all(complete - 1e-9 <= one <= complete + interval + 1e-9 for one in lost)
    assert sum(lost) / len(lost) == pytest.approx(complete + interval / 2, rel=0.05)


def test_a_save_counts_when_the_last_rank_has_it() -> None:
    events = [event("step", 1.0, step=0, ended=0.9), event("step", 2.0, step=1, ended=1.9)]
    events += [event("saved", 1.5 + rank, rank=rank, step=0) for rank in range(4)]
    events += [event("saved", 2.5, rank=rank, step=1) for rank in range(3)]
    assert wasted.saves_of(events, 4) == [Save(0, 0.9, 4.5)]
    events.append(event("committed", 2.2, step=1))
    assert [save.step for save in wasted.saves_of(events, 4)] == [1, 0]
    # an older one that becomes whole later changes nothing
    assert wasted.lost_work(wasted.saves_of(events, 4), 5.0) == pytest.approx(3.1)


def test_the_store_takes_as_many_steps_as_published() -> None:
    assert RANKS * wasted.MIB * 2**20 / wasted.rate(False) == pytest.approx(8 * wasted.COMPUTE)
    published = (8 + 8 / 2 + 8) / (1 + 1 / 2)
    assert published == pytest.approx(13.3, abs=0.04)


def test_a_real_kill_loses_what_came_after_the_state_that_was_read() -> None:
    events = a_run({0: "", 1: ""})
    for one in events:
        if one["kind"] == "step":
            one["ended"] = one["t"] - 0.1
    (killed,) = wasted.killed(events)
    assert killed.lost == pytest.approx(2.5 - 0.9)
    assert killed.load == pytest.approx(0.1)
    assert killed.whole == pytest.approx(1.6 + 1.0)


# --- cost ---------------------------------------------------------------------------------------------------


def test_the_cost_of_a_way_is_held_against_the_steps_without() -> None:
    none = {"seconds": [0.1] * 5}
    for seconds, met in ((0.109, True), (0.112, False)):
        of = {"seconds": [seconds] * 5, "stalls": [0.004] * 5}
        step, stall = cost.time_rows("concurrent", of, none, "")
        assert step.met is met and stall.measured == 0.004


@pytest.mark.conformance
@pytest.mark.slow
@pytest.mark.usefixtures("quick_launch")
def test_a_real_stroke_is_survived_to_the_bit(tmp_path: Path) -> None:
    kills = [Kill("host killed", 1, 0.1, False)]
    ran = recovery.run_job(tmp_path / "struck", kills)
    assert not ran.failure
    truth = recovery.undisturbed(tmp_path / "calm", [ran.last])
    assert all(row.met for row in recovery.result_rows([ran], truth, "") if row.target)


@pytest.mark.conformance
@pytest.mark.slow
@pytest.mark.usefixtures("quick_launch")
@pytest.mark.parametrize("saver", ["store", "peer"])
def test_every_saver_brings_a_job_back(saver: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in {"QUICK_MIB": 0.5, "QUICK_COMPUTE": 0.02, "QUICK_STEPS": 4}.items():
        monkeypatch.setattr(wasted, name, value)
    measured = wasted.measure(wasted.Way("tried", saver), tmp_path, True, seed=1)
    assert len(measured.saves) >= wasted.QUICK_SAVES
    assert [kill.recovery.complete for kill in measured.kills] == [True]
    assert len(list(wasted.way_rows(measured, True))) == 3


# --- idle ---------------------------------------------------------------------------------------------------


def test_figures_are_over_the_steps_without_checkpoints() -> None:
    alone = [0.50, 0.50, 0.52]
    outcome = idle.IdleResult([0.51, 0.51, 0.55], every=1, inside=0.75)
    median, high, inside = idle.rows(idle.Phase("idle", 0.5, 3), outcome, alone)
    assert median.measured == pytest.approx(2.0)
    assert median.met is True
    assert high.measured == pytest.approx(100 * (0.55 / 0.52 - 1))
    assert inside.measured == 75.0
    missed, _ = idle.rows(idle.Phase("idle", 0.5, 1), idle.IdleResult([0.6], 1, None), alone)
    assert missed.met is False
    free, _ = idle.rows(idle.Phase("concurrent", 0.5, 1), idle.IdleResult([0.6], 1, None), alone)
    assert free.met is None


def test_a_host_without_network_namespaces_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(network, "missing", lambda: "network namespaces need root")
    (row,) = idle.idle_rows(quick=True)
    assert row.measured is None
    assert "root" in row.note
