"""What the host reads of a sandbox's processes in /proc: parents, sessions, descriptors, names."""

from __future__ import annotations

import contextlib
import os
import select
import signal
import time
from collections.abc import Iterable
from dataclasses import dataclass

TICKS = os.sysconf("SC_CLK_TCK")


@dataclass(frozen=True)
class Process:
    pid: int
    parent: int
    session: int
    started: float
    """Seconds since the host was booted, rounded down to a tick of its clock."""
    state: str


def look(pid: int) -> Process | None:
    """None when there is no such process."""
    try:
        with open(f"/proc/{pid}/stat", "rb") as file:
            fields = file.read().rpartition(b") ")[2].split()
    except OSError:
        return None
    return Process(pid, int(fields[1]), int(fields[3]), int(fields[19]) / TICKS, fields[0].decode())


def inner_pid(pid: int) -> int:
    """The pid in the innermost namespace; 0 when the process is gone."""
    with contextlib.suppress(OSError), open(f"/proc/{pid}/status", "rb") as file:
        for line in file:
            if line.startswith(b"NSpid:"):
                return int(line.split()[-1])
    return 0


def host_pid(inner: int, candidates: Iterable[int]) -> int:
    """The host's pid of the process with that pid inside; 0 when there is none."""
    return next((pid for pid in candidates if inner_pid(pid) == inner), 0)


def command_line(pid: int) -> str:
    """Arguments joined by blanks, or the bare name of a process that has none; empty when it is gone."""
    try:
        with open(f"/proc/{pid}/cmdline", "rb") as file:
            text = file.read(4096).rstrip(b"\0").replace(b"\0", b" ").decode(errors="replace")
        if not text:
            with open(f"/proc/{pid}/comm", "rb") as file:
                text = file.read().strip().decode(errors="replace")
    except OSError:
        return ""
    return text


def descriptors(pid: int) -> dict[int, str]:
    """Number and target of every open descriptor."""
    found = {}
    with contextlib.suppress(OSError):
        for name in os.listdir(f"/proc/{pid}/fd"):
            with contextlib.suppress(OSError):
                found[int(name)] = os.readlink(f"/proc/{pid}/fd/{name}")
    return found


def inherited_descriptors(pid: int) -> dict[int, str]:
    """Of `descriptors`, those that a program started by the process would inherit: what a shell's user
    opened, without what the shell keeps for itself."""
    found = {}
    for number, target in descriptors(pid).items():
        with contextlib.suppress(OSError), open(f"/proc/{pid}/fdinfo/{number}", "rb") as file:
            flags = next((line for line in file if line.startswith(b"flags:")), b"flags: 0")
            if not int(flags.split()[1], 8) & os.O_CLOEXEC:
                found[number] = target
    return found


def started_by(shell: int, pids: set[int], before: set[int], since: float) -> set[int]:
    """Which of ``pids`` the shell has started since then: what descends from it, and orphans in its session.

    A process that made a session of its own and lost its parent (a daemon) is not the shell's any more.
    """
    table = {found.pid: found for pid in pids if (found := look(pid)) is not None}
    mine = {shell}
    while True:
        more = {
            pid
            for pid, process in table.items()
            if pid not in mine and (process.parent in mine or process.session == shell)
        }
        if not more:
            break
        mine |= more
    return {
        pid
        for pid in mine - {shell}
        if (pid not in before or table[pid].started > since) and table[pid].state not in "ZX"
    }


def end(pids: set[int], bounds: tuple[float, float] = (0.3, 0.3)) -> None:
    """SIGINT, then SIGTERM, then SIGKILL to each that is still there; returns when all are gone."""
    handles: dict[int, int] = {}
    for pid in pids:
        with contextlib.suppress(OSError):
            handles[pid] = os.pidfd_open(pid)
    try:
        for number, bound in ((signal.SIGINT, bounds[0]), (signal.SIGTERM, bounds[1]), (signal.SIGKILL, 5.0)):
            for handle in handles.values():
                with contextlib.suppress(OSError):
                    signal.pidfd_send_signal(handle, number)
            deadline = time.monotonic() + bound
            waiting = set(handles.values())
            while waiting and (left := deadline - time.monotonic()) > 0:
                poll = select.poll()
                for handle in waiting:
                    poll.register(handle, select.POLLIN)
                waiting -= {handle for handle, _ in poll.poll(left * 1000)}
            if not waiting:
                return
            handles = {pid: handle for pid, handle in handles.items() if handle in waiting or _closed(handle)}
    finally:
        for handle in handles.values():
            with contextlib.suppress(OSError):
                os.close(handle)


def _closed(handle: int) -> bool:
    os.close(handle)
    return False
