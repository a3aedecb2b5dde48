"""How much memory slots may still take on this host: whatever gives out first.

A tmpfs file takes room of its file system, of the host's memory, and of the control group of who touches
it. Reaching the first is an error that one can handle, the other two end in a killed process: so all are
asked before.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path


def free(folder: Path) -> tuple[int, str]:
    """Bytes that slots in ``folder`` may still take, and what bounds them, in words."""
    return min(_bounds(folder))


def _bounds(folder: Path) -> Iterator[tuple[int, str]]:
    state = os.statvfs(folder)
    yield state.f_bavail * state.f_frsize, f"free in the file system of {folder}"
    yield _available(), "MemAvailable of the host"
    yield from _groups()


def _available() -> int:
    with open("/proc/meminfo") as file:
        for line in file:
            if line.startswith("MemAvailable:"):
                return int(line.split()[1]) * 1024
    return 1 << 62


def _groups() -> Iterator[tuple[int, str]]:
    """Head room in the control group of this process and those above it (version 2)."""
    try:
        lines = Path("/proc/self/cgroup").read_text().splitlines()
    except OSError:
        return
    for line in lines:
        if not line.startswith("0::"):
            continue
        group = Path("/sys/fs/cgroup") / line[3:].strip("/")
        for at in (group, *group.parents):
            if at == Path("/sys/fs"):
                break
            try:
                most = (at / "memory.max").read_text().strip()
                now = int((at / "memory.current").read_text())
            except (OSError, ValueError):
                continue
            if most != "max":
                yield max(0, int(most) - now), f"left of memory.max of the control group {at}"
