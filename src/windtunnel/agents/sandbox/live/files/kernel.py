"""Mounts and ioctls without a process of their own: the few system calls that Python's ``os`` lacks.

A helper program costs several milliseconds and a fork of a large process; an ioctl costs microseconds. Every
function raises ``OSError`` as ``os`` does, so that callers can tell a full disk from a missing permission.

Source: mount(2), umount2(2), ioctl(2), proc(5) for the fields of ``mountinfo``.
"""

from __future__ import annotations

import ctypes
import errno
import fcntl
import os
import re
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

MS_RDONLY, MS_NOSUID, MS_NODEV, MS_REMOUNT = 0x1, 0x2, 0x4, 0x20
MS_NOATIME, MS_BIND, MS_PRIVATE = 0x400, 0x1000, 0x40000
MNT_DETACH, UMOUNT_NOFOLLOW = 0x2, 0x8

_libc = ctypes.CDLL(None, use_errno=True)
_libc.mount.argtypes = (ctypes.c_char_p,) * 3 + (ctypes.c_ulong, ctypes.c_char_p)
_libc.umount2.argtypes = (ctypes.c_char_p, ctypes.c_int)
_libc.ioctl.argtypes = (ctypes.c_int, ctypes.c_ulong, ctypes.c_void_p)


@dataclass(frozen=True)
class Mount:
    """One line of ``mountinfo``: where, what kind, and which part of which file system."""

    id: int
    parent: int
    point: str
    kind: str
    root: str
    source: str


def _checked(result: int, what: str) -> int:
    if result < 0:
        code = ctypes.get_errno()
        raise OSError(code, os.strerror(code), what)
    return result


def ioctl(
    descriptor: int, request: int, argument: int | ctypes.Structure | ctypes.Array[ctypes.c_char]
) -> int:
    """``ioctl(2)`` whose argument is a number or is read and written in place."""
    given = ctypes.c_void_p(argument) if isinstance(argument, int) else ctypes.byref(argument)
    return _checked(_libc.ioctl(descriptor, request, given), f"ioctl {request:#x}")


def mount(source: str, target: Path, kind: str = "none", flags: int = 0, options: str = "") -> None:
    data = options.encode() or None
    _checked(_libc.mount(os.fsencode(source), os.fsencode(target), kind.encode(), flags, data), str(target))


def bind(source: Path, target: Path, flags: int = 0) -> None:
    """Make ``source`` visible at ``target``; what is mounted there later stays in this mount namespace."""
    mount(str(source), target, flags=MS_BIND)
    try:
        mount("none", target, flags=MS_PRIVATE)
        if flags:
            mount("none", target, flags=MS_REMOUNT | MS_BIND | flags)
    except OSError:
        unmount(target)
        raise


def unmount(target: Path, *, lazy: bool = True) -> bool:
    """Take off the topmost mount at ``target``; False where nothing is mounted. Lazily when it is busy."""
    name = os.fsencode(target)
    if _libc.umount2(name, UMOUNT_NOFOLLOW) == 0:
        return True
    code = ctypes.get_errno()
    if code in (errno.EINVAL, errno.ENOENT):
        return False
    if code == errno.EBUSY and lazy:
        _checked(_libc.umount2(name, UMOUNT_NOFOLLOW | MNT_DETACH), str(target))
        return True
    raise OSError(code, os.strerror(code), str(target))


def mounts() -> list[Mount]:
    """All mounts that this process sees, in the order in which they cover each other."""
    found = []
    with open("/proc/self/mountinfo", encoding="utf-8", errors="surrogateescape") as lines:
        for line in lines:
            fields, _, rest = line.rstrip("\n").partition(" - ")
            first, last = fields.split(" "), rest.split(" ")
            found.append(
                Mount(
                    int(first[0]), int(first[1]), _plain(first[4]), last[0], _plain(first[3]), _plain(last[1])
                )
            )
    return found


def mount_id(path: Path) -> int:
    """The mount in which ``path`` lies, as in ``mountinfo``."""
    with opened(path, os.O_PATH) as given, open(f"/proc/self/fdinfo/{given}", encoding="ascii") as lines:
        return next(int(line.split()[1]) for line in lines if line.startswith("mnt_id:"))


def mounts_at(point: Path) -> list[Mount]:
    wanted = str(point)
    return [each for each in mounts() if each.point == wanted]


def mounts_under(folder: Path) -> list[Mount]:
    prefix = f"{folder}/"
    return [each for each in mounts() if each.point.startswith(prefix)]


def _plain(field: str) -> str:
    """Octal escapes of ``mountinfo`` (space, tab, newline, backslash) undone."""
    return re.sub(r"\\([0-7]{3})", lambda found: chr(int(found[1], 8)), field)


@contextmanager
def opened(path: Path, flags: int = os.O_RDONLY) -> Iterator[int]:
    descriptor = os.open(path, flags | os.O_CLOEXEC)
    try:
        yield descriptor
    finally:
        os.close(descriptor)


@contextmanager
def locked(path: Path) -> Iterator[None]:
    """Alone among all processes that lock the same file or folder; a file is made when absent.

    The kernel gives the lock back when the process dies, so no stale lock can stay behind.
    """
    if path.is_dir():
        descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    else:
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX)
        yield
    finally:
        os.close(descriptor)


def sync_file_system(folder: Path) -> None:
    """All written data of the file system that holds ``folder`` is on the disk."""
    with opened(folder) as given:
        _checked(_libc.syncfs(given), str(folder))
