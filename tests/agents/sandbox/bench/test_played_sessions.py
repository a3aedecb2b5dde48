"""Sessions played on a stand-in, trees that are not to be trusted, and scores whose outcome is known."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from benchmarks.agents.sandbox.generate import Mix, generate
from benchmarks.agents.sandbox.sessions import (
    Observation,
    Output,
    TraceRejected,
    agreed,
    begin,
    compare,
    listening,
    recovery,
    replay,
    shipped,
    tree,
)  # fmt: skip
from windtunnel.agents.sandbox.traces import Trace, TraceTurn

Make = Callable[[], Any]


@pytest.fixture(autouse=True)
def tools() -> None:
    for program in ("git", "python3", "make", "tar", "awk"):
        if not shutil.which(program, path="/usr/bin:/bin"):
            pytest.skip(f"needs {program}")


def moved(trace: Trace, box: Any, port: int) -> Trace:
    """The session where the stand-in works, with a port that is free on this machine."""

    def put(text: str) -> str:
        return text.replace(trace.workdir, str(box.workdir)).replace("8077", str(port))

    turns = tuple(
        replace(turn, command=put(turn.command), expect_stdout=turn.expect_stdout and put(turn.expect_stdout))
        for turn in trace.turns
    )
    return replace(trace, workdir=str(box.workdir), prelude=put(trace.prelude), turns=turns)


def unmet(turn: TraceTurn, output: Output) -> bool:
    """Whether the output is not what the turn expects."""
    text = output.stdout.decode("utf-8", "surrogateescape")
    return (
        output.ended != "exit"
        or turn.expect_exit not in (None, output.exit_code)
        or turn.expect_stdout not in (None, text)
    )


@pytest.mark.parametrize("trace", shipped(), ids=lambda trace: trace.name)
def test_shipped_sessions_run_as_they_say(trace: Trace, new_box: Make, first_port: int) -> None:
    box = new_box()
    here = moved(trace, box, first_port)
    outputs = replay(here, box)
    assert [out for turn, out in zip(here.turns, outputs, strict=True) if unmet(turn, out)] == []
    assert all(turn.true_class is not None for turn in trace.turns)


@pytest.mark.parametrize("seed", [1, 2, 3])
def test_generated_sessions_run_as_they_say(seed: int, new_box: Make, first_port: int) -> None:
    box = new_box()
    trace = generate(45, seed, Mix(1, 1, 1, 1), workdir=str(box.workdir), first_port=first_port)
    outputs = replay(trace, box)
    assert [out for turn, out in zip(trace.turns, outputs, strict=True) if unmet(turn, out)] == []
    answers = box.look(tuple(outputs), dict(trace.probes)).probes
    assert len(answers) == len(trace.probes) and all(text.startswith("0 ") for text in answers.values())


def reference(trace: Trace, new_box: Make) -> Observation:
    looks = []
    for _ in range(2):
        box = new_box()
        looks.append(box.look(tuple(replay(trace, box)), dict(trace.probes)))
    return agreed(trace, *looks)


def test_a_recovery_that_brings_all_back_is_right_and_one_that_does_not_is_told(
    new_box: Make, first_port: int
) -> None:
    trace = generate(
        10, 12, Mix(none=1, shell=2, files=2, full=2), workdir=str(new_box().workdir), first_port=first_port
    )
    truth, box = reference(trace, new_box), new_box()

    def nothing_is_lost() -> None:
        pass

    def all_processes_are_lost() -> None:
        box.kill()
        box.bash = new_box().bash

    look = partial(box.look, probes=dict(trace.probes))
    assert recovery(trace, box, after=5, reference=truth, look=look, lose=nothing_is_lost) == ()
    box = new_box()
    look = partial(box.look, probes=dict(trace.probes))
    assert recovery(trace, box, after=5, reference=truth, look=look, lose=all_processes_are_lost)


def test_a_trace_that_differs_from_itself_is_rejected(new_box: Make) -> None:
    turns = (TraceTurn(1, "echo $RANDOM$RANDOM"),)
    trace = Trace("luck", "test", "none", turns, workdir=str(new_box().workdir))
    with pytest.raises(TraceRejected, match=r"two fault-free runs differ.*turn 1"):
        reference(trace, new_box)


def test_a_failing_prelude_is_a_sentence(new_box: Make) -> None:
    box = new_box()
    trace = Trace("bad", "t", "t", (), prelude="echo why >&2; false", workdir=str(box.workdir))
    with pytest.raises(TraceRejected, match=r"its prelude ended with 1 .exit.: why"):
        begin(trace, box)


def test_what_differs_is_told_part_by_part() -> None:
    outputs = (Output(1, b"a", 0, "exit"), Output(2, b"b", 0, "exit"))
    truth = Observation(outputs, {"/a": "1"}, ("x", "x"), {"p": "1"})
    assert compare(truth, truth) == ()
    assert compare(truth, replace(truth, outputs=(replace(outputs[0], stdout=b"z"), outputs[1])), 1) == ()
    for part, other in {
        "turn 2": replace(truth, outputs=outputs[:1]),
        "file /a": replace(truth, tree={}),
        "process x": replace(truth, processes=("x",)),
        "probe p": replace(truth, probes={"p": "2"}),
    }.items():
        (words,) = compare(truth, other)
        assert words.startswith(part)


# --- trees --------------------------------------------------------------------------------------------------


@pytest.fixture
def root(tmp_path: Path) -> Path:
    (tmp_path / "root" / "a").mkdir(parents=True)
    (tmp_path / "root" / "a" / "file").write_text("one")
    (tmp_path / "root" / "a" / "link").symlink_to("file")
    return tmp_path / "root"


def changed(root: Path, before: dict[str, str]) -> list[str]:
    after = tree(root)
    return sorted(path for path in before.keys() | after.keys() if before.get(path) != after.get(path))


def test_every_kind_of_change_shows(root: Path) -> None:
    file, link = root / "a" / "file", root / "a" / "link"
    before = tree(root)
    file.write_text("two")
    assert changed(root, before) == ["/a/file"]
    file.write_text("one")
    assert changed(root, before) == []
    file.chmod(0o600)
    assert changed(root, before) == ["/a/file"]
    before = tree(root)
    link.unlink()
    link.symlink_to("other")
    os.link(file, root / "second")
    (root / "a").chmod(0o700)
    assert changed(root, before) == ["/a", "/a/file", "/a/link", "/second"]


def test_times_the_channel_and_the_index_of_git_do_not_count(root: Path) -> None:
    (root / "a" / ".git").mkdir()
    before = tree(root)
    os.utime(root / "a" / "file", (1, 1))
    (root / ".windtunnel").mkdir()
    (root / ".windtunnel" / "out").write_text("x")
    (root / "a" / ".git" / "index").write_text("x")
    assert changed(root, before) == []


def test_nothing_is_followed_and_nothing_blocks(root: Path) -> None:
    os.mkfifo(root / "pipe")
    (root / "out").symlink_to("/etc")
    (root / "loop").symlink_to(".")
    entries = tree(root)
    assert set(entries) == {"/a", "/a/file", "/a/link", "/pipe", "/out", "/loop"}
    assert entries["/out"].endswith("-> /etc")
    assert set(tree(root, ["a"])) == {"/a", "/a/file", "/a/link"}


def test_listening_ports() -> None:
    table = (
        "  sl  local_address rem_address   st tx_queue\n"
        "   0: 0100007F:1F90 00000000:0000 0A 00000000:00000000\n"
        "   1: 0100007F:1F91 0100007F:0050 01 00000000:00000000\n"
        "   0: 00000000000000000000000001000000:0016 00000000000000000000000000000000:0000 0A 0\n"
    )
    assert listening(table) == [22, 8080]
