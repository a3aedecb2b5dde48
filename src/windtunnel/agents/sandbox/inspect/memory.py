"""Which pages a process wrote since a moment, exactly, from outside.

A userfaultfd in asynchronous write-protect mode makes the kernel keep one mark for every page that was
written; PAGEMAP_SCAN reads the marks and, while the process is frozen, resets them. Mappings that came later
are not under it and are told as new. Where the kernel keeps soft-dirty marks for itself this module is still
what is used: it needs no build option, and it does not disturb CRIU, which uses those marks.

The process opens the userfaultfd itself and hands it over without noticing (see `linux.inject`).

Source: Documentation/admin-guide/mm/userfaultfd.rst and pagemap.rst of the kernel (6.7 and later).
"""

from __future__ import annotations

import contextlib
import ctypes
import fcntl
import mmap
import os
import platform
import struct
from collections.abc import Iterator

from windtunnel.agents.sandbox.errors import InspectError
from windtunnel.linux import inject, processes
from windtunnel.linux.system import copied_descriptor, libc, process_handle

_USERFAULTFD, _CLOSE = 323, 3


def userfaultfd_of(pid: int, seconds: float = 0.2) -> int:
    """A descriptor, in this process, of a userfaultfd on the memory of ``pid``.

    Must be called from a thread that ends soon after: should the stop not come in time, the end of the
    tracing thread is what frees the other one. Raises OSError; the process is unharmed.
    """
    with (
        process_handle(pid) as pidfd,
        contextlib.closing(inject.Stopped(inject.running(pid), seconds)) as stopped,
    ):
        calls = inject.InjectedCalls(pid, stopped)
        theirs = calls(_USERFAULTFD, os.O_CLOEXEC)
        try:
            return copied_descriptor(pidfd, theirs)
        finally:
            calls(_CLOSE, theirs)


_API, _REGISTER = 0xC018AA3F, 0xC020AA00
_SCAN = 0xC0606610
_WP_ASYNC, _WP_UNPOPULATED = 1 << 15, 1 << 13
_MODE_WP = 2
_PROTECT = 1
_ALLOWED, _WRITTEN = 1 << 0, 1 << 1
_TOP = 0x7FFFFFFFF000
_PAGE = 4096
_REGIONS = 512


def missing() -> str:
    """Why memory cannot be tracked here, in words; empty when a write to one of two pages was found."""
    if not inject.POSSIBLE:
        return f"memory tracking is not made for machines of the kind {platform.machine()}"
    if os.geteuid() != 0:
        return "needs root"
    fd = libc.syscall(_USERFAULTFD, os.O_CLOEXEC)
    if fd < 0:
        return f"userfaultfd: {os.strerror(ctypes.get_errno())}"
    pages = mmap.mmap(-1, 2 * _PAGE, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    start = ctypes.addressof(ctypes.c_char.from_buffer(pages))
    try:
        _enable(fd)
        _protect(fd, start, start + 2 * _PAGE)
        with open("/proc/self/pagemap", "rb") as pagemap:
            _scan(pagemap.fileno(), start, start + 2 * _PAGE, _PROTECT, 0, _ALLOWED | _WRITTEN)
            pages[_PAGE] = 1
            count = _scan(pagemap.fileno(), start, start + 2 * _PAGE, 0, 0, _ALLOWED | _WRITTEN)
    except OSError as error:
        return f"userfaultfd has no asynchronous write protection (Linux 6.7): {error.strerror}"
    finally:
        os.close(fd)
    return "" if count == 1 else "a write was not found by PAGEMAP_SCAN"


def _enable(fd: int) -> None:
    fcntl.ioctl(fd, _API, bytearray(struct.pack("<QQQ", 0xAA, _WP_ASYNC | _WP_UNPOPULATED, 0)))


def _protect(fd: int, start: int, end: int) -> None:
    fcntl.ioctl(fd, _REGISTER, bytearray(struct.pack("<QQQQ", start, end - start, _MODE_WP, 0)))


def _scan(pagemap: int, at: int, end: int, flags: int, inverted: int, mask: int) -> int:
    """Pages in which all categories of ``mask`` hold, those of ``inverted`` turned round."""
    regions = ctypes.create_string_buffer(24 * _REGIONS)
    where = ctypes.addressof(regions)
    pages = 0
    while at < end:
        argument = bytearray(
            struct.pack("<12Q", 96, flags, at, end, 0, where, _REGIONS, 0, inverted, mask, 0, mask)
        )
        filled = fcntl.ioctl(pagemap, _SCAN, argument)
        for number in range(filled):
            first, last, _ = struct.unpack_from("<QQQ", regions, 24 * number)
            pages += (last - first) // _PAGE
        (at,) = struct.unpack_from("<Q", argument, 32)
        if filled < _REGIONS:
            break
    return pages


def _writable(pid: int) -> list[tuple[int, int]]:
    """The private writable mappings of a process."""
    return [
        (each.start, each.end)
        for each in processes.mappings(pid)
        if each.rights[1] == "w" and each.rights[3] == "p" and not each.path.startswith("[v")
    ]


class Tracker:
    """The memory of one process. Made in a thread that ends soon after (see `userfaultfd_of`)."""

    def __init__(self, pid: int) -> None:
        self._pid = pid
        self._fd = userfaultfd_of(pid)
        try:
            _enable(self._fd)
            self._register()
        except BaseException:
            os.close(self._fd)
            raise

    def close(self) -> None:
        os.close(self._fd)

    def _register(self) -> None:
        for start, end in _writable(self._pid):
            # one that is refused stays outside: told as a new mapping for ever, which errs on the safe side
            with contextlib.suppress(OSError):
                _protect(self._fd, start, end)

    def reset(self) -> None:
        """Forget what was written until now; mappings that came since are taken in. The process is frozen."""
        self._register()
        with self._pagemap() as pagemap:
            _scan(pagemap, 0, _TOP, _PROTECT, 0, _ALLOWED | _WRITTEN)

    def written(self) -> tuple[int, int]:
        """Pages written since the last reset, and mappings that came since."""
        with self._pagemap() as pagemap:
            # the mark is one of the whole mapping, so its first page tells
            fresh = sum(
                _scan(pagemap, start, start + _PAGE, 0, _ALLOWED, _ALLOWED) > 0
                for start, _ in _writable(self._pid)
            )
            return _scan(pagemap, 0, _TOP, 0, 0, _ALLOWED | _WRITTEN), fresh

    @contextlib.contextmanager
    def _pagemap(self) -> Iterator[int]:
        try:
            with open(f"/proc/{self._pid}/pagemap", "rb", buffering=0) as pagemap:
                yield pagemap.fileno()
        except OSError as error:
            raise InspectError(f"memory of process {self._pid}: {error.strerror}") from None
