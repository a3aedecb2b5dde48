"""What holds a sandbox together: control groups, or where this user may make none, its pid namespace.

Every process of a sandbox is in the pid namespace of its init, whatever it did (the filter of system calls
refuses to make or enter another), and all of them end with init. So the namespace says what belongs to a
sandbox, and killing init kills it whole. Standing still is SIGSTOP to every process, and a look at every
thread until all have stopped and none was born meanwhile. Which were stopped is written down before it is
done: a process that was stopped already stays so, and what a host that died in between has left can go on.

What differs from a real freezer, as signal(7), wait(2) and ptrace(2) say: a few system calls (epoll_wait, for
one) return early with EINTR when a stopped process goes on, a parent that asks for it may see its children
stop, and a process under a debugger is stopped through that.
"""

from __future__ import annotations

import contextlib
import os
import platform
import re
import signal
import subprocess
import time
from pathlib import Path

from windtunnel.agents.sandbox.errors import MachineError
from windtunnel.agents.sandbox.model import SandboxLimits
from windtunnel.agents.sandbox.place import Home
from windtunnel.base.processes import Adopted, Identity
from windtunnel.linux import cgroup
from windtunnel.linux.processes import stands, stat

INIT = "init"
"""In the sandbox's folder: pid, start in ticks and boot of its init, which init/rootless.h writes."""
STOPPED = "stopped"
"""In the sandbox's folder, while it stands still: the pids that were stopped, one in each line."""
TURN = 0.001
"""Seconds between two looks at processes that are about to stop."""
PAGE = os.sysconf("SC_PAGE_SIZE")


def kernel_version() -> tuple[int, ...]:
    return tuple(map(int, re.findall(r"\d+", platform.release())[:2]))


def counts_inside() -> bool:
    """Whether a limit on processes counts those of the user namespace, and no others of the user."""
    return kernel_version() >= (5, 14)


class Cgroup(cgroup.HostCgroup):
    """The groups ``<mount>/windtunnel-<tag>/<box>`` of one sandbox. Methods raise LinuxError."""

    def __init__(self, tag: str, box: str) -> None:
        super().__init__(Path(f"windtunnel-{tag}") / box)

    def create(self, limits: SandboxLimits) -> list[str]:
        """Make the groups and set the limits; returns, in words, those that could not be set."""
        return self.make(limits.memory, limits.cpus, limits.pids)


class UserProcesses:
    """The processes of one sandbox of this user. It has the methods of ``Cgroup``."""

    procs: tuple[Path, ...] = ()

    def __init__(self, home: Home, box: str) -> None:
        self.path = home.box(box)

    def create(self, limits: SandboxLimits) -> list[str]:
        """Limits that only a control group can hold, in words; the others are put on init when it starts."""
        missed = []
        if limits.memory is not None:
            missed.append("the limit on memory holds for each process, not for all together: that needs root")
        if limits.cpus is not None:
            missed.append("the limit on CPUs is not held: that needs root")
        if limits.pids is not None and not counts_inside():
            missed.append("the limit on processes is not held: before Linux 5.14 that needs root")
        return missed

    def first(self) -> contextlib.AbstractContextManager[None]:
        """Only root can let it go before others."""
        return contextlib.nullcontext()

    def roomy(self) -> contextlib.AbstractContextManager[None]:
        """There is no limit of all processes together, and nothing to be restored."""
        return contextlib.nullcontext()

    def init(self) -> int:
        """Host pid of init; 0 when it does not run."""
        init = self._init()
        return init.pid if init is not None else 0

    def _init(self) -> Adopted | None:
        try:
            init = Adopted(Identity.parse((self.path / INIT).read_text()))
        except (OSError, ValueError):
            return None
        return init if init.identity.lives() else None

    def pids(self) -> set[int]:
        """Host pids of all processes inside, now."""
        pids: set[int] = set()
        if not (init := self.init()):
            return pids
        own = os.geteuid()
        with contextlib.suppress(OSError), os.scandir("/proc") as entries:
            namespace = os.stat(f"/proc/{init}/ns/pid").st_ino
            for entry in entries:
                if entry.name.isdecimal():
                    # gone meanwhile, or another user's
                    with contextlib.suppress(OSError):
                        mine = entry.stat().st_uid == own
                        if mine and os.stat(f"{entry.path}/ns/pid").st_ino == namespace:
                            pids.add(int(entry.name))
        return pids

    def freeze(self, timeout: float = 10.0) -> None:
        """Stop every process, and return when all stand. Raises MachineError when that takes too long, and
        OSError; all go on then."""
        deadline = time.monotonic() + timeout
        before: set[int] | None = None
        stopped: set[int] = set()
        try:
            with open(self.path / STOPPED, "a", encoding="ascii") as note:
                while True:
                    now = self.pids()
                    running = {pid for pid in now if not stands(pid)}
                    if not running and now == before:
                        return
                    before = now
                    # parents before children, as a rule, so that few see a child stop
                    for pid in sorted(running - stopped):
                        note.write(f"{pid}\n")
                        note.flush()
                        with contextlib.suppress(ProcessLookupError):
                            os.kill(pid, signal.SIGSTOP)
                    stopped |= running
                    if time.monotonic() > deadline:
                        raise MachineError("the sandbox could not be frozen: a process does not stop")
                    if running:
                        time.sleep(TURN)
        except (OSError, MachineError):
            self.thaw()
            raise

    def thaw(self) -> None:
        """Let go on what ``freeze`` stopped, of this host's process or of one before it."""
        note = self.path / STOPPED
        try:
            stopped = [int(line) for line in note.read_text(encoding="ascii").split()]
        except (OSError, ValueError):
            return
        inside = self.pids()
        for pid in (pid for pid in reversed(stopped) if pid in inside):
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGCONT)
        note.unlink(missing_ok=True)

    def kill(self, timeout: float = 30.0) -> None:
        """Kill everything inside, stopped or not, and return when nothing is left."""
        if (init := self._init()) is None:
            return
        init.kill()
        try:
            # init ends last: when it has, the kernel has ended and reaped everything inside
            init.wait(timeout)
        except subprocess.TimeoutExpired:
            words = f"processes {sorted(self.pids())} of the sandbox do not die (they wait for a device)"
            raise MachineError(words) from None

    def remove(self) -> None:
        """Forget who init was; what is gone already is fine."""
        for name in (INIT, f"{INIT}.part", STOPPED):
            (self.path / name).unlink(missing_ok=True)

    def usage(self) -> tuple[float, int]:
        """No CPU seconds, which nobody counts, and bytes of memory held now (what several processes share
        counts for each)."""
        return 0.0, PAGE * sum(int(fields[21]) for fields in map(stat, self.pids()) if fields)
