"""What the descriptors of a process are, as /proc tells it, in words that are the same after a restore.

A line of ``fdinfo`` that holds an inode, a mount or a pid of the host says nothing of the sandbox and is left
out. Pipes and sockets have numbers that change; what stays is who shares them, so each is named by the first
descriptor of the sandbox that it stands behind.

Source: proc(5); Linux, Documentation/filesystems/proc.rst, section 3.8 (fdinfo).
"""

from __future__ import annotations

import contextlib
import ctypes
import fcntl
import os
import re
import select
import struct
import termios
from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from windtunnel.agents.sandbox.model import LockStood, TimerStood
from windtunnel.agents.sandbox.policy.standing import UNREAD
from windtunnel.linux.snapshot import Descriptor
from windtunnel.linux.system import checked, copied, libc, process_handle

GHOST = re.compile(r"\.cr(\.[0-9a-f]+\.ghost|_link)(?= \(deleted\)$)")
"""What CRIU adds to the name of a deleted file when it brings it back."""
Times = ctypes.c_long * 4
"""``struct itimerspec``: seconds and nanoseconds of the interval, and until it expires."""
SECOND = 10**9
KEPT = os.O_ACCMODE | os.O_APPEND | os.O_NONBLOCK | os.O_SYNC | os.O_ASYNC | os.O_DIRECT | os.O_NOATIME
KEPT |= os.O_CLOEXEC | os.O_PATH
"""Flags of an open file that mean something after it was opened."""
ALWAYS = select.EPOLLERR | select.EPOLLHUP
"""What the kernel adds whenever a descriptor is given to epoll, though it may be spent there."""
ANONYMOUS = ("pipe:[", "socket:[")


@dataclass
class Described:
    """The descriptors of one process: link and further words of each, by number."""

    links: dict[int, str] = field(default_factory=dict)
    words: dict[int, str] = field(default_factory=dict)
    timers: list[TimerStood] = field(default_factory=list)
    locks: list[LockStood] = field(default_factory=list)
    watches: list[tuple[int, str]] = field(default_factory=list)
    """Each inotify watch: its descriptor, and how /proc tells it."""


def describe(pid: int, descriptors: Mapping[int, Descriptor]) -> Described:
    """What a process has open, in words."""
    found = Described()
    for number, descriptor in descriptors.items():
        found.links[number] = GHOST.sub("", descriptor.link)
        _add(found, number, descriptor.link, descriptor.info)
    watches = [number for number, link in found.links.items() if link == "anon_inode:inotify"]
    if watches:
        _unread_events(pid, found, watches)
    waiting = [timer for timer in found.timers if timer.interval and timer.ticks and not timer.value]
    if waiting:
        _ask_timers(pid, found, waiting)
    return found


def _unread_events(pid: int, found: Described, watches: list[int]) -> None:
    """How much an inotify descriptor has told that nobody has read."""
    with contextlib.suppress(OSError), process_handle(pid) as handle:
        for number in watches:
            with contextlib.suppress(OSError), copied(handle, number) as copy:
                if unread := struct.unpack("i", fcntl.ioctl(copy, termios.FIONREAD, bytes(4)))[0]:
                    found.words[number] += f", {unread} {UNREAD}"


def _ask_timers(pid: int, found: Described, waiting: list[TimerStood]) -> None:
    """A periodic timer that expired waits to be read, or to be asked, before it goes on: asked, it tells
    whether it does."""
    with contextlib.suppress(OSError), process_handle(pid) as handle:
        for timer in waiting:
            with contextlib.suppress(OSError), copied(handle, timer.descriptor) as copy:
                both = Times()
                checked(libc.timerfd_gettime(copy, both), "timerfd_gettime")
                value = both[2] * SECOND + both[3]
                found.timers[found.timers.index(timer)] = replace(timer, value=value)


def _add(found: Described, number: int, link: str, info: str) -> None:
    words: list[str] = []
    timer: dict[str, str] = {}
    for line in info.splitlines():
        name, _, value = line.partition(":")
        value = value.strip()
        match name:
            case "flags":
                words.append(f"flags {int(value, 8) & KEPT:o}")
            case "pos":
                if link.startswith("/") and not link.startswith(("/dev/", "/proc/")):
                    words.append(f"at {value}")
            case "eventfd-count" | "eventfd-semaphore" | "sigmask" | "tty-index" | "scm_fds":
                words.append(f"{name} {value}")
            case "clockid" | "ticks" | "settime flags" | "it_value" | "it_interval":
                timer[name] = value
            case "tfd":
                # the number of one that was closed while the open file lives on is another one afterwards
                _, _, events, _, data, *_ = value.split()
                words.append(f"waits ({int(events, 16) & ~ALWAYS:x} {data})")
            case "inotify wd":
                watch, *rest = value.split()
                mask = next((word for word in rest if word.startswith("mask:")), "")
                words.append(f"watch {watch} {mask}")
                found.watches.append((number, value))
            case "NSpid":
                words.append(f"of process {value.split()[-1]}")
            case "lock":
                if (lock := _lock(number, value)) is not None:
                    found.locks.append(lock)
    if timer:
        found.timers.append(_timer(number, timer))
    # what an epoll or an inotify descriptor waits for comes in no order
    found.words[number] = ", ".join(sorted(words))


def _lock(number: int, value: str) -> LockStood | None:
    """``1: POSIX  ADVISORY  WRITE 26 00:2c:6222 0 9``."""
    fields = value.split()
    if len(fields) < 8 or fields[1] == "->":
        return None
    _, kind, _, mode, _, _, start, end, *_ = fields
    return LockStood(number, kind, mode == "WRITE", int(start), None if end == "EOF" else int(end))


def _timer(number: int, of: dict[str, str]) -> TimerStood:
    return TimerStood(
        number,
        int(of.get("clockid", "0")),
        int(of.get("settime flags", "0"), 8),
        int(of.get("ticks", "0")),
        _nanoseconds(of.get("it_value", "")),
        _nanoseconds(of.get("it_interval", "")),
    )


def _nanoseconds(words: str) -> int:
    """``(1, 500000000)``: seconds and nanoseconds."""
    seconds, _, rest = words.strip("()").partition(",")
    return int(seconds) * SECOND + int(rest) if rest else 0
