"""Everything that can be seen of a sandbox at one moment, as plain data that can be compared.

A file tree is read without trusting it: what may run in it is not ours. No symbolic link is followed, no FIFO
or device is opened, a directory is entered only through the descriptor of its parent, and other file systems
are left alone.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import stat
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from windtunnel.agents.sandbox.traces.replay import Output, Runs
from windtunnel.linux.processes import descriptors as open_descriptors

LISTENING = "0A"


@dataclass(frozen=True)
class Observation:
    """``outputs``: of the turns so far. ``tree``: path to digest. ``processes``: command lines, sorted.
    ``probes``: what live services answer. ``ports``: TCP ports that are listened on.

    The last three are for the referee alone, because they differ between two runs: ``pids`` ("pid command"),
    ``shells`` (name to fingerprint of its state), ``descriptors`` (process to what it has open, and where in
    it).
    """

    outputs: tuple[Output, ...] = ()
    tree: Mapping[str, str] = field(default_factory=dict)
    processes: tuple[str, ...] = ()
    probes: Mapping[str, str] = field(default_factory=dict)
    ports: tuple[int, ...] = ()
    pids: frozenset[str] = frozenset()
    shells: Mapping[str, str] = field(default_factory=dict)
    descriptors: Mapping[str, tuple[str, ...]] = field(default_factory=dict)


def observe(
    box: Any,
    root: Path,
    *,
    outputs: Iterable[Output] = (),
    probes: Mapping[str, str] | None = None,
    processes: Callable[[], Sequence[str]] | None = None,
    pids: Mapping[int, str] | None = None,
    shells: Mapping[str, str] | None = None,
    only: Iterable[str] = (),
    ports: bool = True,
) -> Observation:
    """Look at a sandbox that is between two turns.

    ``root``: where the host sees its root. ``processes``: tells the command lines; by default the sandbox's
    own ``info()`` does. ``pids``: host pids and their commands, for the referee; their descriptors are read
    from the host's /proc. ``ports``: also look at the ports inside. Files come first and probes last, because
    a probe runs a command.
    """
    files = tree(root, only)
    commands = sorted(processes() if processes is not None else box.info().processes)
    known = dict(pids or {})
    opened = {f"{pid} {command}": descriptors(pid) for pid, command in known.items()}
    listened = open_ports(box) if ports else ()
    answers = {name: answer(box, text) for name, text in (probes or {}).items()}
    return Observation(
        outputs=tuple(outputs),
        tree=files,
        processes=tuple(commands),
        probes=answers,
        ports=listened,
        pids=frozenset(opened),
        shells=dict(shells or {}),
        descriptors=opened,
    )


def answer(box: Runs, text: str) -> str:
    """What a probe prints, with how it ended."""
    result = box.run(text, timeout=30.0)
    return f"{result.exit_code} {result.stdout.decode(errors='replace')}"


def open_ports(box: Runs) -> tuple[int, ...]:
    """TCP ports that are listened on in the sandbox's network namespace."""
    result = box.run("cat /proc/net/tcp /proc/net/tcp6 2>/dev/null", timeout=30.0)
    return listening(result.stdout.decode(errors="replace"))


def listening(table: str) -> tuple[int, ...]:
    """Ports in state LISTEN of the kernel's table of TCP sockets."""
    ports = set()
    for line in table.splitlines():
        words = line.split()
        if len(words) > 3 and words[3] == LISTENING:
            ports.add(int(words[1].rsplit(":", 1)[1], 16))
    return tuple(sorted(ports))


def descriptors(pid: int) -> tuple[str, ...]:
    """What a process has open, with the position in regular files; empty when it is gone."""
    found = []
    for fd, target in sorted(open_descriptors(pid).items()):
        place = ""
        if target.startswith("/") and not target.startswith(("/dev/", "/proc/")):
            with contextlib.suppress(OSError), open(f"/proc/{pid}/fdinfo/{fd}") as info:
                place = " at " + info.readline().split()[1]
        found.append(f"{fd} {target}{place}")
    return tuple(found)


