"""An inventory of what stands in a sandbox: every process, what it may, what it has open, what waits.

It is made of one snapshot of /proc, taken while nothing runs; a process of a shell takes some 300
microseconds. Each fact is in words that are the same after a restore: what holds an inode, a mount or a pid
of the host says nothing of the sandbox and is left out. Pipes and sockets have numbers that change; what
stays is who shares them, so each is named by the first descriptor of the sandbox that it stands behind.

Source: proc(5); Linux, Documentation/filesystems/proc.rst, section 3.8 (fdinfo); open_by_handle_at(2).
"""

from __future__ import annotations

import contextlib
import ctypes
import hashlib
import os
import platform
import re
import select
import signal
import stat
import struct
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import cached_property
from pathlib import Path

from windtunnel.agents.sandbox.inventory.sockets import describe_sockets
from windtunnel.agents.sandbox.model import Facts, ProcessInventory, ProcessStood
from windtunnel.agents.sandbox.policy.standing import (
    GIVEN_BACK,
    NAMELESS,
    OUTSIDE,
    SEMAPHORES,
    TAKEN,
    UNREAD,
)
from windtunnel.linux import namespaces, processes
from windtunnel.linux.mounts import table
from windtunnel.linux.snapshot import Descriptor, SnapshotProcess, read_file, read_status
from windtunnel.linux.system import checked, copied, held, libc, process_handle, unread

DELETED = " (deleted)"
GHOST = re.compile(r"\.cr(\.[0-9a-f]+\.ghost|_link)(?= \(deleted\)$)")
"""What CRIU adds to the name of a deleted file when it brings it back."""
STATUS = {
    "Umask": "umask",
    "Uid": "users",
    "Gid": "groups",
    "Groups": "supplementary groups",
    "SigIgn": "ignored signals",
    "SigCgt": "caught signals",
    "CapInh": "inheritable capabilities",
    "CapPrm": "permitted capabilities",
    "CapEff": "effective capabilities",
    "CapBnd": "capability bounds",
    "CapAmb": "ambient capabilities",
    "NoNewPrivs": "no new privileges",
    "Seccomp": "seccomp",
}
SYSTEM_V = {
    "shm": (("key", "shmid", "perms", "size", "nattch", "uid", "gid"), "shared memory"),
    "msg": (("key", "msqid", "perms", "cbytes", "qnum", "uid", "gid"), "message queue"),
    "sem": (("key", "semid", "perms", "nsems", "uid", "gid"), SEMAPHORES),
}
"""By the name in /proc/sysvipc: the columns that stay the same, and words."""
LOCKS = {"POSIX": "POSIX lock", "OFDLCK": "OFD lock", "FLOCK": "flock", "LEASE": "lease"}
FLAGS = {"ro", "nosuid", "nodev", "noexec"}
"""Of a mount: those that keep something in."""
KEPT = os.O_ACCMODE | os.O_APPEND | os.O_NONBLOCK | os.O_SYNC | os.O_ASYNC | os.O_DIRECT | os.O_NOATIME
KEPT |= os.O_CLOEXEC | os.O_PATH
"""Flags of an open file that mean something after it was opened."""
ALWAYS = select.EPOLLERR | select.EPOLLHUP
"""What the kernel adds whenever a descriptor is given to epoll, though it may be spent there."""
Times = ctypes.c_long * 4
"""``struct itimerspec``: seconds and nanoseconds of the interval, and until it expires."""
SECOND = 10**9
DUE_MILLISECONDS = 20
"""Within which a timer that is due expires; one that was stopped does not."""
KERNEL_THREAD = 2
"""A process that has no list of semaphores, where it is the host's."""
_KCMP, _KCMP_SYSVSEM = 312 if platform.machine() == "x86_64" else 272, 6
_FOLDER = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC

Fact = tuple[str, str, str]
"""Kind, name and value."""


