"""What identifies a process: its id alone may be reused, and its start counts from the host's boot."""

from __future__ import annotations

import os
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
