"""What identifies a process: its id alone may be reused, and its start counts from the host's boot."""

from __future__ import annotations

import contextlib
import os
import select
import signal
import subprocess
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path


def start_time(pid: int) -> int | None:
    """When a process was started, in clock ticks since boot (proc(5)); None if it is gone or a zombie."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_bytes().rpartition(b")")[2].split()
    except OSError:
        return None
    return None if not fields or fields[0] in (b"Z", b"X") else int(fields[19])


def boot_id() -> str:
    """What the kernel calls this boot of the host; "" if it does not tell."""
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    except OSError:
        return ""


@dataclass(frozen=True)
class Identity:
    """One process, never another that got its id. As text: ``PID START BOOT``."""

    pid: int
    started: int
    boot: str

    @classmethod
    def of(cls, pid: int) -> Identity | None:
        """None when there is no such process."""
        started = start_time(pid)
        return None if started is None else cls(pid, started, boot_id())

    @classmethod
    def own(cls) -> Identity:
        return cls(os.getpid(), start_time(os.getpid()) or 0, boot_id())

    @classmethod
    def parse(cls, text: str) -> Identity:
        """Raises ValueError when it is none."""
        pid, started, boot = text.split()
        return cls(int(pid), int(started), boot)

    def lives(self) -> bool:
        return start_time(self.pid) == self.started and self.boot == boot_id()

    def __str__(self) -> str:
        return f"{self.pid} {self.started} {self.boot}"


@dataclass(frozen=True)
class Adopted:
    """A process that another one started, which may be gone: what `subprocess.Popen` offers, as far as a
    stranger can; its exit status is nobody's to know (-1)."""

    identity: Identity

    @property
    def pid(self) -> int:
        return self.identity.pid

    def poll(self) -> int | None:
        """None while it lives."""
        return None if self.identity.lives() else -1

    def wait(self, timeout: float | None = None) -> int:
        """Raises subprocess.TimeoutExpired when it lives longer than ``timeout`` seconds."""
        with contextlib.suppress(ProcessLookupError), self._handle() as handle:
            poll = select.poll()  # select(2) takes no descriptor from 1,024 on
            poll.register(handle, select.POLLIN)
            if self.identity.lives() and not poll.poll(None if timeout is None else 1000 * timeout):
                raise subprocess.TimeoutExpired(str(self.pid), timeout or 0.0)
        return -1

    def terminate(self) -> None:
        self._signal(signal.SIGTERM)

    def kill(self) -> None:
        self._signal(signal.SIGKILL)

    def _signal(self, number: int) -> None:
        with contextlib.suppress(ProcessLookupError), self._handle() as handle:
            if self.identity.lives():
                signal.pidfd_send_signal(handle, number)

    @contextlib.contextmanager
    def _handle(self) -> Iterator[int]:
        """Its pidfd. Raises ProcessLookupError when there is no such process."""
        handle = os.pidfd_open(self.pid)
        try:
            yield handle
        finally:
            os.close(handle)


def add_owner(file: Path, owner: Identity) -> None:
    """One more process that what ``file`` stands for belongs to."""
    with file.open("a") as output:
        output.write(f"{owner}\n")


def owned(file: Path) -> bool:
    """Whether any of the owners lives that `add_owner` wrote down.

    Raises:
        OSError, ValueError: it cannot be read, or is no such file.
    """
    return any(Identity.parse(line).lives() for line in file.read_text().splitlines())