def take_inventory(snapshot: Sequence[SnapshotProcess], init: int) -> ProcessInventory:
    """What stands of a sandbox, by a look at its processes, whose first one is ``init`` on the host."""
    inside = {process.pid: process.inner for process in snapshot}
    links = {
        process.pid: {number: descriptor.link for number, descriptor in process.descriptors.items()}
        for process in snapshot
    }
    names, first = describe_sockets(links), dict[str, str]()
    for process in snapshot:
        for number, link in links[process.pid].items():
            first.setdefault(link, f"{process.inner}:{number}")
    system_v = namespaces.within(Path(f"/proc/{init}/ns/ipc"), _system_v, "ipc")
    undo = _operated(system_v["sem"])
    usual = scheduling(init)
    stood, tree = [], _Tree(init)
    for process in snapshot:
        facts = [
            *_identity(process, inside, tree),
            *_scheduled(process.pid, usual),
            *_limits(read_file(f"/proc/{process.pid}/limits").decode()),
            *_posix_timers(read_file(f"/proc/{process.pid}/timers").decode()),
            *_descriptors(process, first, names, tree),
            *(("locks", words, "") for words in list_locks(process.descriptors)),
        ]
        if undo and _gives_back(process.pid, init):
            facts.append(("ipc", GIVEN_BACK, ""))
        stood.append(ProcessStood(process.inner, processes.command_line(process.pid), _by_kind(facts)))
    return ProcessInventory(tuple(stood), _by_kind([*_mounts(init), *_ipc(system_v)]), time.time())


def _by_kind(facts: Iterable[Fact]) -> Facts:
    by_kind: Facts = {}
    for kind, name, value in facts:
        by_kind.setdefault(kind, {})[name] = value.replace("\n", " ")
    return by_kind


def find_alarms(pids: Iterable[int]) -> tuple[int, ...]:
    """Those of the processes ``pids`` for which SIGALRM waits, as seen inside.

    CRIU reads the signals of a process before its timers: an alarm that rings in between is in no image.
    """
    inner = []
    for status in map(read_status, pids):
        if int(status.get("ShdPnd", "0"), 16) >> (signal.SIGALRM - 1) & 1:
            inner.append(int(status["NSpid"].split()[-1]))
    return tuple(inner)


class _Tree:
    """The file systems of a sandbox, asked what a restore will do to files without a name. It makes each anew
    and takes its name away again: for a folder not where something else has that name, and a watch ends."""

    def __init__(self, init: int) -> None:
        self._init = init
        self._folders: dict[str, tuple[int, int]] = {}

    def marked(self, path: str, link: str) -> str:
        """``link``, where ``path`` of /proc leads; with words for a deleted folder that lost its name."""
        link = GHOST.sub("", link)
        if not link.endswith(DELETED) or not link.startswith("/"):
            return link
        try:
            state = os.stat(path)
        except OSError:
            return link
        if not stat.S_ISDIR(state.st_mode):
            return link
        name, this = link.removesuffix(DELETED), (state.st_dev, state.st_ino)
        occupied = self._folders.setdefault(name, this) != this
        return f"{name} {TAKEN}" if occupied or os.path.lexists(f"/proc/{self._init}/root{name}") else link

    def is_nameless(self, watch: str) -> bool:
        """Whether a watch, as fdinfo tells it, is of a file that has no name any more. The kernel tells its
        handle; opened by it, the file says how many names it has."""
        fields = dict(word.split(":", 1) for word in watch.split() if ":" in word)
        with contextlib.suppress(OSError, KeyError, ValueError):
            handle = bytes.fromhex(fields["f_handle"])
            request = struct.pack("=Ii", len(handle), int(fields["fhandle-type"], 16)) + handle
            point = self._points[int(fields["sdev"], 16)]
            with held(os.open(f"/proc/{self._init}/root{point}", _FOLDER)) as mount:
                file = libc.open_by_handle_at(mount, ctypes.c_char_p(request), os.O_PATH | os.O_CLOEXEC)
            with held(checked(file, "open_by_handle_at")):
                return os.fstat(file).st_nlink == 0
        return False

    @cached_property
    def _points(self) -> dict[int, str]:
        """Where each file system is mounted first, by its device."""
        mounts = table(Path(f"/proc/{self._init}/mountinfo"))
        return {each.device: each.point for each in reversed(mounts)}


def _operated(semaphores: str) -> bool:
    """Whether an operation was ever done on a System V semaphore of the sandbox."""
    head, *lines = semaphores.splitlines()
    return any(line.split()[head.split().index("otime")] != "0" for line in lines)


def _gives_back(pid: int, init: int) -> bool:
    """Whether a process may have a list of semaphores that the kernel gives back at its end. Only that it has
    a list, unlike a thread of the kernel, can be seen (kcmp(2)): one with threads always has, were it empty,
    and so has the first process of a restored sandbox, in which CRIU ran helpers of its own."""
    without = KERNEL_THREAD if read_file(f"/proc/{KERNEL_THREAD}/comm") == b"kthreadd\n" else init
    return pid != init and bool(libc.syscall(_KCMP, without, pid, _KCMP_SYSVSEM, 0, 0) > 0)


