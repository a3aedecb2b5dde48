"""What /proc tells of the processes of a sandbox: which there are, whether they ran, what they have open."""

from __future__ import annotations

import array
import contextlib
import fcntl
import os
import stat
import termios
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from windtunnel.agents.sandbox.live.place import CHANNEL
from windtunnel.linux.processes import TICKS
from windtunnel.linux.system import copied_descriptor

_CHANNEL = f"/{CHANNEL}/"
Descriptors = frozenset[tuple[str, str, int]]
"""Number, target, and what waits there or where it stands: in a form that compares."""


@dataclass(frozen=True)
class Alive:
    """One process at one moment. ``ran`` differs when any of its threads ran in between."""

    pid: int
    started: int
    command: str
    state: str
    cpu: float
    ran: tuple[int, ...]


def _read(path: str) -> bytes:
    fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        return os.read(fd, 1 << 16)
    finally:
        os.close(fd)


def alive(pid: int) -> Alive | None:
    """None: it ended, or is a zombie."""
    try:
        line = _read(f"/proc/{pid}/stat")
        opened, closed = line.index(b"("), line.rindex(b")")
        words = line[closed + 2 :].split()
        if words[0] in (b"Z", b"X"):
            return None
        threads = [str(pid)] if words[17] == b"1" else os.listdir(f"/proc/{pid}/task")
        ran = [int(words[11]), int(words[12]), len(threads)]
        for thread in threads:
            ran.extend(_ran(pid, thread))
    except (OSError, ValueError, IndexError):
        return None
    command = line[opened + 1 : closed].decode(errors="replace")
    cpu = (int(words[11]) + int(words[12])) / TICKS
    return Alive(pid, int(words[19]), command, words[0].decode(), cpu, tuple(ran))


def _ran(pid: int, thread: str) -> list[int]:
    """Nanoseconds that a thread ran, or where the kernel does not count them, how often it was switched."""
    try:
        return [int(_read(f"/proc/{pid}/task/{thread}/schedstat").split()[0])]
    except FileNotFoundError:
        lines = _read(f"/proc/{pid}/task/{thread}/status").splitlines()
        return [int(line.split()[1]) for line in lines if b"ctxt_switches" in line]


def opened(pid: int, seen: Callable[[str], str], *, positions: bool = False) -> Descriptors:
    """What a process has open: number and target of each descriptor, with the bytes that wait in a pipe or
    socket and, on request, the position in a regular file. The channel's own files do not count."""
    found: list[tuple[str, str, int]] = []
    with contextlib.suppress(OSError):
        pidfd = os.pidfd_open(pid)
        try:
            for number in os.listdir(f"/proc/{pid}/fd"):
                with contextlib.suppress(OSError):
                    target = seen(os.readlink(f"/proc/{pid}/fd/{number}"))
                    if target.startswith(_CHANNEL):
                        continue
                    waiting = 0
                    if target.startswith(("pipe:", "socket:")):
                        waiting = _waiting(pidfd, int(number))
                    elif positions and target.startswith("/") and not target.startswith("/dev/"):
                        waiting = _position(pid, number)
                    found.append((number, target, waiting))
        finally:
            os.close(pidfd)
    return frozenset(found)


def _waiting(pidfd: int, number: int) -> int:
    """Bytes that wait to be read from a pipe or socket of another process; -1: not known."""
    try:
        fd = copied_descriptor(pidfd, number)
    except OSError:
        return -1
    try:
        count = array.array("i", [0])
        fcntl.ioctl(fd, termios.FIONREAD, count)
        return count[0]
    except OSError:
        return -1
    finally:
        os.close(fd)


def _position(pid: int, number: str) -> int:
    mode = os.stat(f"/proc/{pid}/fd/{number}").st_mode
    return int(_read(f"/proc/{pid}/fdinfo/{number}").split()[1]) if stat.S_ISREG(mode) else 0


def shared(pid: int, seen: Callable[[str], str]) -> list[str]:
    """Files of the sandbox that a process has mapped shared and writable."""
    found = []
    with contextlib.suppress(OSError):
        for line in Path(f"/proc/{pid}/maps").read_text(errors="surrogateescape").splitlines():
            words = line.split(maxsplit=5)
            if words[1][1] == "w" and words[1][3] == "s" and len(words) == 6:
                path = seen(_plain(words[5]))
                if path.endswith(" (deleted)"):
                    continue
                if path.startswith("/") and not path.startswith(("/dev/", "/memfd:", "/SYSV", _CHANNEL)):
                    found.append(path)
    return found


def referred(pid: int, seen: Callable[[str], str]) -> tuple[set[str], set[str]]:
    """All paths inside that a process refers to, and those whose size a restore insists on.

    These are the mapped ones, and open regular files, except those that are open for appending alone (CRIU,
    files-reg.c: the size is compared for whoever may read, or write at a position).
    """
    mapped: set[str] = set()
    others: set[str] = set()
    with contextlib.suppress(OSError):
        text = Path(f"/proc/{pid}/maps").read_text(errors="surrogateescape")
        mapped = {line[at:] for line in text.splitlines() if (at := line.find("/")) > 0}
        folder = f"/proc/{pid}/fd"
        links = [f"{folder}/{number}" for number in os.listdir(folder)]
        for link in (*links, f"/proc/{pid}/cwd", f"/proc/{pid}/exe", f"/proc/{pid}/root"):
            with contextlib.suppress(OSError):
                others.add(path := os.readlink(link))
                if link in links and path.startswith("/") and not _appends_or_other(pid, link):
                    mapped.add(path)
    mapped_inside = _inside({_plain(path) for path in mapped}, seen)
    return mapped_inside | _inside(others, seen), mapped_inside


def _appends_or_other(pid: int, link: str) -> bool:
    """Whether a descriptor is no regular file, or one that is open for appending alone."""
    if not stat.S_ISREG(os.stat(link).st_mode):
        return True
    flags = int(_read(f"/proc/{pid}/fdinfo/{link.rpartition('/')[2]}").split(b"flags:")[1].split()[0], 8)
    return flags & os.O_ACCMODE == os.O_WRONLY and bool(flags & os.O_APPEND)


def _inside(paths: set[str], seen: Callable[[str], str]) -> set[str]:
    """Those that are files of the root. A file that is deleted keeps its name here: should it be made anew,
    the image would find the wrong one."""
    plain = {seen(path.removesuffix(" (deleted)")) for path in paths if path.startswith("/")}
    return {
        path
        for path in plain
        if not path.startswith(("/dev/", "/proc/", "/sys/", "/memfd:", "/SYSV", _CHANNEL))
        and path not in ("/dev", "/proc", "/sys")
    }


def _plain(path: str) -> str:
    return path.replace("\\012", "\n") if "\\012" in path else path
