"""What of a sandbox CRIU does not bring back, by kind and why: told by name at the checkpoint.

Small programs of the conformance suite hold one kind of thing each, and say after a restore whether it is as
it was: this table is what they found of CRIU 4.2, and the suite fails where one more is lost, or one less.
What another CRIU or kernel loses beyond it is told by the restore, before anything runs. What sandboxes are
refused to begin with (io_uring, userfaultfd, …) needs no row.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass

from windtunnel.agents.sandbox.model import Facts, Inventory, Lack, LackKind
from windtunnel.agents.sandbox.policy.standing import (
    GIVEN_BACK,
    IN_MEMORY,
    NAMELESS,
    PEERLESS,
    TAKEN,
    UNACCEPTED,
    UNREAD,
    UNSENT,
    who,
)


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


def beforehand(inventory: Inventory) -> tuple[Lack, ...]:
    """What of ``inventory`` is known not to come back."""
    found = list(_facts("the sandbox", inventory.facts))
    for stood in inventory.processes:
        found += _facts(who(stood), stood.facts)
    return tuple(found)


def undumpable(inventory: Inventory) -> str:
    """Why no restore would succeed, in words, where CRIU makes an image all the same; else empty."""
    for stood in inventory.processes:
        if stood.facts.get("directories", {}).get("program", "").startswith(IN_MEMORY):
            return f"{who(stood)} runs from a file in memory (memfd), which CRIU does not bring back"
        for value in (value for named in stood.facts.values() for value in named.values()):
            if value.endswith(TAKEN):
                folder = value.partition(" (deleted)")[0]
                return f"{who(stood)} uses the deleted folder {folder}, and another one has its name"
    return ""


def _facts(whose: str, facts: Facts) -> Iterator[Lack]:
    for kind, named in facts.items():
        for name, value in named.items():
            what = f"{name}, {value}" if value else name
            for one in LOST:
                if one.fact and one.lack == kind and re.search(one.fact, what):
                    yield Lack(one.lack, f"{whose}: {what}", f"CRIU does not bring it back ({one.why})")
                    break
