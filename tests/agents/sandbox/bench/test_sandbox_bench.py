"""What sections of the comparison stand on: jobs side by side, sessions, and nothing left behind."""

from __future__ import annotations

import threading
from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest

from benchmarks.agents.sandbox import harness, recovery
from benchmarks.agents.sandbox.generate import generate
from benchmarks.agents.sandbox.recovery import Reference
from benchmarks.agents.sandbox.sessions import agreed, replay
from benchmarks.harness.measure import side_by_side
from support import small_image
from support.waiting import PATIENCE
from windtunnel.agents.sandbox.files import host_image


def test_jobs_give_their_results_in_order_and_a_failure_ends_those_not_begun() -> None:
    gate = threading.Event()
    begun: list[int] = []

    def first() -> int:
        gate.wait(PATIENCE)
        return 1

    def second() -> int:
        gate.set()
        return 2

    assert side_by_side([first, second], 2) == [1, 2]

    def failing() -> int:
        raise ValueError("broken")

    given_up = threading.Event()

    def noted(number: int) -> int:
        begun.append(number)
        given_up.wait(PATIENCE)
        return number

    jobs: list[Callable[[], int]] = [failing, *(partial(noted, number) for number in range(50))]
    with pytest.raises(ValueError, match="broken"):
        side_by_side(jobs, 1, given_up.set)
    assert len(begun) <= 1


@pytest.mark.root
def test_nothing_is_left_when_a_run_is_broken_off() -> None:
    if why := harness.missing():
        pytest.skip(why)
    with pytest.raises(KeyboardInterrupt), harness.own_home() as home, harness.opened(home) as host:
        seat = harness.Seat.new(host, harness.new_name("broken"))
        seat.run("sleep 1000 </dev/null >/dev/null 2>&1 &")
        group = seat.box.machine().cgroup.path
        raise KeyboardInterrupt
    assert not home.exists() and not group.exists()
    assert str(home) not in Path("/proc/self/mountinfo").read_text()


@pytest.fixture
def programs(monkeypatch: pytest.MonkeyPatch) -> None:
    if why := harness.missing():
        pytest.skip(why)
    monkeypatch.setattr(host_image, "WANTED", small_image.WHOLE)  # agents use git


@pytest.mark.conformance
@pytest.mark.root
@pytest.mark.slow
def test_sessions_run_as_they_say(programs: None) -> None:
    with harness.own_home() as home, harness.opened(home, policy="conversation") as host:
        for trace in harness.sessions(False, generated=3):
            outputs = replay(trace, harness.Seat.new(host, harness.new_name("plays")))
            for turn, output in zip(trace.turns, outputs, strict=True):
                text = output.stdout.decode("utf-8", "surrogateescape")
                assert turn.true_class is not None and output.ended == "exit", (trace.name, turn)
                assert turn.expect_exit in (None, output.exit_code), (trace.name, turn, output)
                assert turn.expect_stdout in (None, text), (trace.name, turn, output)


@pytest.mark.conformance
@pytest.mark.root
@pytest.mark.slow
def test_two_kills_lose_nothing_under_the_semantic_policy_and_much_without_any(programs: None) -> None:
    trace = generate(8, seed=0)
    with harness.own_home() as home:
        with harness.opened(home, policy="conversation") as host:
            first, second = (recovery.faultless(host, trace) for _ in range(2))
            reference = Reference(trace, agreed(trace, first, second))
            kills = recovery.plan([reference], 2)
            without = [recovery.killed(host, "conversation", kill) for kill in kills]
        with harness.opened(home) as host:
            outcomes = [recovery.killed(host, "semantic", kill) for kill in kills]
    assert [outcome.differences for outcome in outcomes] == [()] * 2
    assert not any(outcome.unreadable for outcome in outcomes)
    assert any(outcome.differences for outcome in without)
