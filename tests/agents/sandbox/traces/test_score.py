"""The score of recoveries, with policies whose outcome is known; the referee; the shipped traces."""

from __future__ import annotations

import shutil
import threading
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from benchmarks.harness.measure import spread
from support.waiting import until
from windtunnel.agents.sandbox.model import TurnClass
from windtunnel.agents.sandbox.traces import shipped
from windtunnel.agents.sandbox.traces.generate import Mix, Think, generate
from windtunnel.agents.sandbox.traces.observe import Observation
from windtunnel.agents.sandbox.traces.replay import (
    Output,
    TraceRejected,
    begin,
    check,
    replay,
    unmet,
)
from windtunnel.agents.sandbox.traces.schema import Trace, TraceTurn
from windtunnel.agents.sandbox.traces.score import agreed, compare, least, recovery, weaker
from windtunnel.base.errors import UserError


@pytest.fixture(autouse=True)
def tools() -> None:
    for program in ("git", "python3", "make", "tar", "awk"):
        if not shutil.which(program, path="/usr/bin:/bin"):
            pytest.skip(f"needs {program}")


def placed(trace: Trace, box: Any, port: int) -> Trace:
    """The trace where the stand-in works, with ports that are free on this machine."""
    moved = trace.moved(str(box.workdir))

    def put(text: str) -> str:
        return text.replace("8077", str(port))

    turns = tuple(
        replace(
            turn,
            command=put(turn.command),
            expect_stdout=None if turn.expect_stdout is None else put(turn.expect_stdout),
        )
        for turn in moved.turns
    )
    probes = {name: put(text) for name, text in moved.probes.items()}
    return replace(moved, turns=turns, probes=probes)


@pytest.mark.parametrize("trace", shipped(), ids=lambda trace: trace.name)
def test_shipped_traces_run_and_are_judged_right(
    trace: Trace, new_box: Callable[[], Any], first_port: int
) -> None:
    box = new_box()
    here = placed(trace, box, first_port)
    begin(here, box)

    def full_look() -> Observation:
        seen: Observation = box.look()
        return replace(seen, pids=frozenset(seen.processes), shells={"main": box.shell_print()})

    states = [full_look()]

    def on_turn(turn: TraceTurn, output: Output) -> None:
        states.append(full_look())
        truth, reasons = least(states[-2], states[-1])
        assert turn.true_class is not None
        assert truth <= turn.true_class, (turn.command, reasons)
        if turn.true_class in (TurnClass.SHELL, TurnClass.FILES):
            assert truth == turn.true_class, turn.command

    assert check(here, replay(here, box, on_turn=on_turn, opening=False)) == []


def session(workdir: str, port: int) -> Trace:
    return generate(14, 12, Mix(none=1, shell=2, files=2, full=2), workdir=workdir, first_port=port)


def look(trace: Trace) -> Callable[[Any, tuple[Output, ...]], Observation]:
    return lambda box, outputs: box.look(outputs, dict(trace.probes))


def reference(trace: Trace, new_box: Callable[[], Any]) -> Observation:
    seen = []
    for _ in range(2):
        box = new_box()
        seen.append(look(trace)(box, tuple(replay(trace, box))))
    return agreed(trace, *seen)


def killed(box: Any, after: int) -> None:
    box.kill()


@pytest.mark.parametrize("after", [1, 7, 14])
def test_replay_from_the_start_loses_nothing(
    after: int, new_box: Callable[[], Any], first_port: int, tmp_path: Path
) -> None:
    trace = session(str(new_box().workdir), first_port)
    truth = reference(trace, new_box)

    def recover(box: Any, turn: int) -> Any:
        fresh = new_box()
        replay(trace, fresh, last=turn)
        return fresh

    box = new_box()
    found = recovery(trace, box, after=after, reference=truth, look=look(trace), kill=killed, recover=recover)
    assert found.score.correct, found.score.differences
    assert found.box is not box


def test_files_alone_lose_shells_and_services(new_box: Callable[[], Any], first_port: int) -> None:
    trace = Trace(
        "loss",
        "test",
        "none",
        (
            TraceTurn(1, "cd /; export MODE=1"),
            # a child of the shell has the shell's own command line until it has become what it is to run
            TraceTurn(
                2,
                "sleep 1000000 </dev/null >/dev/null 2>&1 & "
                "until grep -q sleep /proc/$!/comm; do :; done; echo a > $OLDPWD/a",
            ),
            TraceTurn(3, 'echo "$MODE" && pwd'),
        ),
        workdir=str(new_box().workdir),
    )
    truth = reference(trace, new_box)

    def recover(box: Any, turn: int) -> Any:
        box.restart()
        return box

    found = recovery(
        trace, new_box(), after=2, reference=truth, look=look(trace), kill=killed, recover=recover
    )
    score = found.score
    assert (score.outputs, score.files, score.processes, score.probes) == (False, True, False, True)
    assert not score.correct and len(score.differences) == 2

    def from_nothing(box: Any, turn: int) -> Any:
        return new_box()

    lost = recovery(
        trace, new_box(), after=2, reference=truth, look=look(trace), kill=killed, recover=from_nothing
    )
    assert not lost.score.files


