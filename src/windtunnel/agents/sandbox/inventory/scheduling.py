"""Which CPUs a thread may use, how urgent its disk access is, how late its timers may be: CRIU keeps none.

Only threads that differ from the sandbox's first process are of interest: what that one has is the host's
doing.

Source: sched_setaffinity(2), ioprio_set(2), prctl(2) (PR_SET_TIMERSLACK), proc(5).
"""

from __future__ import annotations

import contextlib
import os
import platform

from windtunnel.agents.sandbox.model import ScheduledStood
from windtunnel.linux import processes
from windtunnel.linux.system import checked, libc

_SET = 251 if platform.machine() == "x86_64" else 30
_OF_THREAD = 1


def scheduled(pid: int, usual: ScheduledStood | None) -> tuple[ScheduledStood, ...]:
    """Threads of a process for which something else holds than ``usual``, by their ids inside."""
    found = []
    with contextlib.suppress(OSError):
        for thread in map(int, os.listdir(f"/proc/{pid}/task")):
            one = of_thread(thread, thread=0)
            if usual is not None and one is not None and one != usual:
                inside = processes.inner_pid(thread)
                found.append(ScheduledStood(inside, one.cpus, one.disk, one.slack))
    return tuple(sorted(found, key=lambda one: one.thread))


def of_thread(host: int, *, thread: int) -> ScheduledStood | None:
    """What holds for the thread with that id on the host, as that of ``thread``; None when it is gone."""
    try:
        disk = processes.disk_priority(host)
        with open(f"/proc/{host}/timerslack_ns", "rb") as file:
            slack = int(file.read())
        return ScheduledStood(thread, tuple(sorted(os.sched_getaffinity(host))), disk, slack)
    except OSError:
        return None


def schedule(pid: int, wanted: tuple[ScheduledStood, ...]) -> None:
    """Let the same hold for the threads of a process again; a host without those CPUs lets all be used."""
    inside = {processes.inner_pid(thread): thread for thread in map(int, os.listdir(f"/proc/{pid}/task"))}
    for one in wanted:
        if (host := inside.get(one.thread)) is None:
            continue
        with contextlib.suppress(OSError):
            os.sched_setaffinity(host, one.cpus)
        with contextlib.suppress(OSError):
            checked(libc.syscall(_SET, _OF_THREAD, host, one.disk), "ioprio_set")
        with contextlib.suppress(OSError), open(f"/proc/{host}/timerslack_ns", "wb", buffering=0) as file:
            file.write(b"%d" % one.slack)
