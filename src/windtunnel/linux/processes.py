"""Processes as /proc tells of them (parents, sessions, descriptors, names), and how they are ended.

Source: proc(5), pidfd_open(2).
"""

from __future__ import annotations

import contextlib
import os
import platform
import select
import signal
import time
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from windtunnel.linux.snapshot import read_file, read_status
from windtunnel.linux.system import checked, libc

TICKS = os.sysconf("SC_CLK_TCK")
_STANDS = frozenset("TtZX")
_FLAGS, _ENV_START, _ENV_END, _KERNEL_THREAD = 6, 47, 48, 0x0020_0000
"""Places among the fields of `stat`, and PF_KTHREAD among the flags. Source: proc(5), linux/sched.h."""
_EXEC_TURNS = 100
SESSION_WEIGHT, SESSION_FIRST = Path("/proc/self/autogroup"), "-10"
"""Where the kernel shares the CPUs by sessions, the nice value of one, and the one of a session that others
wait for; processes in a control group of their own are not counted to their session. Source: sched(7)."""


@dataclass(frozen=True)
class Process:
    pid: int
    parent: int
    session: int
    started: float
    """Seconds since the host was booted, rounded down to a tick of its clock."""
    state: str


def stat(pid: int | str, thread: str = "") -> list[str]:
    """The fields of /proc/PID/stat from the state on; empty when there is no such process (or thread)."""
    text = read_file(f"/proc/{pid}/task/{thread}/stat" if thread else f"/proc/{pid}/stat", short=True)
    return text.rpartition(b") ")[2].decode("ascii").split()


def session_first() -> None:
    """Let the session of this process go before others, if it leads one and the kernel has such a thing."""
    if os.getsid(0) == os.getpid():
        with contextlib.suppress(OSError):
            SESSION_WEIGHT.write_text(SESSION_FIRST)


def state(pid: int) -> str:
    """The kernel's letter for what a process does: T is stopped, R runs, S and D sleep; empty: it is gone."""
    return next(iter(stat(pid)), "")


def look(pid: int) -> Process | None:
    """None when there is no such process."""
    fields = stat(pid)
    if not fields:
        return None
    return Process(pid, int(fields[1]), int(fields[3]), int(fields[19]) / TICKS, fields[0])


def stands(pid: int) -> bool:
    """Whether every thread of a process is stopped or has ended."""
    try:
        threads = os.listdir(f"/proc/{pid}/task")
    except OSError:
        return True
    return all(not fields or fields[0] in _STANDS for fields in (stat(pid, thread) for thread in threads))


def in_vfork(pid: int) -> bool:
    """Of a process in a frozen control group: whether a thread of it waits for its child of vfork(2).

    The kernel counts that as frozen, the only sleep without signals that it counts so (kernel/fork.c).
    """
    try:
        threads = os.listdir(f"/proc/{pid}/task")
    except OSError:
        return False
    return any(fields[:1] == ["D"] for fields in (stat(pid, thread) for thread in threads))


def capable(capability: int) -> bool:
    """Whether this process has that capability in force (capabilities(7) has the numbers)."""
    return bool(int(read_status(os.getpid())["CapEff"], 16) >> capability & 1)


def descendants(pid: int) -> list[int]:
    """All that a process has started, and what these have, as long as their parents live."""
    pids, parents = [], [pid]
    for parent in parents:
        with contextlib.suppress(OSError):
            for thread in os.listdir(f"/proc/{parent}/task"):
                with open(f"/proc/{parent}/task/{thread}/children", "rb") as file:
                    children = [int(word) for word in file.read().split()]
                pids += children
                parents += children
    return pids


def carrying(variable: str) -> list[int]:
    """Process ids of all, but for this one, that were started with ``NAME=value`` in their environment."""
    prefix = variable.encode()
    pids = [int(entry) for entry in os.listdir("/proc") if entry.isdigit() and int(entry) != os.getpid()]
    return [pid for pid in pids if prefix in _environment(pid).split(b"\0")]


def _environment(pid: int) -> bytes:
    """As proc(5) has it, empty when it may not be read.

    A program that execve(2) has begun has none for a moment: that is waited for.
    """
    last = [""]
    for _ in range(_EXEC_TURNS):
        try:
            with open(f"/proc/{pid}/environ", "rb") as file:
                environment = file.read()
        except OSError:
            return b""
        fields = [] if environment else stat(pid)
        if not fields or fields[0] in "ZX" or int(fields[_FLAGS]) & _KERNEL_THREAD:
            return environment
        span = fields[_ENV_START : _ENV_END + 1]
        if span == last and span[0] == span[1] != "0":
            return b""
        last = span
        time.sleep(1e-3)
    return b""