def _identity(process: SnapshotProcess, inside: Mapping[int, int], tree: _Tree) -> Iterator[Fact]:
    status, pid = process.status, process.pid
    yield ("processes", "parent", str(inside.get(int(status.get("PPid", "0")), 0)))
    for name, words in (("NSpgid", "process group"), ("NSsid", "session")):
        yield ("processes", words, status.get(name, "0").rpartition("\t")[2])
    for name, words in STATUS.items():
        yield ("processes", words, " ".join(status.get(name, "").split()))
    yield ("threads", "threads", _threads(pid, process.inner, status.get("Threads", "1")))
    for name, words in (("cwd", "working directory"), ("root", "root"), ("exe", "program")):
        yield ("directories", words, tree.marked(f"/proc/{pid}/{name}", process.links[name]))
    environment = hashlib.blake2s(read_file(f"/proc/{pid}/environ"), digest_size=6).hexdigest()
    yield ("environment", "environment as it was started", environment)


def _threads(pid: int, inner: int, count: str) -> str:
    """The ids inside of all threads."""
    if count == "1":
        return str(inner)
    numbers = (read_status(pid, thread).get("NSpid", "0") for thread in os.listdir(f"/proc/{pid}/task"))
    return " ".join(map(str, sorted(int(each.split()[-1]) for each in numbers)))


def _scheduled(pid: int, usual: str) -> Iterator[Fact]:
    """Which CPUs a thread may use, how urgent its disk access is, how late its timers may be: only where that
    differs from the sandbox's first process, since what that one has is the host's doing."""
    with contextlib.suppress(OSError):
        for thread in map(int, os.listdir(f"/proc/{pid}/task")):
            if (value := scheduling(thread)) not in ("", usual):
                yield ("threads", f"scheduling of thread {processes.inner_pid(thread)}", value)


def scheduling(thread: int) -> str:
    """In words, by its id on the host; empty when it is gone."""
    try:
        cpus = ",".join(map(str, sorted(os.sched_getaffinity(thread))))
        disk = processes.disk_priority(thread)
        return f"cpus {cpus} disk {disk} slack {read_file(f'/proc/{thread}/timerslack_ns').decode().strip()}"
    except OSError:
        return ""


def _limits(text: str) -> Iterator[Fact]:
    for line in text.split("\n")[1:-1]:
        soft, hard, *_ = line[26:].split()
        yield ("limits", line[:26].strip(), soft if soft == hard else f"{soft} of {hard}")


def _posix_timers(text: str) -> Iterator[Fact]:
    """``ID: 0``, ``signal: 12/0000000000000000``, ``notify: signal/pid.26``, ``ClockID: 1`` of each."""
    blocks = text.split("ID: ")
    for block, clock in zip(blocks[1::2], blocks[2::2], strict=False):
        number, signal, notify, *_ = (line.rpartition(" ")[2] for line in block.split("\n"))
        what = f"signal {signal.partition('/')[0]}, {notify.partition('.')[0]}, clock {clock.strip()}"
        yield ("timers", f"POSIX timer {number}", what)


def _descriptors(
    process: SnapshotProcess, shared: Mapping[str, str], names: Mapping[str, str], tree: _Tree
) -> Iterator[Fact]:
    """``shared``: the first descriptor with each link; ``names``: words for sockets, by their links."""
    for number, descriptor in process.descriptors.items():
        own, kind, words = f"{process.inner}:{number}", "descriptors", _words(descriptor, tree)
        name = tree.marked(f"/proc/{process.pid}/fd/{number}", descriptor.link)
        if descriptor.link == "anon_inode:[timerfd]":
            yield _timer(process.pid, number, descriptor.info)
        elif descriptor.link == "anon_inode:inotify":
            words += _unread_events(process.pid, number)
        elif descriptor.link.startswith("socket:["):
            kind, name = "sockets", names.get(descriptor.link, "socket")
        elif descriptor.link.startswith("pipe:["):
            name = "pipe"
        if kind == "sockets" or name == "pipe":
            first = shared[descriptor.link]
            name = name if first == own else f"that of {first}, {name}"
        # a connection to the outside has no words but these
        yield (kind, f"descriptor {number}", name if name.endswith(OUTSIDE) else f"{name}, {words}")


