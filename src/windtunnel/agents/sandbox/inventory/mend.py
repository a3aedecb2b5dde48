"""What CRIU brings back wrongly, put right while a restored sandbox stands in its freezer.

**Timers behind descriptors.** While a sandbox stands to be dumped, a periodic timer expires and then waits to
be read before it goes on; the kernel shows no time until it next expires, and CRIU arms it with none, which
stops it for good. One that was set for a moment of its clock comes back up to a second too early, and one
that had expired expires again. So each is set from the inventory, through a copy of its descriptor.

**Locks.** A process loses its POSIX locks on a file when it closes any descriptor of it, and CRIU closes the
one by which it maps a file after it has set the locks. They belong to the process, so it has to take them
again itself: every thread is stopped by ptrace, the freezer lets go, the process is made to lock, and the
freezer holds again before any thread does. The other locks belong to open files and are taken through a copy.

**System V memory** that was marked to go with its last user comes back without the mark, and would stay.

**Alarms** that rang while CRIU read the process are in no image; the signal is sent again, and one that waits
already stays one. Where the timer itself is in the image too, it may ring once more.

**Scheduling.** CRIU keeps neither the CPUs of a thread nor two more of its settings.

Source: timerfd_create(2), fcntl_locking(2), flock(2); Linux, fs/timerfd.c, fs/locks.c.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import platform
import re
import signal
import struct
import time
from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple

from windtunnel.agents.sandbox.inventory import LOCKS, SECOND, Times, list_locks, take_inventory
from windtunnel.agents.sandbox.model import Lack, ProcessInventory, ProcessStood
from windtunnel.agents.sandbox.policy.standing import differences, values
from windtunnel.linux import cgroup, inject, namespaces, processes
from windtunnel.linux.snapshot import read_descriptors, read_snapshot
from windtunnel.linux.system import checked, copied, libc, process_handle

SECONDS = 5.0
"""How long all threads of a sandbox may take to stop, and to stand again."""
LOCK = re.compile(
    rf"(\w+) ({'|'.join(LOCKS.values())}) on descriptor (\d+)(?:, bytes (\d+) to (\d+|the end))?"
)
_ABSOLUTE = 1
_WALL_CLOCKS = (time.CLOCK_REALTIME, 8)
_SET_TICKS = 0x40085400
_F_SETLK, _F_OFD_SETLK = 6, 37
_SHM_DEST, _IPC_RMID = 0o1000, 0
_MMAP, _MUNMAP, _FCNTL = 9, 11, 72
_PAGE, _READ_WRITE, _PRIVATE_ANONYMOUS = 4096, 3, 0x22
_SET_DISK_PRIORITY = 251 if platform.machine() == "x86_64" else 30
_OF_THREAD = 1


def put_right(before: ProcessInventory, freezer: Path, init: int) -> tuple[Lack, ...]:
    """Mend what can be mended of a restored sandbox that stands in its freezer; what is still not as it was.
    ``init``: its first process."""
    mend(before, freezer)
    return differences(before, take_inventory(read_snapshot(cgroup.pids_of(freezer)), init))


class Lock(NamedTuple):
    """A lock to be taken through a descriptor. ``flock``: as ``struct flock`` has it."""

    kind: str
    write: bool
    descriptor: int
    flock: bytes


def mend(before: ProcessInventory, freezer: Path) -> None:
    """Set timers and take locks as in ``before``, for the frozen sandbox of that cgroup. What cannot be put
    right stays as it is."""
    inside = {processes.inner_pid(pid): pid for pid in cgroup.pids_of(freezer)}
    missing: dict[int, list[Lock]] = {}
    for stood in before.processes:
        if pid := inside.get(stood.pid):
            _schedule(pid, stood)
            with contextlib.suppress(OSError), process_handle(pid) as handle:
                for name, value in stood.facts.get("timers", {}).items():
                    if "timerfd" in name:
                        _arm(handle, int(name.split()[-1]), values(value), before.timestamp)
                if posix := _locked(pid, handle, stood):
                    missing[pid] = posix
    for number in before.alarms:
        if pid := inside.get(number):
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGALRM)
    if (marked := _marked(before)) and (first := inside.get(1)):
        with contextlib.suppress(OSError):
            namespaces.within(f"/proc/{first}/ns/ipc", lambda: _mark(marked), "ipc")
    if missing:
        with contextlib.suppress(OSError):
            # whatever goes wrong, the end of the tracing thread lets all others go
            namespaces.within(None, lambda: _lock_inside(freezer, missing))
        cgroup.wait_for(freezer, b"frozen 1", SECONDS)


def _schedule(pid: int, stood: ProcessStood) -> None:
    """Let threads have their CPUs, disk priority and timer slack again; a host without those CPUs lets all be
    used."""
    settings = {name: value for name, value in stood.facts.get("threads", {}).items() if "scheduling" in name}
    if not settings:
        return
    inside = {processes.inner_pid(thread): thread for thread in map(int, os.listdir(f"/proc/{pid}/task"))}
    for name, value in settings.items():
        if (host := inside.get(int(name.split()[-1]))) is None:
            continue
        of = values(value)
        with contextlib.suppress(OSError):
            os.sched_setaffinity(host, [int(cpu) for cpu in of["cpus"].split(",")])
        with contextlib.suppress(OSError):
            done = libc.syscall(_SET_DISK_PRIORITY, _OF_THREAD, host, int(of["disk"]))
            checked(done, "ioprio_set")
        with contextlib.suppress(OSError), open(f"/proc/{host}/timerslack_ns", "wb", buffering=0) as file:
            file.write(of["slack"].encode())


def _marked(before: ProcessInventory) -> list[int]:
    """The System V memory that goes with its last user, by number."""
    shared = (values(value) for name, value in before.facts.get("ipc", {}).items() if "shared memory" in name)
    return [int(of["shmid"]) for of in shared if int(of["perms"], 8) & _SHM_DEST]


def _mark(numbers: list[int]) -> None:
    for number in numbers:
        libc.shmctl(number, _IPC_RMID, None)


def _arm(handle: int, descriptor: int, timer: Mapping[str, str], moment: float) -> None:
    """Let a timer go on as if no time had passed.

    One for a moment of the wall clock keeps its moment; however often a periodic one would have expired
    meanwhile, it does so once.
    """
    clock, flags, ticks, value, interval = (
        int(timer[name]) for name in ("clock", "flags", "ticks", "value", "interval")
    )
    if value and flags & _ABSOLUTE:
        now = time.clock_gettime_ns(clock)
        if clock in _WALL_CLOCKS:
            value += round(moment * SECOND)
            if interval and value <= now:
                value, ticks = now + interval - (now - value) % interval, ticks + 1
        else:
            value += now
    both = Times(*divmod(interval, SECOND), *divmod(value, SECOND))
    with contextlib.suppress(OSError), copied(handle, descriptor) as copy:
        checked(libc.timerfd_settime(copy, flags, both, None), "timerfd_settime")
        if ticks:
            fcntl.ioctl(copy, _SET_TICKS, struct.pack("Q", ticks))


def _locked(pid: int, handle: int, stood: ProcessStood) -> list[Lock]:
    """Take the locks that belong to open files, through copies; those that the process itself has to take."""
    locks = stood.facts.get("locks", {})
    present = set(list_locks(read_descriptors(pid))) if locks else set()
    left = []
    for lock in (_lock(words) for words in locks if words not in present):
        with contextlib.suppress(OSError):
            if lock.kind == "POSIX lock":
                left.append(lock)
            elif lock.kind == "flock":
                with copied(handle, lock.descriptor) as copy:
                    fcntl.flock(copy, (fcntl.LOCK_EX if lock.write else fcntl.LOCK_SH) | fcntl.LOCK_NB)
            elif lock.kind == "OFD lock":
                with copied(handle, lock.descriptor) as copy:
                    fcntl.fcntl(copy, _F_OFD_SETLK, lock.flock)
    return left


def _lock(words: str) -> Lock:
    """From its words in an inventory."""
    match = LOCK.fullmatch(words)
    if match is None:
        return Lock(words, False, -1, b"")
    how, kind, descriptor, start, end = match.groups()
    length = int(end) - int(start) + 1 if end and end != "the end" else 0
    mode = fcntl.F_WRLCK if how == "exclusive" else fcntl.F_RDLCK
    flock = struct.pack("hh4xqqi4x", mode, os.SEEK_SET, int(start or 0), length, 0)
    return Lock(kind, how == "exclusive", int(descriptor), flock)


def _lock_inside(freezer: Path, missing: Mapping[int, list[Lock]]) -> None:
    """Make processes take POSIX locks; no thread of the sandbox runs a step of its own meanwhile."""
    stopped: dict[int, inject.Stopped] = {}
    try:
        for pid in cgroup.pids_of(freezer):
            for thread in map(int, os.listdir(f"/proc/{pid}/task")):
                if next(iter(processes.stat(pid, str(thread))), "X") not in "ZX":
                    stopped[thread] = inject.Stopped(thread, SECONDS, by_signal=True)
        cgroup.thaw(freezer)
        for pid, locks in missing.items():
            with contextlib.suppress(OSError):
                _take(pid, inject.InjectedCalls(pid, stopped[inject.running(pid)]), locks)
    finally:
        cgroup.freeze(freezer)
        for process in stopped.values():
            process.close()


def _take(pid: int, calls: inject.InjectedCalls, locks: list[Lock]) -> None:
    page = calls(_MMAP, 0, _PAGE, _READ_WRITE, _PRIVATE_ANONYMOUS, -1, 0)
    try:
        for lock in locks:
            with open(f"/proc/{pid}/mem", "wb", buffering=0) as memory:
                memory.seek(page)
                memory.write(lock.flock)
            with contextlib.suppress(OSError):
                calls(_FCNTL, lock.descriptor, _F_SETLK, page)
    finally:
        calls(_MUNMAP, page, _PAGE)
