"""What of a restored sandbox is not as it stood when its image was taken.

An inventory is held against another one of the same processes. What legitimately differs is left out where it
is read (numbers of inodes, pids of the host, moments) or allowed here:

- a timer that stood armed may have expired meanwhile: what counts is whether it goes on, or wakes somebody;
- a connection to the outside comes back closed (it is told of every checkpoint beforehand);
- what is there beside what stood is nobody's loss.
"""

from __future__ import annotations

import re
from typing import cast

from windtunnel.agents.sandbox.model import (
    Inventory,
    Lack,
    LackKind,
    LockStood,
    ProcessStood,
    TimerStood,
)

OUTSIDE = "to the outside"
"""What the value of a connection ends with whose other end is not in the sandbox."""
GONE = "it is gone"
OTHER = "they are not what they were"
UNREAD = "bytes not read"
"""In the value of a descriptor that holds some which a restore does not bring back."""
UNSENT = "bytes not sent"
"""In the value of a connection whose other end is full: how many is the kernel's affair."""
TAKEN = "(deleted), and its name is another's"
"""What the value of a deleted folder ends with, where something else has its name."""
IN_MEMORY = "/memfd:"
"""What the name of a file begins with that lies in memory alone."""
UNACCEPTED = "not accepted"
"""In the value of a socket that listens, with connections that a restore does not bring back."""
NAMELESS = "of a deleted file"
"""Follows a watch that a restore ends."""
PEERLESS = "connected (its peer is gone)"
"""In the value of a datagram socket that a restore brings back unconnected."""
SEMAPHORES = "semaphores"
GIVEN_BACK = "System V semaphores that are given back at its end (SEM_UNDO)"
_UNSENT = re.compile(rf" \(\d+ {UNSENT}\)")
_MORE = re.compile(rf", \d+ {UNREAD}$")
"""What a watch tells beside what it told: CRIU makes a deleted file anew while somebody watches it."""
_COMMAND = 60
_KINDS_OF_LOCK = {"POSIX": "POSIX lock", "OFDLCK": "OFD lock", "FLOCK": "flock", "LEASE": "lease"}


def differences(before: Inventory, after: Inventory) -> tuple[Lack, ...]:
    """What stood before and is not there, or is not the same."""
    found = list(_facts("the sandbox", before.facts, after.facts))
    now = {process.pid: process for process in after.processes}
    for stood in before.processes:
        current = now.get(stood.pid)
        if current is None:
            found.append(Lack("processes", who(stood), GONE))
            continue
        found += _facts(who(stood), stood.facts, current.facts)
        found += _timers(stood, current)
        found += [
            Lack("locks", f"{who(stood)}: {words(lock)}", GONE)
            for lock in stood.locks
            if lock not in current.locks
        ]
        found += [
            Lack(
                "threads", f"{who(stood)}: CPUs, disk priority and timer slack of thread {one.thread}", OTHER
            )
            for one in stood.scheduled
            if one not in current.scheduled
        ]
    return tuple(found)


def who(stood: ProcessStood) -> str:
    command = stood.command if len(stood.command) <= _COMMAND else f"{stood.command[: _COMMAND - 1]}…"
    return f"{command} (process {stood.pid} inside)"


def goes_on(timer: TimerStood) -> bool:
    """Whether somebody who waits for it is woken."""
    return timer.value > 0 or (timer.ticks > 0 and not timer.interval)


def words(lock: LockStood) -> str:
    """A lock in words."""
    kind = _KINDS_OF_LOCK.get(lock.kind, lock.kind)
    span = "" if lock.start == 0 and lock.end is None else f", bytes {lock.start} to {lock.end or 'the end'}"
    return f"{'exclusive' if lock.write else 'shared'} {kind} on descriptor {lock.descriptor}{span}"


def table(facts: str) -> dict[tuple[str, str], str]:
    """Kind and name of each fact, and its value."""
    found = {}
    for line in filter(None, facts.split("\n")):
        kind, name, value = line.split("\t")
        found[kind, name] = value
    return found


def _facts(whose: str, before: str, after: str) -> list[Lack]:
    if before == after:
        return []
    now = table(after)
    found = []
    for (kind, name), value in table(before).items():
        current = now.get((kind, name))
        if current == value or (current is not None and value.endswith(OUTSIDE)):
            continue
        if current is not None and _steady(_MORE.sub("", current)) == _steady(value):
            continue
        what = f"{whose}: {name}, {value}" if value else f"{whose}: {name}"
        found.append(Lack(cast(LackKind, kind), what, GONE if current is None else f"it is {current} now"))
    return found


def _steady(value: str) -> str:
    return _UNSENT.sub("", value)


def _timers(stood: ProcessStood, current: ProcessStood) -> list[Lack]:
    now = {timer.descriptor: timer for timer in current.timers}
    found = []
    for timer in stood.timers:
        kept = now.get(timer.descriptor)
        kind = "periodic timerfd" if timer.interval else "timerfd"
        what = f"{who(stood)}: {kind} {timer.descriptor}"
        if kept is None:
            found.append(Lack("timers", what, GONE))
        elif (kept.clock, kept.interval) != (timer.clock, timer.interval):
            found.append(Lack("timers", what, "it has another clock or interval"))
        elif goes_on(kept) != goes_on(timer):
            found.append(
                Lack("timers", what, "it does not go on" if goes_on(timer) else "it had stopped, and goes on")
            )
    return found
