"""An inventory of what stands in a sandbox: every process, what it may, what it has open, what waits.

All of it is read from /proc while nothing runs; a process of a shell takes some 300 microseconds. Sockets are
looked up in the tables of their network only where there are any.
"""

from __future__ import annotations

import hashlib
import os
import platform
import signal
import stat
import time
from collections.abc import Iterable, Sequence
from pathlib import Path

from windtunnel.agents.sandbox.inventory.descriptors import ANONYMOUS, GHOST, Described, describe
from windtunnel.agents.sandbox.inventory.scheduling import of_thread, scheduled
from windtunnel.agents.sandbox.inventory.sockets import sockets
from windtunnel.agents.sandbox.inventory.watches import mark_nameless
from windtunnel.agents.sandbox.model import Inventory, ProcessStood
from windtunnel.agents.sandbox.policy.standing import GIVEN_BACK, OUTSIDE, SEMAPHORES, TAKEN
from windtunnel.linux import namespaces, processes
from windtunnel.linux.mounts import table
from windtunnel.linux.snapshot import Process, read_file, read_status
from windtunnel.linux.system import libc

DELETED = " (deleted)"
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


def inventory(snapshot: Sequence[Process], init: int) -> Inventory:
    """What stands of a sandbox, by a look at its processes, whose first one is ``init`` on the host."""
    inside = {process.pid: process.inner for process in snapshot}
    have = {process.pid: describe(process.pid, process.descriptors) for process in snapshot}
    deleted = DeletedFolders(init)
    for pid, of in have.items():
        for number, link in of.links.items():
            of.links[number] = deleted.mark(f"/proc/{pid}/fd/{number}", link)
    mark_nameless(have.values(), init)
    shared = _shared(have, inside)
    names = sockets({pid: of.links for pid, of in have.items()})
    usual = of_thread(init, thread=0)
    whole = list(_whole(init))
    undo = any(SEMAPHORES in name for _, name, _ in whole) and _operated(init)
    stood = []
    for process in snapshot:
        pid, of = process.pid, have[process.pid]
        facts = [
            *_identity(process, inside, deleted),
            *_limits(read_file(f"/proc/{pid}/limits").decode()),
            *_posix_timers(read_file(f"/proc/{pid}/timers").decode()),
            *_descriptors(process.inner, of, shared, names),
        ]
        if undo and _gives_back(pid, init):
            facts.append(("ipc", GIVEN_BACK, ""))
        stood.append(
            ProcessStood(
                process.inner,
                processes.command_line(pid),
                _lines(facts),
                tuple(of.timers),
                tuple(of.locks),
                scheduled(pid, usual),
            )
        )
    return Inventory(tuple(stood), _lines(whole), time.time())


class DeletedFolders:
    """Deleted folders that are in use. A restore makes each anew under its name and takes it away again: not
    where something else has that name."""

    def __init__(self, init: int) -> None:
        self._root = f"/proc/{init}/root"
        self._known: dict[str, tuple[int, int]] = {}

    def mark(self, path: str, link: str) -> str:
        """``link``, where ``path`` of /proc leads; with words for one whose name is another's."""
        if not link.endswith(DELETED) or not link.startswith("/"):
            return link
        try:
            state = os.stat(path)
        except OSError:
            return link
        if not stat.S_ISDIR(state.st_mode):
            return link
        name = link.removesuffix(DELETED)
        first = self._known.setdefault(name, (state.st_dev, state.st_ino))
        taken = first != (state.st_dev, state.st_ino) or os.path.lexists(self._root + name)
        return f"{name} {TAKEN}" if taken else link


def alarms(pids: Iterable[int]) -> tuple[int, ...]:
    """Those of the processes ``pids`` for which SIGALRM waits, as seen inside.

    CRIU reads the signals of a process before its timers: an alarm that rings in between is in no image.
    """
    found = []
    for status in map(read_status, pids):
        if int(status.get("ShdPnd", "0"), 16) >> (signal.SIGALRM - 1) & 1:
            found.append(int(status["NSpid"].split()[-1]))
    return tuple(found)


def _operated(init: int) -> bool:
    """Whether an operation was ever done on a System V semaphore of the sandbox."""
    text = namespaces.within(Path(f"/proc/{init}/ns/ipc"), _system_v, "ipc")["sem"]
    head, *lines = text.splitlines()
    return any(line.split()[head.split().index("otime")] != "0" for line in lines)


def _gives_back(pid: int, init: int) -> bool:
    """Whether a process may have a list of semaphores that the kernel gives back at its end. Only that it has
    a list, unlike a thread of the kernel, can be seen (kcmp(2)): one with threads always has, were it empty,
    and so has the first process of a restored sandbox, in which CRIU ran helpers of its own."""
    without = KERNEL_THREAD if read_file(f"/proc/{KERNEL_THREAD}/comm") == b"kthreadd\n" else init
    return pid != init and bool(libc.syscall(_KCMP, without, pid, _KCMP_SYSVSEM, 0, 0) > 0)


