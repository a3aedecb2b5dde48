"""What of a sandbox this host cannot bring back, told by name before a restore is tried.

``doctor`` tries each kind once with a program that notices (``live/probe``). A kind that does not come back
is of no interest to a sandbox that uses none of it; where an inventory shows that it does, the checkpoint
lacks it. What CRIU refuses to dump at all needs no rule here: it says so itself, and the whole image lacks.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass

from windtunnel.agents.sandbox.model import Inventory, KindTried, Lack, LackKind, ProcessStood
from windtunnel.agents.sandbox.policy.standing import (
    GIVEN_BACK,
    NAMELESS,
    PEERLESS,
    SEMAPHORES,
    UNACCEPTED,
    UNREAD,
    table,
    who,
    words,
)

UNUSUAL = "(?!0 0 0 0$)"


@dataclass(frozen=True)
class Rule:
    """An inventory uses the kind where one of its facts is of kind ``lack`` and ``fact`` is found in its name
    and value."""

    kind: str
    lack: LackKind
    fact: str


RULES = (
    Rule("other-user", "processes", rf"^users, {UNUSUAL}"),
    Rule("mixed-user", "processes", r"^users, (\d+)(?! \1 \1 \1$)"),
    Rule("eventfd", "descriptors", r"\[eventfd\]"),
    Rule("eventfd-semaphore", "descriptors", r"eventfd-semaphore 1\b"),
    Rule("signalfd", "descriptors", r"\[signalfd\]"),
    Rule("pidfd", "descriptors", r"\[pidfd\]"),
    Rule("inotify", "descriptors", "inotify"),
    Rule("inotify-unread", "descriptors", f"inotify.* {UNREAD}"),
    Rule("inotify-of-deleted", "descriptors", rf"watch \d+ {NAMELESS}"),
    Rule("epoll-nested", "descriptors", r"\[eventpoll\]"),
    Rule("terminal-raw", "descriptors", "/dev/(pts/|ptmx)"),
    Rule("memfd", "descriptors", "/memfd:"),
    Rule("deleted-file", "descriptors", r"\(deleted\)"),
    Rule("pipe", "descriptors", "pipe"),
    Rule("tcp", "sockets", r"IPv[46] stream socket"),
    Rule("tcp-not-accepted", "sockets", UNACCEPTED),
    Rule("udp", "sockets", r"IPv[46] datagram socket"),
    Rule("udp-unread", "sockets", f"datagram socket .*{UNREAD}"),
    Rule("unix-stream", "sockets", "Unix stream socket"),
    Rule("unix-datagram", "sockets", "Unix (datagram|sequenced) socket"),
    Rule("unix-peer-is-gone", "sockets", re.escape(PEERLESS)),
    Rule("netlink", "sockets", "netlink"),
    Rule("posix-timer", "timers", "POSIX timer"),
    Rule("system-v-memory", "ipc", "shared memory"),
    Rule("system-v-semaphore", "ipc", f"^System V {SEMAPHORES} \\d"),
    Rule("system-v-semaphore-undo", "ipc", re.escape(GIVEN_BACK)),
    Rule("system-v-messages", "ipc", "message queue"),
)
LOCKS = {"POSIX": "posix-lock", "OFDLCK": "ofd-lock", "FLOCK": "flock", "LEASE": "lease"}
PERIODIC, ONE_SHOT = "timerfd-periodic", "timerfd-one-shot"
PLAIN = (
    "terminal", "posix-shared-memory", "shared-file", "threads", "capabilities", "limits", "affinity",
    "io-uring", "userfaultfd", "huge-pages",
)  # fmt: skip
"""Kinds without a rule, for ``doctor`` alone: a restore that lacks them says so, or they are refused inside.
"""
UNDUMPED = ("terminal-by-name", "posix-semaphore", "message-queue", "packet-pipe", "deleted-name-of-two")
"""Kinds that CRIU refuses to dump, by name, and then the whole image is lacking: each is tried alone."""
TRIED = (*(rule.kind for rule in RULES), *LOCKS.values(), PERIODIC, ONE_SHOT, *PLAIN, *UNDUMPED)


def beforehand(inventory: Inventory, kinds: Iterable[KindTried]) -> tuple[Lack, ...]:
    """What of ``inventory`` will not come back on a host where ``kinds`` were tried."""
    broken = {
        kind.name: f"this host does not bring it back ({kind.why})"
        for kind in kinds
        if kind.back is False  # and not None: that is not known
    }
    found = list(_facts("the sandbox", inventory.facts, broken))
    for stood in inventory.processes:
        found += _facts(who(stood), stood.facts, broken)
        found += _waiting(stood, broken)
    return tuple(found)


def _facts(whose: str, facts: str, broken: Mapping[str, str]) -> Iterator[Lack]:
    rules = [rule for rule in RULES if rule.kind in broken]
    if not rules:
        return
    for (kind, name), value in table(facts).items():
        for rule in rules:
            if rule.lack == kind and re.search(rule.fact, f"{name}, {value}"):
                what = f"{whose}: {name}, {value}" if value else f"{whose}: {name}"
                yield Lack(rule.lack, what, broken[rule.kind])
                break


def _waiting(stood: ProcessStood, broken: Mapping[str, str]) -> Iterator[Lack]:
    for lock in stood.locks:
        if why := broken.get(LOCKS.get(lock.kind, "")):
            yield Lack("locks", f"{who(stood)}: {words(lock)}", why)
    for timer in stood.timers:
        if why := broken.get(PERIODIC if timer.interval else ONE_SHOT):
            yield Lack("timers", f"{who(stood)}: timerfd {timer.descriptor}", why)
