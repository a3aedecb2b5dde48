"""Which pages a process wrote since a moment, exactly, from outside.

A userfaultfd in asynchronous write-protect mode makes the kernel keep one mark for every page that was
written; PAGEMAP_SCAN reads the marks and, while the process is frozen, resets them. Mappings that came later
are not under it and are told as new. Where the kernel keeps soft-dirty marks for itself this module is still
what is used: it needs no build option, and it does not disturb CRIU, which uses those marks.

Source: Documentation/admin-guide/mm/userfaultfd.rst and pagemap.rst of the kernel (6.7 and later).
"""

from __future__ import annotations

import ctypes
import fcntl
import os
import platform
import struct
from pathlib import Path

from windtunnel.agents.sandbox.live.inspect import inject
from windtunnel.agents.sandbox.live.inspect.fault import InspectError

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
    """Why memory cannot be tracked here, in words; empty when it can."""
    if platform.machine() != "x86_64":
        return f"memory tracking is not made for machines of the kind {platform.machine()}"
    if os.geteuid() != 0:
        return "needs root"
    libc = ctypes.CDLL(None, use_errno=True)
    fd = libc.syscall(323, os.O_CLOEXEC)
    if fd < 0:
        return f"userfaultfd: {os.strerror(ctypes.get_errno())}"
    try:
        _enable(fd)
    except OSError as error:
        return f"userfaultfd has no asynchronous write protection (Linux 6.7): {error.strerror}"
    finally:
        os.close(fd)
    return ""


def _enable(fd: int) -> None:
    fcntl.ioctl(fd, _API, bytearray(struct.pack("<QQQ", 0xAA, _WP_ASYNC | _WP_UNPOPULATED, 0)))


def _writable(pid: int) -> list[tuple[int, int]]:
    """The private writable mappings of a process."""
    found = []
    for line in Path(f"/proc/{pid}/maps").read_bytes().splitlines():
        span, rights, _ = line.split(b" ", 2)
        if rights[1:2] == b"w" and rights[3:4] == b"p" and b"[v" not in line:
            start, _, end = span.partition(b"-")
            found.append((int(start, 16), int(end, 16)))
    return found


class Tracker:
    """The memory of one process. Made in a thread that ends soon after (see ``inject``)."""

    def __init__(self, pid: int) -> None:
        self._pid = pid
        self._fd = inject.userfaultfd_of(pid)
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
            try:
                fcntl.ioctl(
                    self._fd, _REGISTER, bytearray(struct.pack("<QQQQ", start, end - start, _MODE_WP, 0))
                )
            except OSError:
                continue  # stays outside: told as a new mapping for ever, which errs on the safe side

    def reset(self) -> None:
        """Forget what was written until now; mappings that came since are taken in. The process is frozen."""
        self._register()
        self._pages(_PROTECT)

    def written(self) -> tuple[int, int]:
        """Pages written since the last reset, and mappings that came since."""
        pagemap = self._pagemap()
        try:
            fresh = 0
            for start, _ in _writable(self._pid):
                # a mark of the whole mapping, so its first page tells
                if self._scan(pagemap, start, start + _PAGE, 0, _ALLOWED, _ALLOWED)[0]:
                    fresh += 1
        finally:
            os.close(pagemap)
        return self._pages(0), fresh

    def _pagemap(self) -> int:
        try:
            return os.open(f"/proc/{self._pid}/pagemap", os.O_RDONLY | os.O_CLOEXEC)
        except OSError as error:
            raise InspectError(f"memory of process {self._pid}: {error.strerror}") from None

    def _pages(self, flags: int) -> int:
        pagemap = self._pagemap()
        try:
            return self._scan(pagemap, 0, _TOP, flags, 0, _ALLOWED | _WRITTEN)[0]
        finally:
            os.close(pagemap)

    def _scan(self, pagemap: int, at: int, end: int, flags: int, inverted: int, mask: int) -> tuple[int, int]:
        """Pages and regions in which all categories of ``mask`` hold, those of ``inverted`` turned round."""
        regions = ctypes.create_string_buffer(24 * _REGIONS)
        pages = count = 0
        while at < end:
            argument = bytearray(
                struct.pack(
                    "<12Q",
                    96,
                    flags,
                    at,
                    end,
                    0,
                    ctypes.addressof(regions),
                    _REGIONS,
                    0,
                    inverted,
                    mask,
                    0,
                    mask,
                )
            )
            try:
                filled = fcntl.ioctl(pagemap, _SCAN, argument)
            except OSError as error:
                raise InspectError(f"memory of process {self._pid}: {error.strerror}") from None
            for number in range(filled):
                first, last, _ = struct.unpack_from("<QQQ", regions, 24 * number)
                pages += (last - first) // _PAGE
            count += filled
            (at,) = struct.unpack_from("<Q", argument, 32)
            if filled < _REGIONS:
                break
        return pages, count
