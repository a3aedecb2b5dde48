"""The few system calls that Python's ``os`` lacks, and one C library handle for all that make them.

Every function raises ``OSError`` as ``os`` does, so that callers tell a full disk from a missing permission.
"""

from __future__ import annotations

import ctypes
import errno
import fcntl
import os
import platform
import shutil
import signal
import struct
import subprocess
import termios
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path

libc = ctypes.CDLL(None, use_errno=True)
libc.fallocate.argtypes = (ctypes.c_int, ctypes.c_int, ctypes.c_long, ctypes.c_long)
libc.ioctl.argtypes = (ctypes.c_int, ctypes.c_ulong, ctypes.c_void_p)
NO_XDEV, NO_MAGICLINKS, NO_SYMLINKS, BENEATH, IN_ROOT = 0x01, 0x02, 0x04, 0x08, 0x10
"""How openat2(2) resolves a path."""
TMPFS, BTRFS, NSFS = 0x01021994, 0x9123683E, 0x6E736673
"""Kinds of file systems, as `file_system` tells them."""
_OPENAT2, _PIDFD_GETFD = 437, 438
_PUNCH_HOLE = 0x02 | 0x01
"""FALLOC_FL_PUNCH_HOLE with FALLOC_FL_KEEP_SIZE."""
_BPF = 321 if platform.machine() == "x86_64" else 280
_PR_SET_PDEATHSIG, _PR_SET_CHILD_SUBREAPER = 1, 36


def checked(result: int, what: str) -> int:
    """``result`` of a C function, or what ``errno`` says when it is negative."""
    if result < 0:
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number), what)
    return result


def ioctl(
    descriptor: int, request: int, argument: int | ctypes.Structure | ctypes.Array[ctypes.c_char]
) -> int:
    """``ioctl(2)`` whose argument is a number or is read and written in place."""
    given = ctypes.c_void_p(argument) if isinstance(argument, int) else ctypes.byref(argument)
    return checked(libc.ioctl(descriptor, request, given), f"ioctl {request:#x}")


def bpf(command: int, attributes: bytes | bytearray) -> int:
    """``bpf(2)``. What the kernel writes into a bytearray stands in it afterwards."""
    buffer = ctypes.create_string_buffer(bytes(attributes), max(len(attributes), 128))
    result = checked(libc.syscall(_BPF, command, buffer, ctypes.c_uint(128)), "bpf")
    if isinstance(attributes, bytearray):
        attributes[:] = buffer.raw[: len(attributes)]
    return result


class _How(ctypes.Structure):
    _fields_ = (("flags", ctypes.c_uint64), ("mode", ctypes.c_uint64), ("resolve", ctypes.c_uint64))


def open_inside(root: int, path: str | bytes, flags: int, mode: int = 0, *, resolve: int = IN_ROOT) -> int:
    """A descriptor of ``path`` under the folder ``root``, never of anything outside of it, by openat2(2)."""
    how = _How(flags | os.O_CLOEXEC, mode, resolve | NO_MAGICLINKS)
    encoded = os.fsencode(path)
    if b"\0" in encoded:
        raise OSError(errno.EINVAL, "a path holds no NUL", path)
    for _ in range(64):
        got = libc.syscall(
            ctypes.c_long(_OPENAT2), ctypes.c_int(root), encoded, ctypes.byref(how), ctypes.c_size_t(24)
        )
        code = ctypes.get_errno()
        # EAGAIN: something was renamed meanwhile, so the kernel could not prove that '..' stayed inside
        if got >= 0 or code not in (errno.EAGAIN, errno.EINTR):
            break
    if got < 0:
        raise OSError(code, os.strerror(code), path)
    return int(got)


def punch_hole(descriptor: int, start: int, end: int) -> None:
    """Give back the room of a file's bytes; its size stays. What the file system cannot give back stays."""
    if end > start and libc.fallocate(descriptor, _PUNCH_HOLE, start, end - start) < 0:
        code = ctypes.get_errno()
        if code != errno.EOPNOTSUPP:
            raise OSError(code, os.strerror(code), f"descriptor {descriptor}")