def _words(descriptor: Descriptor, tree: _Tree) -> str:
    words = []
    for line in descriptor.info.splitlines():
        name, _, value = line.partition(":")
        value = value.strip()
        match name:
            case "flags":
                words.append(f"flags {int(value, 8) & KEPT:o}")
            case "pos" if descriptor.link.startswith("/") and not descriptor.link.startswith(
                ("/dev/", "/proc/")
            ):
                words.append(f"at {value}")
            case "eventfd-count" | "eventfd-semaphore" | "sigmask" | "tty-index" | "scm_fds":
                words.append(f"{name} {value}")
            case "tfd":
                # the number of one that was closed while the open file lives on is another one afterwards
                _, _, events, _, data, *_ = value.split()
                words.append(f"waits ({int(events, 16) & ~ALWAYS:x} {data})")
            case "inotify wd":
                watch, *rest = value.split()
                mask = next((word for word in rest if word.startswith("mask:")), "")
                words.append(f"watch {watch} {NAMELESS if tree.is_nameless(value) else mask}")
            case "NSpid":
                words.append(f"of process {value.split()[-1]}")
    # what an epoll or an inotify descriptor waits for comes in no order
    return ", ".join(sorted(words))


def list_locks(descriptors: Mapping[int, Descriptor]) -> Iterator[str]:
    """The locks that a process holds through its descriptors, in words that `mend` reads. The kernel's are
    ``lock: 1: POSIX  ADVISORY  WRITE 26 00:2c:6222 0 9``."""
    for number, descriptor in descriptors.items():
        for line in descriptor.info.splitlines():
            fields = line.split()
            if len(fields) < 9 or fields[0] != "lock:" or fields[2] == "->":
                continue
            _, _, kind, _, mode, _, _, start, end, *_ = fields
            span = (
                "" if (start, end) == ("0", "EOF") else f", bytes {start} to {end.replace('EOF', 'the end')}"
            )
            how = "exclusive" if mode == "WRITE" else "shared"
            yield f"{how} {LOCKS.get(kind, kind)} on descriptor {number}{span}"


def _timer(pid: int, number: int, info: str) -> Fact:
    """A timer behind a descriptor. ``clock`` and ``flags`` as for timerfd_settime(2); ``ticks``: expirations
    that nobody has read; ``value`` (until it next expires; 0 when it does not) and ``interval`` in
    nanoseconds."""
    of = {name: value.strip() for name, _, value in (line.partition(":") for line in info.splitlines())}
    value, interval = (_nanoseconds(of.get(name, "")) for name in ("it_value", "it_interval"))
    flags, ticks = int(of.get("settime flags", "0"), 8), int(of.get("ticks", "0"))
    if interval and not value:
        # a periodic timer that expired waits to be read, or to be asked, before it goes on: asked, it tells;
        # on a busy host one may be due that has not expired yet
        with contextlib.suppress(OSError), process_handle(pid) as handle, copied(handle, number) as copy:
            expires = select.poll()
            expires.register(copy, select.POLLIN)
            expires.poll(DUE_MILLISECONDS)
            both = Times()
            checked(libc.timerfd_gettime(copy, both), "timerfd_gettime")
            value = both[2] * SECOND + both[3]
    words = f"clock {of.get('clockid', '0')} flags {flags} ticks {ticks} value {value} interval {interval}"
    return ("timers", f"{'periodic ' if interval else ''}timerfd {number}", words)


def _nanoseconds(words: str) -> int:
    """``(1, 500000000)``: seconds and nanoseconds."""
    seconds, _, rest = words.strip("()").partition(",")
    return int(seconds) * SECOND + int(rest) if rest else 0


def _unread_events(pid: int, number: int) -> str:
    """How much an inotify descriptor has told that nobody has read."""
    with contextlib.suppress(OSError), process_handle(pid) as handle, copied(handle, number) as copy:
        return f", {count} {UNREAD}" if (count := unread(copy)) else ""
    return ""


def _mounts(init: int) -> Iterator[Fact]:
    points: dict[str, list[str]] = {}
    for each in table(Path(f"/proc/{init}/mountinfo")):
        points.setdefault(each.point, []).append(" ".join([each.kind, *sorted(each.flags & FLAGS)]))
    for point, kinds in sorted(points.items()):
        yield ("mounts", f"mount at {point}", " under ".join(kinds))


def _ipc(system_v: Mapping[str, str]) -> Iterator[Fact]:
    for kind, (columns, words) in SYSTEM_V.items():
        head, *lines = system_v[kind].splitlines()
        for line in lines:
            of = dict(zip(head.split(), line.split(), strict=False))
            yield (
                "ipc",
                f"System V {words} {of[columns[1]]}",
                " ".join(f"{column} {of[column]}" for column in columns),
            )


def _system_v() -> dict[str, str]:
    return {name: read_file(f"/proc/sysvipc/{name}").decode() for name in SYSTEM_V}
