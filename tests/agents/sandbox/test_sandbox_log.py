"""The log of what live sandboxes decided: what cannot be written or read is told, and ends no turn."""

from __future__ import annotations

import errno
import os
from typing import Any

import pytest

from windtunnel.agents.sandbox.context import read_record
from windtunnel.agents.sandbox.model import TurnClass
from windtunnel.store import eventlog

pytestmark = pytest.mark.root


def test_a_log_that_cannot_be_written_is_told_and_ends_no_turn(
    host: Any, make: Any, events: list[Any]
) -> None:
    box = make()
    log = host.home.box(box.name) / eventlog.NAME
    log.unlink()
    log.mkdir()
    box.run("echo kept > /workspace/f")
    assert box.end_turn().wait(60).turn_class is TurnClass.FILES
    log.rmdir()
    box.end_turn().wait(60)
    failed = [event.detail for event in events if event.kind == "failed"]
    assert {words.partition(" is not in the log")[0] for words in failed} == {
        "a decision", "an effect", "turn 1",
    }  # fmt: skip
    assert len(box.decisions()) == 1 and [turn.number for turn in box.log().turns] == [2]


def test_a_full_disk_fails_no_turn(
    host: Any, make: Any, events: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nothing can be written of turns: neither log nor record; what is there stays whole, and later turns are
    written again."""
    box = make()
    box.end_turn().wait(60)
    folder = host.home.box(box.name)
    before = (folder / eventlog.NAME).read_bytes()
    events.clear()
    write = os.write

    def full(file: int, data: Any) -> int:
        if os.readlink(f"/proc/self/fd/{file}").startswith(str(folder)):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return write(file, data)

    with monkeypatch.context() as patched:
        patched.setattr(os, "write", full)
        box.run("true")
        assert box.end_turn().wait(60).turn_class is TurnClass.NONE
        assert box.run("echo still here").stdout == b"still here\n"
    assert (folder / eventlog.NAME).read_bytes() == before
    failed = [event.detail for event in events if event.kind == "failed"]
    assert len(failed) == 3 and all("No space left on device" in words for words in failed)
    assert box.end_turn().wait(60).number == 3
    assert [turn.number for turn in box.log().turns] == [1, 3]
    assert read_record(folder).turns == 3


def test_a_damaged_line_costs_one_turn_and_is_told(host: Any, make: Any, events: list[Any]) -> None:
    box = make()
    for _ in range(2):
        box.end_turn().wait(60)
    path = host.home.box(box.name) / eventlog.NAME
    lines = path.read_bytes().splitlines(keepends=True)
    path.write_bytes(b"".join(b"torn" + line if b'"number":1,' in line else line for line in lines))
    events.clear()
    assert [turn.number for turn in box.log().turns] == [2]
    assert [event.kind for event in events] == ["failed"] and "is not an event" in events[0].detail


def test_a_notice_without_time_for_processes_saves_the_files(host: Any, make: Any) -> None:
    box = make()
    box.run("echo first > /workspace/f")
    box.end_turn().wait(60)
    whole = box.tip
    box.run("sleep 1000 </dev/null >/dev/null 2>&1 & echo second > /workspace/f")
    saved = box.save(TurnClass.FILES)
    assert saved.image is None and [lack.why for lack in saved.lacks] == ["there was no time for them"]
    box.machine().cgroup.kill()
    box.restore(allow_less=True)
    assert box.run("cat /workspace/f").stdout == b"second\n"
    # the next one is whole again
    assert box.end_turn().wait(60).turn_class is TurnClass.FULL
    box.rollback(whole)
    assert box.run("cat /workspace/f").stdout == b"first\n"
