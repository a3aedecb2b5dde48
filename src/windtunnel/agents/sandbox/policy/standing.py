"""What of a restored sandbox is not as it stood when its image was taken.

An inventory is held against another one of the same processes. What legitimately differs is left out where it
is read (numbers of inodes, pids of the host, moments) or allowed here:

- a timer that stood armed may have expired meanwhile: what counts is whether it goes on, or wakes somebody;
- a connection to the outside comes back closed (it is told of every checkpoint beforehand);
- what is there beside what stood is nobody's loss.

What CRIU does not bring back is known by kind and why, and told by name at the checkpoint. Small programs of
the conformance suite hold one kind of thing each, and say after a restore whether it is as it was: the table
is what they found of CRIU 4.2, and the suite fails where one more is lost, or one less. What another CRIU or
kernel loses beyond it is told by the restore, before anything runs. What sandboxes are refused to begin with
(io_uring, userfaultfd, …) needs no row.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import cast

from windtunnel.agents.sandbox.model import Facts, Lack, LackKind, ProcessInventory, ProcessStood

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


def differences(before: ProcessInventory, after: ProcessInventory) -> tuple[Lack, ...]:
    """What stood before and is not there, or is not the same."""
    lacks = _facts("the sandbox", before.facts, after.facts)
    now = {process.pid: process for process in after.processes}
    for stood in before.processes:
        if (current := now.get(stood.pid)) is None:
            lacks.append(Lack("processes", who(stood), GONE))
        else:
            lacks += _facts(who(stood), stood.facts, current.facts)
    return tuple(lacks)


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
    lacks = []
    for kind, named in before.items():
        now = after.get(kind, {})
        for name, value in named.items():
            if why := _difference(name, value, now.get(name)):
                timer = "timerfd" in name  # its numbers say nothing
                what = f"{whose}: {name}, {value}" if value and not timer else f"{whose}: {name}"
                lacks.append(Lack(cast(LackKind, kind), what, why))
    return lacks


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
    stood, *same = (_UNSENT.sub("", words) for words in (value, now, _MORE.sub("", now)))
    return "" if value.endswith(OUTSIDE) or stood in same else f"it is {now} now"


@dataclass(frozen=True)
class Lost:
    """One kind. An inventory has it where one of its facts is of kind ``lack`` and ``fact`` is found in that
    fact's name and value. Without a ``fact`` CRIU itself says so, and makes no image at all."""

    kind: str
    why: str
    lack: LackKind = "processes"
    fact: str = ""


NEVER = (
    "when a process began: /proc tells the moment of its restore (psutil takes the process for another one)",
    "the CPU time that a process has used: its clocks begin at 0",
    "device numbers of files: each restored or forked sandbox has its own",
)
"""What no restore brings back, of any process; a checkpoint does not count it as lacking."""

LOST = (
    Lost(
        "eventfd-semaphore",
        "it comes back as a counter that is read whole",
        "descriptors",
        r"eventfd-semaphore 1\b",
    ),
    Lost("inotify-unread", "events that nobody has read are lost", "descriptors", f"inotify.* {UNREAD}"),
    Lost("inotify-of-deleted", "the watch ends with the restore", "descriptors", rf"watch \d+ {NAMELESS}"),
    Lost("tcp-not-accepted", "a connection that nobody has accepted is reset", "sockets", UNACCEPTED),
    Lost("udp-unread", "datagrams that nobody has read are lost", "sockets", f"datagram socket .*{UNREAD}"),
    Lost("unix-peer-is-gone", "the socket comes back unconnected", "sockets", re.escape(PEERLESS)),
    Lost(
        "system-v-semaphore-undo",
        "nothing is given back at the end of its process any more",
        "ipc",
        re.escape(GIVEN_BACK),
    ),
    Lost("tcp-not-sent", "a connection whose other end is full is reset", "sockets", UNSENT),
    Lost(
        "lock-by-device",
        "files have another device number afterwards: a program that knows them by it, as SQLite does, opens "
        "the file once more and loses the lock when it closes it",
        "locks",
        "POSIX lock",
    ),
    Lost("program-in-memory", "a program runs from a file in memory (memfd)"),
    Lost("folder-made-anew", "it uses a deleted folder, and another has its name"),
    Lost("terminal-by-name", "/dev/tty is open beside another descriptor of the terminal"),
    Lost("posix-semaphore", "the name was given to a file whose first name is deleted"),
    Lost("deleted-name-of-two", "an open file lost the name by which it was opened, and has another"),
    Lost("message-queue", "a POSIX message queue lies on a file system that no mount shows"),
    Lost("packet-pipe", "a pipe keeps the borders of packets (O_DIRECT)"),
    Lost("unix-not-accepted", "something was sent on a Unix connection that nobody has accepted"),
    Lost("debugged", "a process is traced by a debugger"),
)


def beforehand(inventory: ProcessInventory) -> tuple[Lack, ...]:
    """What of ``inventory`` is known not to come back."""
    lacks = list(_lost("the sandbox", inventory.facts))
    for stood in inventory.processes:
        lacks += _lost(who(stood), stood.facts)
    return tuple(lacks)


def undumpable(inventory: ProcessInventory) -> str:
    """Why no restore would succeed, in words, where CRIU makes an image all the same; else empty."""
    for stood in inventory.processes:
        if stood.facts.get("directories", {}).get("program", "").startswith(IN_MEMORY):
            return f"{who(stood)} runs from a file in memory (memfd), which CRIU does not bring back"
        for value in (value for named in stood.facts.values() for value in named.values()):
            if value.endswith(TAKEN):
                folder = value.partition(" (deleted)")[0]
                return f"{who(stood)} uses the deleted folder {folder}, and another one has its name"
    return ""


def _lost(whose: str, facts: Facts) -> Iterator[Lack]:
    for kind, named in facts.items():
        for name, value in named.items():
            what = f"{name}, {value}" if value else name
            for lost in LOST:
                if lost.fact and lost.lack == kind and re.search(lost.fact, what):
                    yield Lack(lost.lack, f"{whose}: {what}", f"CRIU does not bring it back ({lost.why})")
                    break
