"""The result from change to change against a result that is walked second by second, and its accounts."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from windtunnel.traces.failures import HostChange, regular
from windtunnel.training.checkpoint.policy.placement import place
from windtunnel.training.elastic.policy.rules import Rules
from windtunnel.training.goodput.twin.restart import PeerMemory, StorageRestart
from windtunnel.training.goodput.twin.simulate import JobModel, PhaseCosts, Scheme, simulate
from windtunnel.training.goodput.twin.supervisor import TwinSupervisor
from windtunnel.training.goodput.twin.templates import Templates

JOB = JobModel(hosts=12, step_time=7.0, state_bytes=12e9, stages=3, microbatches=48)
COSTS = PhaseCosts(
    detect=3.0, regroup=1.0, regroup_growth=0.0, start=11.0, replace=40.0, storage_bandwidth=1e9
)
SCHEMES: dict[str, Callable[[JobModel, PhaseCosts], Scheme]] = {
    "storage": lambda job, costs: StorageRestart(job, costs, every=5),
    "memory": lambda job, costs: PeerMemory(job, costs, place(job.hosts, 2, "group"), storage_every=50),
    "templates": lambda job, costs: Templates(job, costs, storage_every=50),
}


@st.composite
def traces(draw: st.DrawFn) -> tuple[HostChange, ...]:
    times = sorted(draw(st.lists(st.integers(1, 1900), max_size=12, unique=True)))
    return tuple(
        HostChange(
            float(time),
            tuple(draw(st.lists(st.integers(0, 11), min_size=1, max_size=3, unique=True))),
            software=draw(st.booleans()),
        )
        for time in times
    )


@pytest.mark.parametrize("name", SCHEMES)
@given(trace=traces())
@settings(max_examples=20, deadline=None)
def test_every_second_is_accounted_for(name: str, trace: tuple[HostChange, ...]) -> None:
    result = simulate(SCHEMES[name](JOB, COSTS), JOB, COSTS, trace, 2000.0)
    assert sum(result.phases.values()) == pytest.approx(2000.0)
    assert all(seconds >= -1e-9 for seconds in result.phases.values())
    assert result.phases["useful"] <= result.steps * JOB.step_time + 1e-6
    assert 0 <= result.steps <= 2000 // JOB.step_time
    assert result == simulate(SCHEMES[name](JOB, COSTS), JOB, COSTS, trace, 2000.0)


def walked(every: int, trace: Sequence[HostChange], horizon: int) -> tuple[int, int]:
    """Steps kept and redone by a job that saves every ``every`` steps, blocking 12 s, walked second by
    second."""
    steps = saved = redone = 0
    left = 7  # seconds of work until the step is over
    saving = 0
    down = 0
    back_at: dict[int, int] = {}
    away: set[int] = set()
    changes = {int(change.time): change for change in trace}
    for now in range(horizon):
        for host in [m for m, at in back_at.items() if at == now]:
            del back_at[host]
            away.discard(host)
            if not away and down < 0:
                down = 11 + 1 + 12
        change = changes.get(now)
        if change is not None:
            lost = [m for m in change.lost if m not in away]
            if lost:
                redone += steps - saved
                steps, left, saving = saved, 7, 0
                if not change.software:
                    away.update(lost)
                    back_at.update(dict.fromkeys(lost, now + 40))
                down = -1 if away else 3 + 11 + 1 + 12
        if down < 0:
            continue
        if down:
            down -= 1
            continue
        if saving:
            saving -= 1
            if not saving:
                saved = steps
            continue
        left -= 1
        if not left:
            steps, left = steps + 1, 7
            if steps % every == 0:
                saving = 12
    return steps, redone


@given(trace=traces())
@settings(max_examples=100, deadline=None)
def test_restart_from_storage_agrees_with_a_walk(trace: tuple[HostChange, ...]) -> None:
    """The result spreads a save over the steps between two saves: it may be off by one interval a failure."""
    costs = replace(COSTS, save_stall=12.0, storage_share=math.inf)  # nothing is left to write after it
    result = simulate(StorageRestart(JOB, costs, every=5), JOB, costs, trace, 2000.0)
    steps, _ = walked(5, trace, 2000)
    assert abs(result.steps - steps) <= 5 * (1 + result.failures)
    if not trace:
        assert abs(result.steps - steps) <= 1


def test_peer_memory_loses_one_step_at_most_and_falls_to_storage_for_a_whole_group() -> None:
    single = (HostChange(700.0, (3,)), HostChange(1400.0, (8,)))
    result = simulate(SCHEMES["memory"](JOB, COSTS), JOB, COSTS, single, 2000.0)
    assert result.redone <= 2 and result.from_storage == 0
    group = (HostChange(700.0, (2, 3)),)
    fallen = simulate(SCHEMES["memory"](JOB, COSTS), JOB, COSTS, group, 2000.0)
    assert fallen.from_storage == 1 and fallen.redone > 2


@pytest.mark.parametrize("name", ["storage", "memory"])
def test_losses_in_a_recovery_take_back_no_more_steps(name: str) -> None:
    """What was gone back to is whole: the next loss does not go back to the checkpoint before it."""
    first, *others = (HostChange(700.0 + 8 * index, (1,), software=name == "storage") for index in range(5))
    once = simulate(SCHEMES[name](JOB, COSTS), JOB, COSTS, (first,), 760.0)
    often = simulate(SCHEMES[name](JOB, COSTS), JOB, COSTS, (first, *others), 760.0)
    assert often.redone == once.redone <= 5 + 2 * (name == "storage")


def test_hosts_that_never_come_back() -> None:
    costs = PhaseCosts(replace=math.inf, storage_bandwidth=1e9)
    trace = (HostChange(700.0, (1,)),)
    stopped = simulate(StorageRestart(JOB, costs, 5), JOB, costs, trace, 2000.0)
    assert stopped.phases["wait"] == pytest.approx(1300.0)
    going = simulate(Templates(JOB, costs, 50), JOB, costs, trace, 2000.0)
    assert going.phases["wait"] == 0 and going.steps > stopped.steps


@pytest.mark.parametrize("at", range(20, 100, 7))
def test_storage_has_no_step_that_memory_never_had(at: int) -> None:
    """A checkpoint to storage is one of those to memory, so a loss that memory covers never falls to it."""
    job = JobModel(hosts=4, step_time=1.0, state_bytes=4.0)
    costs = PhaseCosts(memory_bandwidth=1e12, peer_bandwidth=1e12, storage_bandwidth=1e12)
    single, every = (0,), tuple(range(4))
    for lost, saved in (
        (single, [9 * n for n in range(12)]),
        (every, [0, 18, 27, 36, 45, 54, 63, 72, 81, 90]),
    ):
        scheme = PeerMemory(job, costs, place(4, 2, "group"), storage_every=10, every=9)
        setback = scheme.lost(lost, False, float(at))
        assert setback.keeps == max(step for step in saved if step < at)
        assert setback.from_storage == (lost == every)


def test_restart_on_fewer_keeps_saved_steps_and_its_pace() -> None:
    """As Varuna does (``shrink-restart``): a step takes twice as long on one of two hosts."""

    class OnFewer(StorageRestart):
        def pace(self) -> tuple[float, float]:
            return 2.0 if self.supervisor.missing else 1.0, 0.0

    costs = PhaseCosts(detect=0, regroup=0, regroup_growth=0, start=10, replace=math.inf)
    job = JobModel(2, 1.0, 0.0)  # saves and loads take no time
    scheme = OnFewer(job, costs, every=10)
    scheme.supervisor = TwinSupervisor(2, 0, Rules("shrink-restart"))
    result = simulate(scheme, job, costs, regular(2, 25.5, 1), 45.5)
    assert result.steps == 20 + 5 and result.redone == 5
