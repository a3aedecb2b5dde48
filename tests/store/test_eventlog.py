"""The event log: several writers, torn tails, a full disk, decisions that come back as they were."""

import errno
import json
import multiprocessing
import os
import signal
import threading
from dataclasses import dataclass

import pytest
from hypothesis import given
from hypothesis import strategies as st

from windtunnel.base.errors import HostError, UserError
from windtunnel.base.plain import from_plain
from windtunnel.store import eventlog
from windtunnel.store.eventlog import NAME, EventLog, LogFailed, decisions, read


@pytest.fixture
def path(tmp_path):
    return tmp_path / "run" / NAME


def test_what_is_appended_is_read(path):
    assert read(path) == []
    log = EventLog(path, epoch=3)
    first = log.append("started", t=1.5, hosts=["a", "b"])
    second = log.append("ended")
    assert first == {"t": 1.5, "kind": "started", "epoch": 3, "hosts": ["a", "b"]}
    assert read(path) == [first, second]
    log.close()
    log.close()
    EventLog(path, sync=True).append("again")
    assert [event["kind"] for event in read(path)] == ["started", "ended", "again"]


def test_lines_that_may_wait_are_written_together_and_in_their_order(path, monkeypatch):
    writes = []
    monkeypatch.setattr(eventlog, "append_line", lambda file, lines, **_: writes.append(lines.count(b"\n")))
    log = EventLog(path, gather=3600.0)
    for number in range(3):
        log.append("step", number=number)
    assert writes == []
    log.flush()
    log.flush()
    assert writes == [3]
    monkeypatch.undo()
    events = [log.append("step", number=number) for number in (3, 4)]
    assert read(path) == []
    log.close()
    assert read(path) == events


def test_no_line_waits_longer_than_it_may(path, monkeypatch):
    now = [0.0]
    monkeypatch.setattr(eventlog.time, "monotonic", lambda: now[0])
    log = EventLog(path, gather=0.5)
    for at, lines in ((0.0, 0), (0.4, 0), (0.5, 3), (0.9, 3), (1.4, 5)):
        now[0] = at
        log.append("step", t=at)
        assert len(read(path)) == lines


@dataclass(frozen=True)
class Asked:
    free: int
    names: tuple[str, ...]
    limit: float | None


@dataclass(frozen=True)
class Keep:
    pass


@dataclass(frozen=True)
class Drop:
    names: tuple[str, ...]


TEXT = st.text(st.characters(exclude_categories=["Cs"]), max_size=20)
NUMBERS = st.floats(allow_nan=False, allow_infinity=False)
ASKED = st.builds(Asked, st.integers(), st.lists(TEXT, max_size=4).map(tuple), st.none() | NUMBERS)


@given(ASKED, st.builds(Keep) | st.builds(Drop, st.lists(TEXT, max_size=4).map(tuple)))
def test_decisions_come_back(tmp_path_factory, asked, answer):
    path = tmp_path_factory.mktemp("log") / NAME
    log = EventLog(path)
    log.append("other")
    log.decision("agents.sandbox", "semantic", asked, answer)
    log.close()
    (event,) = decisions(path)
    assert (event["capability"], event["policy"]) == ("agents.sandbox", "semantic")
    assert from_plain(Asked, event["observation"]) == asked
    assert from_plain(Keep | Drop, event["decision"]) == answer


def test_a_log_is_read_while_a_line_is_written(path):
    log = EventLog(path)
    log.append("one")
    log.append("two")
    whole = path.read_bytes()
    for size in range(len(whole)):
        path.write_bytes(whole[:size])
        assert len(read(path)) == whole[:size].count(b"\n")


def test_the_next_writer_cuts_a_torn_tail_off(path):
    log = EventLog(path)
    log.append("one")
    whole = path.read_bytes()
    log.append("two", t=2.0)
    for size in range(len(whole), len(path.read_bytes())):
        both = path.read_bytes()
        path.write_bytes(both[:size])
        log.append("two", t=2.0)  # also when the tail came while this one was open
        assert [event["kind"] for event in read(path)] == ["one", "two"]


@pytest.mark.parametrize("line", [b"{", b"[]", b"{}", b'{"kind": "x"}', b"\xff", b"null"])
def test_a_broken_line_is_told(path, line):
    log = EventLog(path)
    log.append("one")
    with path.open("ab") as file:
        file.write(line + b"\n")
    log.append("two")
    with pytest.raises(UserError, match="line 2 is not an event"):
        read(path)
    problems = []
    assert [event["kind"] for event in read(path, damaged=problems.append)] == ["one", "two"]
    assert len(problems) == 1 and "line 2 is not an event" in problems[0]


def test_a_full_disk_leaves_the_lines_before(path, monkeypatch):
    log = EventLog(path)
    log.append("one")
    real, room = os.write, [10]

    def nearly_full(file, data):
        if not room[0]:
            raise OSError(errno.ENOSPC, "No space left on device")
        taken = real(file, data[: room[0]])
        room[0] -= taken
        return taken

    with monkeypatch.context() as patched:
        patched.setattr(os, "write", nearly_full)
        with pytest.raises(LogFailed, match="No space left"):
            log.append("two", much="x" * 100)
    assert [event["kind"] for event in read(path)] == ["one"]
    log.append("three")
    assert [event["kind"] for event in read(path)] == ["one", "three"]


def test_what_cannot_be_opened_is_told(path):
    path.mkdir(parents=True)
    with pytest.raises(HostError, match=NAME):
        EventLog(path)


def write(path, writer, count):
    log = EventLog(path, writer=writer)
    for number in range(count):
        log.append("line", number=number, filler="x" * 500)


def test_several_processes_and_threads_write_one_log(path):
    context = multiprocessing.get_context("fork")
    log = EventLog(path)
    workers = [context.Process(target=write, args=(path, name, 200)) for name in ("a", "b")]
    threads = [
        threading.Thread(
            target=lambda name=name: [
                log.append("line", writer=name, number=number, filler="y" * 500) for number in range(200)
            ]
        )
        for name in ("c", "d")
    ]
    for writer in workers + threads:
        writer.start()
    for writer in workers + threads:
        writer.join()
    events = read(path)
    for name in "abcd":
        assert [event["number"] for event in events if event["writer"] == name] == list(range(200))
    assert len(events) == 800


def test_a_killed_writer_spoils_no_line(path):
    context = multiprocessing.get_context("fork")
    log = EventLog(path, writer="lasting")
    for _ in range(5):
        victim = context.Process(target=write, args=(path, "killed", 1 << 30))
        victim.start()
        for number in range(50):
            log.append("line", number=number)
        os.kill(victim.pid, signal.SIGKILL)
        victim.join()
    log.append("end")
    lines = path.read_bytes().splitlines()
    assert [json.loads(line)["writer"] for line in lines].count("lasting") == 251
    assert read(path)[-1]["kind"] == "end"
