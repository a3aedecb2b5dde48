"""What of a restored sandbox is not as it stood when its image was taken.

An inventory is held against another one of the same processes. What legitimately differs is left out where it
is read (numbers of inodes, pids of the host, moments) or allowed here:

- a timer that stood armed may have expired meanwhile: what counts is whether it goes on, or wakes somebody;
- a connection to the outside comes back closed (it is told of every checkpoint beforehand);
- what is there beside what stood is nobody's loss.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import cast

from windtunnel.agents.sandbox.model import Facts, Inventory, Lack, LackKind, ProcessStood

OUTSIDE = "to the outside"
"""What the value of a connection ends with whose other end is not in the sandbox."""
GONE = "it is gone"
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


def differences(before: Inventory, after: Inventory) -> tuple[Lack, ...]:
    """What stood before and is not there, or is not the same."""
    found = _facts("the sandbox", before.facts, after.facts)
    now = {process.pid: process for process in after.processes}
    for stood in before.processes:
        if (current := now.get(stood.pid)) is None:
            found.append(Lack("processes", who(stood), GONE))
        else:
            found += _facts(who(stood), stood.facts, current.facts)
    return tuple(found)


def who(stood: ProcessStood) -> str:
    command = stood.command if len(stood.command) <= _COMMAND else f"{stood.command[: _COMMAND - 1]}…"
    return f"{command} (process {stood.pid} inside)"


def values(words: str) -> dict[str, str]:
    """Of a fact whose value is names and numbers in turn."""
    return dict(zip(words.split()[::2], words.split()[1::2], strict=False))


def goes_on(timer: Mapping[str, str]) -> bool:
    """Whether somebody who waits for a timer is woken."""
    return timer["value"] != "0" or (timer["ticks"] != "0" and timer["interval"] == "0")


def _facts(whose: str, before: Facts, after: Facts) -> list[Lack]:
    found = []
    for kind, named in before.items():
        now = after.get(kind, {})
        for name, value in named.items():
            if why := _difference(name, value, now.get(name)):
                timer = "timerfd" in name  # its numbers say nothing
                what = f"{whose}: {name}, {value}" if value and not timer else f"{whose}: {name}"
                found.append(Lack(cast(LackKind, kind), what, why))
    return found


def _difference(name: str, value: str, now: str | None) -> str:
    """In words; empty where there is none that matters."""
    if now is None:
        return GONE
    if "timerfd" in name:
        was, timer = values(value), values(now)
        if (was["clock"], was["interval"]) != (timer["clock"], timer["interval"]):
            return "it has another clock or interval"
        if goes_on(was) == goes_on(timer):
            return ""
        return "it does not go on" if goes_on(was) else "it had stopped, and goes on"
    if value.endswith(OUTSIDE) or _steady(value) in (_steady(now), _steady(_MORE.sub("", now))):
        return ""
    return f"it is {now} now"


def _steady(value: str) -> str:
    return _UNSENT.sub("", value)