Fact = tuple[str, str, str]
KERNEL_THREAD = 2
"""A process that has no list of semaphores, where it is the host's."""
_KCMP, _KCMP_SYSVSEM = 312 if platform.machine() == "x86_64" else 272, 6
FLAGS = {"ro", "nosuid", "nodev", "noexec"}
"""Of a mount: those that keep something in."""


def _lines(facts: list[Fact]) -> str:
    lines = ["\t".join(fact) for fact in facts]
    for number, line in enumerate(lines):
        if line.count("\t") != 2 or "\n" in line:
            kind, name, value = (" ".join(word.split()) for word in facts[number])
            lines[number] = f"{kind}\t{name}\t{value}"
    return "\n".join(lines)


def _shared(have: dict[int, Described], inside: dict[int, int]) -> dict[str, str]:
    """Pipes and sockets by the first descriptor that they stand behind."""
    found: dict[str, str] = {}
    for pid, of in have.items():
        for number, link in of.links.items():
            if link.startswith(ANONYMOUS):
                found.setdefault(link, f"{inside[pid]}:{number}")
    return found


def _identity(process: Process, inside: dict[int, int], deleted: DeletedFolders) -> Iterable[Fact]:
    status, pid = process.status, process.pid
    yield ("processes", "parent", str(inside.get(int(status.get("PPid", "0")), 0)))
    for name, words in (("NSpgid", "process group"), ("NSsid", "session")):
        yield ("processes", words, status.get(name, "0").rpartition("\t")[2])
    for name, words in STATUS.items():
        yield ("processes", words, status.get(name, ""))
    yield ("threads", "threads", _threads(pid, process.inner, status.get("Threads", "1")))
    for name, words in (("cwd", "working directory"), ("root", "root"), ("exe", "program")):
        link = GHOST.sub("", process.links[name])
        yield ("directories", words, deleted.mark(f"/proc/{pid}/{name}", link))
    environment = hashlib.blake2s(read_file(f"/proc/{pid}/environ"), digest_size=6).hexdigest()
    yield ("environment", "environment as it was started", environment)


def _limits(text: str) -> Iterable[Fact]:
    for line in text.split("\n")[1:-1]:
        soft, hard, *_ = line[26:].split()
        yield ("limits", line[:26].strip(), soft if soft == hard else f"{soft} of {hard}")


def _descriptors(
    inner: int, have: Described, shared: dict[str, str], names: dict[str, str]
) -> Iterable[Fact]:
    for number, link in have.links.items():
        words, name, kind = have.words[number], link, "descriptors"
        if link.startswith("socket:["):
            kind, name = "sockets", names.get(link, "socket")
        elif link.startswith("pipe:["):
            name = "pipe"
        first = shared.get(link, f"{inner}:{number}")
        if first != f"{inner}:{number}":
            name = f"that of {first}, {name}"
        # a connection to the outside has no words but these
        yield (kind, f"descriptor {number}", name if name.endswith(OUTSIDE) else f"{name}, {words}")


def _threads(pid: int, inner: int, count: str) -> str:
    """The ids inside of all threads."""
    if count == "1":
        return str(inner)
    found = []
    for thread in os.listdir(f"/proc/{pid}/task"):
        found.append(int(read_status(pid, thread).get("NSpid", "0").split()[-1]))
    return " ".join(map(str, sorted(found)))


def _posix_timers(text: str) -> Iterable[Fact]:
    """``ID: 0``, ``signal: 12/0000000000000000``, ``notify: signal/pid.26``, ``ClockID: 1`` of each."""
    blocks = text.split("ID: ")
    for block, clock in zip(blocks[1::2], blocks[2::2], strict=False):
        number, signal, notify, *_ = (line.rpartition(" ")[2] for line in block.split("\n"))
        what = f"signal {signal.partition('/')[0]}, {notify.partition('.')[0]}, clock {clock.strip()}"
        yield ("timers", f"POSIX timer {number}", what)


def _whole(init: int) -> Iterable[Fact]:
    """Mounts, and what System V has."""
    points: dict[str, list[str]] = {}
    for each in table(Path(f"/proc/{init}/mountinfo")):
        points.setdefault(each.point, []).append(" ".join([each.kind, *sorted(each.flags & FLAGS)]))
    for point, kinds in sorted(points.items()):
        yield ("mounts", f"mount at {point}", " under ".join(kinds))
    for name, text in namespaces.within(Path(f"/proc/{init}/ns/ipc"), _system_v, "ipc").items():
        columns, words = SYSTEM_V[name]
        head, *lines = text.splitlines()
        for line in lines:
            of = dict(zip(head.split(), line.split(), strict=False))
            value = " ".join(f"{one} {of[one]}" for one in columns)
            yield ("ipc", f"System V {words} {of[columns[1]]}", value)


def _system_v() -> dict[str, str]:
    return {name: read_file(f"/proc/sysvipc/{name}").decode() for name in SYSTEM_V}
