"""After a restore: what CRIU brings back wrongly is put right, and what is not as it was is told by name."""

from __future__ import annotations

import ctypes
import os
import signal
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from support.waiting import until
from windtunnel.agents.sandbox import inventory
from windtunnel.agents.sandbox.criu import Criu
from windtunnel.agents.sandbox.errors import IncompleteError
from windtunnel.agents.sandbox.model import Lack, ProcessInventory, ProcessStood
from windtunnel.agents.sandbox.policy.standing import OUTSIDE, differences, goes_on, values, who
from windtunnel.linux.system import libc

WORDS = st.sampled_from(["", "sh", "python3 app.py"])
NAMES = ("clock", "flags", "ticks", "value", "interval")
TIMER = st.tuples(*[st.integers(0, 3)] * len(NAMES)).map(
    lambda numbers: " ".join(f"{name} {number}" for name, number in zip(NAMES, numbers, strict=True))
)
FACTS = st.fixed_dictionaries(
    {},
    optional={
        "limits": st.dictionaries(st.just("open files"), WORDS, min_size=1),
        "locks": st.dictionaries(st.just("shared flock on descriptor 3"), st.just(""), min_size=1),
        "descriptors": st.dictionaries(st.sampled_from(["descriptor 3", "descriptor 4"]), WORDS, min_size=1),
        "timers": st.dictionaries(st.sampled_from(["timerfd 3", "periodic timerfd 4"]), TIMER, min_size=1),
    },
)
PROCESS = st.builds(
    ProcessStood,
    st.integers(1, 5),
    WORDS,
    FACTS,
)
INVENTORY = st.builds(
    ProcessInventory,
    st.lists(PROCESS, min_size=1, max_size=3, unique_by=lambda process: process.pid).map(tuple),
    FACTS,
)


@settings(max_examples=60, deadline=None)
@given(INVENTORY, st.data())
def test_nothing_differs_from_itself_and_what_is_taken_away_is_named(
    before: ProcessInventory, data: st.DataObject
) -> None:
    assert differences(before, before) == ()
    assert differences(ProcessInventory(), before) == ()
    stood = data.draw(st.sampled_from(before.processes))
    others = tuple(process for process in before.processes if process is not stood)
    (gone,) = differences(before, replace(before, processes=others))
    assert (gone.kind, gone.what) == ("processes", who(stood))

    def with_facts(facts: dict[str, dict[str, str]]) -> tuple[Lack, ...]:
        return differences(before, replace(before, processes=(*others, replace(stood, facts=facts))))

    for kind, named in stood.facts.items():
        for name, value in named.items():
            rest = {other: named[other] for other in named if other != name}
            (gone,) = with_facts({**stood.facts, kind: rest})
            assert gone.kind == kind
            assert f"{who(stood)}: {name}" in gone.what
            if kind == "timers":
                timer = values(value)
                later = {**timer, **{each: str(int(timer[each]) + 1) for each in ("value", "ticks")}}
                words = " ".join(f"{each} {number}" for each, number in later.items())
                lacks = with_facts({**stood.facts, kind: {**named, name: words}})
                assert bool(lacks) == (not goes_on(timer))


def agent(kind: str, words: str) -> ProcessInventory:
    """A process with one descriptor."""
    return ProcessInventory((ProcessStood(7, "agent", {kind: {"descriptor 3": words}}),))


def test_a_watch_may_tell_more_than_it_did_but_not_less() -> None:
    quiet = "anon_inode:inotify, flags 4000, watch 1 mask:2"
    before, after = agent("descriptors", quiet), agent("descriptors", f"{quiet}, 16 bytes not read")
    assert not differences(before, after)
    assert len(differences(after, before)) == 1


def test_a_connection_to_the_outside_may_end_but_its_descriptor_may_not() -> None:
    before = agent("sockets", f"IPv4 stream socket connected {OUTSIDE}")
    assert differences(before, agent("sockets", "IPv4 stream socket at 0.0.0.0:0")) == ()
    (gone,) = differences(before, ProcessInventory((ProcessStood(7, "agent"),)))
    assert (
        str(gone)
        == f"agent (process 7 inside): descriptor 3, IPv4 stream socket connected {OUTSIDE}: it is gone"
    )


RINGS = """python3 -c "
import os, signal, time
signal.signal(signal.SIGALRM, lambda *_: open('/workspace/rang', 'a').write('x'))
open('/workspace/pid', 'w').write(str(os.getpid()))
while True: time.sleep(0.05)
" </dev/null >/dev/null 2>&1 & until [ -s /workspace/pid ]; do sleep 0.01; done"""


@pytest.mark.root
def test_an_alarm_that_rings_while_criu_reads_is_not_lost(
    make: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    box = make()
    box.run(RINGS, timeout=60)
    dump = Criu.dump

    def rings(criu: Criu, pid: int, *words: Any, **more: Any) -> Any:
        done = dump(criu, pid, *words, **more)
        for pid in box.machine().cgroup.pids():
            if b"signal.SIGALRM" in Path(f"/proc/{pid}/cmdline").read_bytes():
                os.kill(pid, signal.SIGALRM)
        return done

    def rang() -> bool:
        return bool(box.run("cat /workspace/rang 2>/dev/null").stdout == b"x")

    monkeypatch.setattr(Criu, "dump", rings)
    point = box.checkpoint(full=True).id
    until(rang)
    for _ in range(2):
        box.restore(point)
        until(rang)


def test_a_periodic_timer_that_is_due_goes_on_and_one_that_was_stopped_does_not() -> None:
    """As /proc shows it where it has not expired yet, though nothing is left of its time."""
    every = (ctypes.c_long * 4)(0, 10**6, 0, 10**6)
    for first, goes in ((10**6, True), (0, False)):
        timer = libc.timerfd_create(1, os.O_NONBLOCK)
        every[3] = first
        assert libc.timerfd_settime(timer, 0, every, None) == 0
        info = "clockid: 1\nticks: 0\nsettime flags: 00\nit_value: (0, 0)\nit_interval: (0, 1000000)\n"
        _, _, words = inventory._timer(os.getpid(), timer, info)
        assert goes_on(values(words)) is goes
        os.close(timer)


TICKS = """python3 -c "
import ctypes, select, time
libc = ctypes.CDLL(None); timer = libc.timerfd_create(1, 0)
libc.timerfd_settime(timer, 0, (ctypes.c_long * 4)(0, 10**7, 0, 10**7), None)
select.select([timer], [], [])  # CRIU loses those alone that have expired and were not read
open('/workspace/ready', 'w').close(); time.sleep(1000)
" </dev/null >/dev/null 2>&1 & until [ -e /workspace/ready ]; do sleep 0.01; done"""


@pytest.mark.root
def test_what_is_not_as_it_was_does_not_run(
    make: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    box = make()
    box.run(TICKS, timeout=60)
    point, before = box.checkpoint(full=True).id, box.info().pid
    with monkeypatch.context() as patched:  # as CRIU alone brings it back
        patched.setattr("windtunnel.agents.sandbox.inventory.mend.mend", lambda *_: None)
        with pytest.raises(IncompleteError, match=r"periodic timerfd.*it does not go on"):
            box.restore(point)
        assert box.info().pid == before, "what ran is as it was"
        box.stop()
        with pytest.raises(IncompleteError, match="periodic timerfd"):
            box.restore(point)
        assert box.info().status != "running"
        (lack,) = box.restore(point, allow_less=True).lacks
        assert lack.kind == "timers"
    assert box.restore(point).lacks == ()
