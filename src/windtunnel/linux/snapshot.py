"""What processes are and have open, read from /proc once, as the text that it is there.

Who takes it while the processes stand still can answer many questions by it that all are of one moment.

Source: proc(5).
"""

from __future__ import annotations

import os
import stat
from collections.abc import Iterable
from dataclasses import dataclass
from typing import NamedTuple

LINKS = ("cwd", "root", "exe")


class Descriptor(NamedTuple):
    """An open descriptor: where its link in /proc leads, its ``fdinfo``, and the kind of its file, as
    ``st_mode`` has it."""

    link: str
    info: str
    mode: int

    @property
    def regular(self) -> bool:
        return stat.S_ISREG(self.mode)

    @property
    def flags(self) -> int:
        """As of open(2), with those that were set since."""
        _, _, rest = self.info.partition("flags:")
        return int(rest.split(maxsplit=1)[0], 8) if rest else 0

    @property
    def position(self) -> int:
        _, _, rest = self.info.partition("pos:")
        return int(rest.split(maxsplit=1)[0]) if rest else 0


@dataclass(frozen=True)
class SnapshotProcess:
    """``inner``: its pid in the innermost namespace. ``links``: its working folder, root and program, empty
    where they cannot be told. ``maps``: the paths that it has mapped."""

    pid: int
    inner: int
    status: dict[str, str]
    links: dict[str, str]
    descriptors: dict[int, Descriptor]
    maps: frozenset[str]


def read_file(path: str, *, short: bool = False) -> bytes:
    """A whole file of /proc; empty when it, or the process, is gone. ``short``: one that the kernel gives at
    once."""
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    except OSError:
        return b""
    try:
        content = os.read(descriptor, 1 << 16)
        while content and not short and (more := os.read(descriptor, 1 << 20)):
            content += more
        return content
    except OSError:
        return b""
    finally:
        os.close(descriptor)


def read_status(pid: int, thread: int | str = "") -> dict[str, str]:
    """``/proc/PID/status`` by name, or that of one of its threads; empty when it is gone."""
    path = f"/proc/{pid}/task/{thread}/status" if thread else f"/proc/{pid}/status"
    lines = read_file(path).decode(errors="replace").split("\n")
    return {
        name: value.strip() for name, separator, value in (line.partition(":") for line in lines) if separator
    }


def read_link(path: str) -> str:
    """Where a link of /proc leads; empty when that is gone."""
    try:
        return os.readlink(path)
    except OSError:
        return ""


def read_descriptors(pid: int) -> dict[int, Descriptor]:
    """All that a process has open, by number; nothing of one that is gone."""
    folder = f"/proc/{pid}/fd"
    try:
        numbers = sorted(map(int, os.listdir(folder)))
    except OSError:
        return {}
    descriptors = {}
    for number in numbers:
        path = f"{folder}/{number}"
        if link := read_link(path):
            info = read_file(f"/proc/{pid}/fdinfo/{number}").decode()
            try:
                mode = os.stat(path).st_mode if link.startswith("/") else 0
            except OSError:
                mode = 0
            descriptors[number] = Descriptor(link, info, mode)
    return descriptors


def read_process(pid: int) -> SnapshotProcess | None:
    """All of one process; None when it is gone."""
    status = read_status(pid)
    if "NSpid" not in status:
        return None
    maps = read_file(f"/proc/{pid}/maps").decode(errors="surrogateescape")
    return SnapshotProcess(
        pid,
        int(status["NSpid"].split()[-1]),
        status,
        {name: read_link(f"/proc/{pid}/{name}") for name in LINKS},
        read_descriptors(pid),
        frozenset(
            line[at:].replace("\\012", "\n") for line in maps.split("\n") if (at := line.find("/")) > 0
        ),
    )


def read_snapshot(pids: Iterable[int]) -> tuple[SnapshotProcess, ...]:
    """Those processes that are there, in the order of their pids inside."""
    present = filter(None, map(read_process, pids))
    return tuple(sorted(present, key=lambda process: process.inner))