CHANNEL = ".windtunnel"
DEEPEST = 200
BLOCK = 2**20
_ZEROS = bytes(BLOCK)


def tree(root: Path, only: Iterable[str] = ()) -> dict[str, str]:
    """Path inside (absolute) to a digest of its kind, mode, owner, link target or bytes, and attributes.

    Left out: the sandbox's own channel, and ``.git/index`` (it caches times). ``only``: top-level names to
    read; empty for all. Times of files do not count.
    """
    found: dict[str, str] = {}
    fd = os.open(root, os.O_RDONLY | os.O_DIRECTORY)
    try:
        _walk(fd, "", os.fstat(fd).st_dev, found, frozenset(only), 0)
    finally:
        os.close(fd)
    return found


def digest(entries: dict[str, str]) -> str:
    """One hash over a whole tree."""
    total = hashlib.blake2b(digest_size=16)
    for path, entry in sorted(entries.items()):
        total.update(f"{path}\0{entry}\0".encode("utf-8", "surrogateescape"))
    return total.hexdigest()


def _walk(fd: int, path: str, device: int, found: dict[str, str], only: frozenset[str], depth: int) -> None:
    for name in sorted(os.listdir(fd)):
        inside = f"{path}/{name}"
        if depth == 0 and (name == CHANNEL or (only and name not in only)):
            continue
        if inside.endswith("/.git/index"):
            continue
        try:
            _entry(fd, name, inside, device, found, depth)
        except FileNotFoundError:
            continue  # gone since the directory was read: it is not in the tree


def _entry(parent: int, name: str, inside: str, device: int, found: dict[str, str], depth: int) -> None:
    info = os.stat(name, dir_fd=parent, follow_symlinks=False)
    kind = stat.S_IFMT(info.st_mode)
    about = f"{info.st_mode:o} {info.st_uid}:{info.st_gid}"
    if kind == stat.S_IFLNK:
        found[inside] = f"{about} -> {os.readlink(name, dir_fd=parent)}"
    elif kind in (stat.S_IFREG, stat.S_IFDIR):
        flags = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
        try:
            fd = os.open(name, flags, dir_fd=parent)
        except OSError as fault:
            found[inside] = f"{about} unreadable: {fault.strerror}"
            return
        try:
            opened = os.fstat(fd)
            if stat.S_IFMT(opened.st_mode) != kind:
                found[inside] = f"{about} changed while it was read"
            elif kind == stat.S_IFREG:
                found[inside] = f"{about} {opened.st_nlink} {_bytes(fd, opened.st_size)}{_attributes(fd)}"
            else:
                found[inside] = f"{about}{_attributes(fd)}"
                if opened.st_dev == device and depth < DEEPEST:
                    _walk(fd, inside, device, found, frozenset(), depth + 1)
        finally:
            os.close(fd)
    elif kind in (stat.S_IFCHR, stat.S_IFBLK):
        found[inside] = f"{about} device {os.major(info.st_rdev)}:{os.minor(info.st_rdev)}"
    else:
        found[inside] = about


def _bytes(fd: int, size: int) -> str:
    """Digest of the bytes; holes are skipped, and equal to zeros that are written out."""
    total = hashlib.blake2b(f"{size}".encode(), digest_size=16)
    place = 0
    while place < size:
        try:
            place = os.lseek(fd, place, os.SEEK_DATA)
        except OSError:
            break  # a hole up to the end
        place -= place % BLOCK
        block = os.pread(fd, BLOCK, place)
        if not block:
            break
        if block != _ZEROS[: len(block)]:
            total.update(place.to_bytes(8, "little") + block)
        place += BLOCK
    return total.hexdigest()


def _attributes(fd: int) -> str:
    try:
        names = sorted(os.listxattr(fd))
        return "".join(f" {name}={os.getxattr(fd, name).hex()}" for name in names)
    except OSError:
        return ""  # a file system without extended attributes
