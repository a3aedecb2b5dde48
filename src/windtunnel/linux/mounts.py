"""Mounts and loop devices without a process of their own.

A helper program costs several milliseconds and a fork of a large process; a system call costs microseconds.
Every function raises ``OSError`` as ``os`` does.

Source: mount(2), umount2(2), loop(4), proc(5) for the fields of ``mountinfo``.
"""

from __future__ import annotations

import ctypes
import errno
import os
import re
import struct
from dataclasses import dataclass
from pathlib import Path

from windtunnel.linux.system import checked, ioctl, libc, opened

MS_RDONLY, MS_NOSUID, MS_NODEV, MS_NOEXEC, MS_REMOUNT = 0x1, 0x2, 0x4, 0x8, 0x20
MS_NOATIME, MS_BIND, MS_PRIVATE = 0x400, 0x1000, 0x40000
MNT_DETACH, UMOUNT_NOFOLLOW = 0x2, 0x8

libc.mount.argtypes = (ctypes.c_char_p,) * 3 + (ctypes.c_ulong, ctypes.c_char_p)
libc.umount2.argtypes = (ctypes.c_char_p, ctypes.c_int)
_GET_FREE, _CONFIGURE, _GET_STATUS = 0x4C82, 0x4C0A, 0x4C05
_AUTOCLEAR = 4


@dataclass(frozen=True)
class MountEntry:
    """One line of ``mountinfo``: where, what kind, and which part of which file system."""

    device: int
    """As the kernel keeps it: major and minor in one number."""
    root: str
    """What of its file system is mounted."""
    point: str
    kind: str
    source: str
    options: str
    """Of the file system, as it was mounted."""
    flags: frozenset[str]
    """Of this mount: ``ro`` or ``rw``, ``nosuid``, ``noexec``, …"""


def mount(source: str, target: Path, kind: str = "none", flags: int = 0, options: str = "") -> None:
    data = options.encode() or None
    checked(libc.mount(os.fsencode(source), os.fsencode(target), kind.encode(), flags, data), str(target))


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


def unmount(target: Path) -> bool:
    """Take off the topmost mount at ``target``; False where nothing is mounted. Lazily when it is busy."""
    name = os.fsencode(target)
    if libc.umount2(name, UMOUNT_NOFOLLOW) == 0:
        return True
    code = ctypes.get_errno()
    if code in (errno.EINVAL, errno.ENOENT):
        return False
    if code == errno.EBUSY:
        checked(libc.umount2(name, UMOUNT_NOFOLLOW | MNT_DETACH), str(target))
        return True
    raise OSError(code, os.strerror(code), str(target))


def table(of: Path = Path("/proc/self/mountinfo")) -> list[MountEntry]:
    """All mounts that a process sees, this one or another, in the order in which they cover each other."""
    mounts = []
    with open(of, encoding="utf-8", errors="surrogateescape", newline="\n") as lines:
        for line in lines:
            fields, _, rest = line.rstrip("\n").partition(" - ")
            _, _, device, root, point, flags, *_ = fields.split(" ")
            kind, source, options = rest.split(" ", 2)
            major, _, minor = device.partition(":")
            number = int(major) << 20 | int(minor)
            own = frozenset(flags.split(","))
            mounts.append(MountEntry(number, _plain(root), _plain(point), kind, _plain(source), options, own))
    return mounts


def mount_id(path: Path) -> int:
    """The mount in which ``path`` lies, as in ``mountinfo``."""
    with (
        opened(path, os.O_PATH) as descriptor,
        open(f"/proc/self/fdinfo/{descriptor}", encoding="ascii") as lines,
    ):
        return next(int(line.split()[1]) for line in lines if line.startswith("mnt_id:"))


def is_point(path: Path) -> bool:
    """Whether ``path`` is a mount of its own: cheaper than reading all mounts, and right for binds too."""
    try:
        return mount_id(path) != mount_id(path.parent)
    except FileNotFoundError:
        return False


def at(point: Path) -> list[MountEntry]:
    wanted = str(point)
    return [each for each in table() if each.point == wanted]


def _plain(field: str) -> str:
    """Octal escapes of ``mountinfo`` (space, tab, newline, backslash) undone."""
    return re.sub(r"\\([0-7]{3})", lambda escape: chr(int(escape[1], 8)), field) if "\\" in field else field


def loop_of(image: Path) -> tuple[int, str] | None:
    """The open loop device that ``image`` backs already, and its name."""
    wanted = os.stat(image)
    for entry in Path("/sys/block").glob("loop*/loop/backing_file"):
        name = f"/dev/{entry.parent.parent.name}"
        try:
            device = os.open(name, os.O_RDWR | os.O_CLOEXEC)
        except OSError:
            continue
        status = ctypes.create_string_buffer(232)
        try:
            ioctl(device, _GET_STATUS, status)
            if struct.unpack_from("=QQ", status) == (wanted.st_dev, wanted.st_ino):
                return device, name
        except OSError:
            pass
        os.close(device)
    return None


def attach_loop(image: Path) -> tuple[int, str]:
    """A free loop device over ``image``, open: it clears itself when the last holder closes it."""
    backing = os.open(image, os.O_RDWR | os.O_CLOEXEC)
    try:
        control = os.open("/dev/loop-control", os.O_RDWR | os.O_CLOEXEC)
        try:
            for _ in range(64):
                free = ioctl(control, _GET_FREE, 0)
                name = f"/dev/loop{free}"
                device = os.open(name, os.O_RDWR | os.O_CLOEXEC)
                # fd, block size, then loop_info64 whose flags lie at its byte 52
                request = struct.pack("=II", backing, 4096) + struct.pack("=52xI", _AUTOCLEAR).ljust(
                    232, b"\0"
                )
                try:
                    ioctl(device, _CONFIGURE, ctypes.create_string_buffer(request.ljust(304, b"\0"), 304))
                except OSError as error:
                    os.close(device)
                    if error.errno != errno.EBUSY:
                        raise
                    continue
                return device, name
        finally:
            os.close(control)
    finally:
        os.close(backing)
    raise OSError(errno.EBUSY, "other programs took every loop device that was free", str(image))
