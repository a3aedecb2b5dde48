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

**Scheduling.** CRIU keeps neither the CPUs of a thread nor two more of its settings (see ``scheduling``).

Source: timerfd_create(2), fcntl_locking(2), flock(2); Linux, fs/timerfd.c, fs/locks.c.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import signal
import struct
import time
from collections.abc import Mapping
from pathlib import Path

from windtunnel.agents.sandbox.inventory.descriptors import SECOND, Times, describe
from windtunnel.agents.sandbox.inventory.scheduling import schedule
from windtunnel.agents.sandbox.model import Inventory, LockStood, TimerStood
from windtunnel.agents.sandbox.policy.standing import table
from windtunnel.linux import cgroup, inject, namespaces, processes
from windtunnel.linux.snapshot import read_descriptors
from windtunnel.linux.system import checked, copied, libc, process_handle

SECONDS = 5.0
"""How long all threads of a sandbox may take to stop, and to stand again."""
_ABSOLUTE = 1
_WALL_CLOCKS = (time.CLOCK_REALTIME, 8)
_SET_TICKS = 0x40085400
_F_SETLK, _F_OFD_SETLK = 6, 37
_SHM_DEST, _IPC_RMID = 0o1000, 0
_MMAP, _MUNMAP, _FCNTL = 9, 11, 72
_PAGE, _READ_WRITE, _PRIVATE_ANONYMOUS = 4096, 3, 0x22


def mend(before: Inventory, freezer: Path) -> None:
    """Set timers and take locks as in ``before``, for the frozen sandbox of that cgroup. What cannot be put
    right stays as it is."""
    inside = {processes.inner_pid(pid): pid for pid in cgroup.pids_of(freezer)}
    missing: dict[int, list[LockStood]] = {}
    for stood in before.processes:
        pid = inside.get(stood.pid)
        if pid is None:
            continue
        if stood.scheduled:
            schedule(pid, stood.scheduled)
        if not (stood.timers or stood.locks):
            continue
        with contextlib.suppress(OSError), process_handle(pid) as handle:
            for timer in stood.timers:
                _arm(handle, timer, before.taken)
            if stood.locks:
                held = describe(pid, read_descriptors(pid)).locks
                wanted = [lock for lock in stood.locks if lock not in held]
                for lock in wanted:
                    _lock(handle, lock)
                if posix := [lock for lock in wanted if lock.kind == "POSIX"]:
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


def _marked(before: Inventory) -> list[int]:
    """The System V memory that goes with its last user, by number."""
    found = []
    for (kind, name), value in table(before.facts).items():
        if kind == "ipc" and "shared memory" in name:
            of = dict(zip(value.split()[::2], value.split()[1::2], strict=False))
            if int(of["perms"], 8) & _SHM_DEST:
                found.append(int(of["shmid"]))
    return found


def _mark(numbers: list[int]) -> None:
    for number in numbers:
        libc.shmctl(number, _IPC_RMID, None)


def _arm(handle: int, timer: TimerStood, taken: float) -> None:
    """Let a timer go on as if no time had passed.

    One for a moment of the wall clock keeps its moment; however often a periodic one would have expired
    meanwhile, it does so once.
    """
    value, ticks = timer.value, timer.ticks
    if value and timer.flags & _ABSOLUTE:
        now = time.clock_gettime_ns(timer.clock)
        if timer.clock in _WALL_CLOCKS:
            value += round(taken * SECOND)
            if timer.interval and value <= now:
                value, ticks = now + timer.interval - (now - value) % timer.interval, ticks + 1
        else:
            value += now
    both = Times(*divmod(timer.interval, SECOND), *divmod(value, SECOND))
    with contextlib.suppress(OSError), copied(handle, timer.descriptor) as copy:
        checked(libc.timerfd_settime(copy, timer.flags, both, None), "timerfd_settime")
        if ticks:
            fcntl.ioctl(copy, _SET_TICKS, struct.pack("Q", ticks))


def _lock(handle: int, lock: LockStood) -> None:
    """Take a lock that belongs to an open file."""
    with contextlib.suppress(OSError), copied(handle, lock.descriptor) as copy:
        if lock.kind == "FLOCK":
            fcntl.flock(copy, (fcntl.LOCK_EX if lock.write else fcntl.LOCK_SH) | fcntl.LOCK_NB)
        elif lock.kind == "OFDLCK":
            fcntl.fcntl(copy, _F_OFD_SETLK, _flock(lock))


def _flock(lock: LockStood) -> bytes:
    """``struct flock``."""
    length = 0 if lock.end is None else lock.end - lock.start + 1
    kind = fcntl.F_WRLCK if lock.write else fcntl.F_RDLCK
    return struct.pack("hh4xqqi4x", kind, os.SEEK_SET, lock.start, length, 0)


def _lock_inside(freezer: Path, missing: Mapping[int, list[LockStood]]) -> None:
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
                _take(pid, inject.Calls(pid, stopped[inject.running(pid)]), locks)
    finally:
        cgroup.freeze(freezer)
        for one in stopped.values():
            one.close()


def _take(pid: int, calls: inject.Calls, locks: list[LockStood]) -> None:
    page = calls(_MMAP, 0, _PAGE, _READ_WRITE, _PRIVATE_ANONYMOUS, -1, 0)
    try:
        for lock in locks:
            with open(f"/proc/{pid}/mem", "wb", buffering=0) as memory:
                memory.seek(page)
                memory.write(_flock(lock))
            with contextlib.suppress(OSError):
                calls(_FCNTL, lock.descriptor, _F_SETLK, page)
    finally:
        calls(_MUNMAP, page, _PAGE)
