"""The comparison's own arithmetic, and that nothing is left behind; what it measures is not tested."""

from __future__ import annotations

import threading
from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from benchmarks.agents.sandbox import harness, overhead, recovery, volume
from benchmarks.agents.sandbox.generate import generate
from benchmarks.agents.sandbox.overhead import Ran
from benchmarks.agents.sandbox.recovery import Reference
from benchmarks.agents.sandbox.sessions import Observation, agreed, replay
from benchmarks.agents.sandbox.volume import Bytes
from benchmarks.harness.measure import side_by_side
from support import small_image
from windtunnel.agents.sandbox.files import host_image
from windtunnel.agents.sandbox.model import FilesPart, ImagePart, Manifest, SandboxSpec, TurnClass


def manifest(id: str, turn: int, *, image: str, files: str) -> Manifest:
    image_part = ImagePart(image, 1, (), (), (), 1000, 100)
    return Manifest(
        id=id, box="x", turn=turn, parent=None, turn_class=TurnClass.FULL, wanted=TurnClass.FULL,
        reasons=(), created=0.0, files=FilesPart(files, "btrfs", 30), image=image_part,
        shells=(), spec=SandboxSpec("x"), kept=(),
    )  # fmt: skip


def test_jobs_give_their_results_in_order_and_a_failure_ends_those_not_begun() -> None:
    gate = threading.Event()
    begun: list[int] = []

    def first() -> int:
        gate.wait(10)
        return 1

    def second() -> int:
        gate.set()
        return 2

    assert side_by_side([first, second], 2) == [1, 2]

    def failing() -> int:
        raise ValueError("broken")

    def noted(number: int) -> int:
        begun.append(number)
        return number

    jobs: list[Callable[[], int]] = [failing, *(partial(noted, number) for number in range(50))]
    with pytest.raises(ValueError, match="broken"):
        side_by_side(jobs, 1)
    assert len(begun) < 50


# --- recovery -----------------------------------------------------------------------------------------------


def test_a_wrong_recovery_is_counted_and_told() -> None:
    (kill, *_) = recovery.plan([Reference(generate(6), Observation())], 1)
    good = recovery.KillOutcome(kill)
    bad = recovery.KillOutcome(kill, ("file /a: absent",))
    row = recovery.correct_row("semantic", "semantic", 1.0, [good, good, good, bad])
    assert (row.measured, row.met) == (0.75, False) and "file /a: absent" in row.note
    assert recovery.correct_row("files", "files", 0.42, [bad]).met is None


# --- bytes and shares ---------------------------------------------------------------------------------------


def test_parts_that_a_checkpoint_takes_over_cost_nothing() -> None:
    whole = volume.bytes_of(manifest("a", 1, image="a", files="a"), 7)
    assert whole == Bytes(raw=1000, stored=100, files=30, manifests=7)
    assert (whole.with_store, whole.without_store) == (137, 1037)
    assert volume.bytes_of(manifest("b", 2, image="a", files="b"), 7) == Bytes(files=30, manifests=7)
    assert volume.bytes_of(manifest("c", 3, image="a", files="b"), 7) == Bytes(manifests=7)


# --- overhead -----------------------------------------------------------------------------------------------


def test_a_sandbox_is_held_against_the_same_session_in_the_same_repeat() -> None:
    free = [[Ran(10.0), Ran(20.0)], [Ran(100.0), Ran(20.0)]]
    found = [[Ran(11.0), Ran(20.0)], [Ran(100.0), Ran(30.0)]]
    assert overhead.ratios(free, found) == pytest.approx([0.1, 0.0, 0.0, 0.5])


def test_what_hid_behind_the_thinking_is_told_of_every_policy() -> None:
    covered = Ran(10.1, waits=[0.0], covered=[True, True, True, False], jobs=[0.1, 0.3])
    batches = {
        "no checkpoints": [[Ran(10.0)] * 4], "semantic": [[covered] * 3 + [Ran(12.0)]],
        "full every turn": [[Ran(10.2)] * 4],
    }  # fmt: skip
    inside, more, none, full = overhead.rows("thinking", batches, "quiet")
    assert inside.measured == 0.75 and "12 checkpoints" in inside.note and inside.met is None
    assert more.measured == pytest.approx(0.01) and more.met and more.name.endswith("4 sandboxes, semantic")
    assert none.measured is None and full.measured == pytest.approx(0.02) and full.met is None
    batches["semantic"] = [[Ran(10.2)] * 4]
    (_, worse, *_) = overhead.rows("thinking", batches, "quiet")
    assert worse.met is False


@given(st.floats(0.5, 200.0), st.integers(0, 20))
def test_a_session_is_cut_where_its_think_times_reach_the_length(think: float, seed: int) -> None:
    trace = generate(24, seed=seed)
    cut = overhead.part(trace, think)
    assert sum(turn.think for turn in cut.turns) == pytest.approx(think)
    assert [turn.command for turn in cut.turns] == [turn.command for turn in trace.turns[: len(cut.turns)]]


# --- for real -----------------------------------------------------------------------------------------------


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
