"""Sessions that are not to be trusted, trees that are not either, and what differs between two looks."""

from __future__ import annotations

import os
import subprocess
from dataclasses import replace
from pathlib import Path

import pytest

from benchmarks.agents.sandbox.sessions import (
    Observation,
    Output,
    TraceRejected,
    agreed,
    begin,
    compare,
    replay,
    tree,
)
from windtunnel.agents.sandbox.model import TurnResult
from windtunnel.agents.sandbox.traces import Trace, TraceTurn


class Shell:
    """Runs each command in a bash of its own."""

    def run(self, command: str, **_: object) -> TurnResult:
        done = subprocess.run(["bash", "-c", command], capture_output=True)
        return TurnResult(done.stdout, done.stderr, done.returncode, 0.0)


def test_a_trace_that_differs_from_itself_is_rejected() -> None:
    trace = Trace("luck", (TraceTurn(1, "echo $RANDOM$RANDOM$RANDOM"),), workdir="/tmp")
    looks = [Observation(tuple(replay(trace, Shell()))) for _ in range(2)]
    with pytest.raises(TraceRejected, match=r"two fault-free runs differ.*turn 1"):
        agreed(trace, *looks)


def test_a_failing_prelude_is_a_sentence() -> None:
    trace = Trace("bad", (), prelude="echo why >&2; false", workdir="/tmp")
    with pytest.raises(TraceRejected, match=r"its prelude ended with 1 .exit.: why"):
        begin(trace, Shell())


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