def copied_descriptor(pidfd: int, number: int) -> int:
    """A copy of a descriptor that the process behind ``pidfd`` has open, by pidfd_getfd(2)."""
    return checked(libc.syscall(_PIDFD_GETFD, pidfd, number, 0), f"descriptor {number}")


@contextmanager
def held(descriptor: int) -> Iterator[int]:
    """A descriptor, closed at the end."""
    try:
        yield descriptor
    finally:
        os.close(descriptor)


def copied(pidfd: int, number: int) -> AbstractContextManager[int]:
    """`copied_descriptor`, closed at the end."""
    return held(copied_descriptor(pidfd, number))


def process_handle(pid: int) -> AbstractContextManager[int]:
    """A pidfd, closed at the end. Raises OSError when there is no such process."""
    return held(os.pidfd_open(pid))


def unread(descriptor: int) -> int:
    """Bytes of a pipe, a socket or the like that nobody has read yet."""
    (count,) = struct.unpack("i", fcntl.ioctl(descriptor, termios.FIONREAD, bytes(4)))
    return int(count)


def file_system(path: Path | str) -> int:
    """The magic number of the file system on which ``path`` lies (statfs(2)); 0 where there is nothing."""
    fields = (ctypes.c_long * 32)()
    return fields[0] if libc.statfs(os.fsencode(path), fields) == 0 else 0


def in_sbin(program: str) -> str | None:
    """Where a program of the administrator's is, whether or not his folders are in PATH."""
    return shutil.which(program, path=os.environ.get("PATH", "") + ":/usr/local/sbin:/usr/sbin:/sbin")


def has_file_system(kind: str) -> bool:
    """Whether the kernel knows a kind of file system; its module is loaded where that is allowed."""

    def known() -> bool:
        return kind in Path("/proc/filesystems").read_text(encoding="ascii").split()

    if not known() and os.geteuid() == 0 and (modprobe := in_sbin("modprobe")):
        subprocess.run([modprobe, "-q", kind], capture_output=True, timeout=20, check=False)
    return known()


def adopt_orphans() -> None:
    """Become the parent of what this process's descendants leave behind, so that it can be waited for."""
    checked(libc.prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0), "prctl")


def end_with_parent() -> None:
    """This process is killed when the one that started it ends."""
    checked(libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0), "prctl")


def tied_command(words: Sequence[str], network: int | None = None) -> list[str]:
    """The command ``words``, in the network namespace of descriptor ``network``, as one that is killed when
    the thread that starts it ends.

    util-linux does both. Python of this process must not run between a fork and an exec (``preexec_fn``):
    where a library has threads, such as gRPC, what it does at a fork can abort the child.

    Raises:
        FileNotFoundError: there is no such program.
    """
    if shutil.which(words[0]) is None:
        raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), words[0])
    enter = [] if network is None else ["nsenter", f"--net=/proc/{os.getpid()}/fd/{network}"]
    return [*enter, "setpriv", "--pdeathsig", "KILL", "--", *words]


def sync_file_system(folder: Path) -> None:
    """All written data of the file system that holds ``folder`` is on the disk."""
    with opened(folder) as descriptor:
        checked(libc.syncfs(descriptor), str(folder))


def opened(path: Path, flags: int = os.O_RDONLY) -> AbstractContextManager[int]:
    """A descriptor of ``path``, closed at the end."""
    return held(os.open(path, flags | os.O_CLOEXEC))


@contextmanager
def locked(path: Path) -> Iterator[None]:
    """Alone among all processes that lock the same file or folder; a file is made when absent.

    The kernel gives the lock back when the process dies, so no stale lock can stay behind.
    """
    flags = os.O_RDONLY | os.O_DIRECTORY if path.is_dir() else os.O_RDWR | os.O_CREAT
    with held(os.open(path, flags | os.O_CLOEXEC, 0o600)) as descriptor:
        fcntl.flock(descriptor, fcntl.LOCK_EX)
        yield