def test_a_kill_inside_a_turn_runs_it_again(new_box: Callable[[], Any], tmp_path: Path) -> None:
    gate = tmp_path / "gate"
    trace = Trace(
        "inside",
        "test",
        "none",
        (
            TraceTurn(1, "echo one >> log"),
            # the first time the turn waits for its own death; afterwards the gate is there
            TraceTurn(2, f"echo two >> log; until [ -e {gate} ]; do sleep 0.01; done; cat log"),
            TraceTurn(3, "echo three >> log; cat log"),
        ),
        workdir=str(new_box().workdir),
    )
    gate.touch()
    truth = reference(trace, new_box)
    gate.unlink()
    threads = []

    def arm(box: Any, after: int) -> None:
        log = box.workdir / "log"

        def strike() -> None:
            until(lambda: log.read_text() == "one\ntwo\n")
            box.bash.kill()
            gate.touch()

        threads.append(threading.Thread(target=strike))
        threads[-1].start()

    def recover(box: Any, turn: int) -> Any:
        fresh = new_box()
        replay(trace, fresh, last=turn)
        return fresh

    found = recovery(
        trace,
        new_box(),
        after=1,
        reference=truth,
        look=look(trace),
        kill=killed,
        recover=recover,
        arm=arm,
    )
    threads[0].join()
    assert found.inside
    assert found.score.correct, found.score.differences


def test_a_trace_that_differs_from_itself_is_rejected(new_box: Callable[[], Any]) -> None:
    trace = Trace(
        "luck", "test", "none", (TraceTurn(1, "echo $RANDOM$RANDOM"),), workdir=str(new_box().workdir)
    )
    with pytest.raises(TraceRejected, match=r"two fault-free runs differ.*turn 1"):
        reference(trace, new_box)


def test_a_failing_prelude_is_a_sentence(new_box: Callable[[], Any]) -> None:
    box = new_box()
    trace = Trace(
        "bad", "test", "none", (TraceTurn(1, "ls"),), prelude="echo why >&2; false", workdir=str(box.workdir)
    )
    with pytest.raises(TraceRejected, match=r"its prelude ended with 1 .exit.: why"):
        begin(trace, box)


def test_think_times_pass_scaled(new_box: Callable[[], Any]) -> None:
    box = new_box()
    turns = tuple(TraceTurn(number, "true", think=number) for number in (1, 2, 3))
    happened: list[object] = []
    replay(
        Trace("t", "t", "t", turns, workdir=str(box.workdir)),
        box,
        on_open=lambda: happened.append("open"),
        on_turn=lambda turn, output: happened.append(f"turn {turn.turn}"),
        think_scale=0.5,
        sleep=happened.append,
    )
    assert happened == ["open", "turn 1", 0.5, "turn 2", 1.0, "turn 3", 1.5]


def test_parts_are_scored_apart() -> None:
    outputs = (Output(1, b"a", 0, "exit", 1.0), Output(2, b"b", 0, "exit", 1.0))
    truth = Observation(outputs, {"/a": "1"}, ("x", "x"), {"p": "1"}, (80,))
    assert compare(truth, replace(truth, outputs=(replace(outputs[0], seconds=9.0), outputs[1]))).correct
    assert compare(truth, replace(truth, outputs=(replace(outputs[0], stdout=b"z"), outputs[1])), 1).correct
    assert not compare(truth, replace(truth, outputs=outputs[:1])).outputs
    assert not compare(truth, replace(truth, tree={"/a": "2"})).files
    assert not compare(truth, replace(truth, tree={})).files
    assert not compare(truth, replace(truth, processes=("x",))).processes
    assert not compare(truth, replace(truth, processes=("x", "x", "x"))).processes
    assert not compare(truth, replace(truth, probes={"p": "2"})).probes
    assert not compare(truth, replace(truth, ports=())).probes


def test_the_referee_names_the_least_class() -> None:
    before = Observation(
        (), {"/a": "1"}, ("x",), {"p": "1"}, (80,), frozenset({"1 x"}), {"main": "s"}, {"1 x": ("3 /a at 0",)}
    )
    cases: list[tuple[Observation, TurnClass]] = [
        (before, TurnClass.NONE),
        (replace(before, shells={"main": "t"}), TurnClass.SHELL),
        (replace(before, shells={"main": "t"}, tree={}), TurnClass.FILES),
        (replace(before, pids=frozenset({"2 x"})), TurnClass.FULL),
        (replace(before, descriptors={"1 x": ("3 /a at 5",)}), TurnClass.FULL),
        (replace(before, probes={"p": "2"}), TurnClass.FULL),
        (replace(before, ports=()), TurnClass.FULL),
    ]
    for after, least_class in cases:
        assert least(before, after)[0] is least_class
        for decided in TurnClass:
            assert bool(weaker(decided, before, after)) == (decided < least_class)


def test_expectations() -> None:
    output = Output(1, b"abc\n", 0, "exit")
    assert unmet(TraceTurn(1, "", expect_exit=0, expect_stdout="abc\n", expect_match="a.c"), output) == ""
    assert "exit code 0, 1 expected" in unmet(TraceTurn(1, "", expect_exit=1), output)
    assert "expected" in unmet(TraceTurn(1, "", expect_stdout="abc"), output)
    assert "does not match" in unmet(TraceTurn(1, "", expect_match="b"), output)
    assert "timeout" in unmet(TraceTurn(1, ""), replace(output, ended="timeout"))


def test_figures() -> None:
    assert all(turn.true_class is not None for trace in shipped() for turn in trace.turns)
    assert spread([1, 3, 2]).median == 2


def test_think_times_are_positive() -> None:
    with pytest.raises(UserError, match="median -1"):
        Think(median=-1)