def inner_pid(pid: int) -> int:
    """The pid in the innermost namespace; 0 when the process is gone."""
    return int(read_status(pid).get("NSpid", "0").split()[-1])


def host_pid(inner: int, candidates: Iterable[int]) -> int:
    """The host's pid of the process with that pid inside; 0 when there is none."""
    return next((pid for pid in candidates if inner_pid(pid) == inner), 0)


def command_line(pid: int) -> str:
    """Its words in one line, or the bare name of a process that has none; empty when it is gone."""
    words = read_file(f"/proc/{pid}/cmdline", short=True)[:4096].replace(b"\0", b" ")
    text = words if words.strip() else read_file(f"/proc/{pid}/comm", short=True)
    return " ".join(text.decode(errors="replace").split())


def who(pid: int) -> str:
    """``command (process 7)``: the command line and the number inside the sandbox."""
    command, inside = command_line(pid).strip(), inner_pid(pid)
    if not inside:
        return f"process {pid}"
    short = command if len(command) <= 60 else command[:57] + "..."
    return f"{short} (process {inside} inside)"


class MemoryMapping(NamedTuple):
    """One line of /proc/PID/maps; ``rights`` as in ``rw-p``, ``path`` empty for memory of its own."""

    start: int
    end: int
    rights: str
    path: str


def mappings(pid: int) -> Iterator[MemoryMapping]:
    """What a process has mapped. Raises OSError when it is gone."""
    with open(f"/proc/{pid}/maps", encoding="utf-8", errors="surrogateescape", newline="\n") as lines:
        for line in lines:
            span, rights, _, _, _, *path = line.rstrip("\n").split(maxsplit=5)
            start, _, end = span.partition("-")
            yield MemoryMapping(
                int(start, 16), int(end, 16), rights, path[0].replace("\\012", "\n") if path else ""
            )


def descriptors(pid: int) -> dict[int, str]:
    """Number and target of every open descriptor."""
    targets = {}
    with contextlib.suppress(OSError):
        for name in os.listdir(f"/proc/{pid}/fd"):
            with contextlib.suppress(OSError):
                targets[int(name)] = os.readlink(f"/proc/{pid}/fd/{name}")
    return targets


def started_by(shell: int, pids: set[int], before: set[int], since: float) -> set[int]:
    """Which of ``pids`` the shell has started since then: what descends from it, and orphans in its session.

    A process that made a session of its own and lost its parent (a daemon) is not the shell's any more.
    """
    table = {process.pid: process for pid in pids if (process := look(pid)) is not None}
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
    with contextlib.ExitStack() as stack:
        waiting: set[int] = set()
        for pid in pids:
            with contextlib.suppress(OSError):
                waiting.add(handle := os.pidfd_open(pid))
                stack.callback(os.close, handle)
        for number, bound in ((signal.SIGINT, bounds[0]), (signal.SIGTERM, bounds[1]), (signal.SIGKILL, 5.0)):
            for handle in waiting:
                with contextlib.suppress(OSError):
                    signal.pidfd_send_signal(handle, number)
            deadline = time.monotonic() + bound
            while waiting and (left := deadline - time.monotonic()) > 0:
                poll = select.poll()
                for handle in waiting:
                    poll.register(handle, select.POLLIN)
                waiting -= {handle for handle, _ in poll.poll(left * 1000)}
            if not waiting:
                return


def kill_carrying(variable: str, timeout: float = 5.0) -> int:
    """SIGKILL to all that `carrying` finds, until nothing does: how many there were."""
    killed: set[int] = set()
    last = time.monotonic() + timeout
    while time.monotonic() < last:
        pids = carrying(variable)
        if not pids:
            break
        for pid in pids:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.kill(pid, signal.SIGKILL)
        killed.update(pids)
        time.sleep(0.01)
    reap(killed)
    return len(killed)


def reap(pids: set[int]) -> set[int]:
    """Wait for those of ``pids`` that are ended children of ours: the ids of these."""
    reaped = set()
    for pid in pids:
        with contextlib.suppress(ChildProcessError):
            if os.waitpid(pid, os.WNOHANG)[0]:
                reaped.add(pid)
    return reaped


def disk_priority(thread: int) -> int:
    """As ioprio_get(2) has it, of a thread by its id on this host. Raises OSError when it is gone."""
    of_thread, call = 1, 252 if platform.machine() == "x86_64" else 31
    return checked(libc.syscall(call, of_thread, thread), "ioprio_get")
