"""Memory of another process, sent to the slow tier and fetched again from outside.

A region is a mapping of a MiB or more: of single pages the kernel does not tell accesses. The slow tier is
the host's swap (zram is compressed memory); without one only clean pages of files move. What is accessed
comes back by itself: a killed agent leaves nothing to clean up.

Source: proc(5) (clear_refs, smaps), process_madvise(2).
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import os
import re
from collections.abc import Sequence
from pathlib import Path

from windtunnel.base.errors import UserError
from windtunnel.base.processes import Identity
from windtunnel.linux import LinuxError
from windtunnel.linux.processes import mappings, stat
from windtunnel.linux.system import libc

_ADVISE, _WILLNEED, _PAGEOUT = 440, 3, 21
_FINE = 0, errno.ENOMEM, errno.EINVAL, errno.ESRCH  # or not mapped any more, or locked, or ended
_IDLE = re.compile(r"^([0-9a-f]+-[0-9a-f]+) .*\n(?:[A-Z].*\n)*?Referenced: +0 ", re.MULTILINE)


class Pages:
    """The host of a `MemoryModel` and of its `MemoryActuator`: what a process has mapped now.
    Raises UserError where there is no such process, LinuxError where this is not root."""

    def __init__(self, pid: int) -> None:
        if (process := Identity.of(pid)) is None:
            raise UserError(f"`pid` is {pid}, accepted is the id of a process")
        if os.geteuid():
            raise LinuxError("memory of other processes is moved by root, and this process is not")
        self._process, self._sent = process, set[int]()
        readable = [(start, end) for start, end, rights, _ in mappings(pid) if rights[0] == "r"]
        self._spans = [(start, end) for start, end in readable if end - start >= 1 << 20]
        self._faults = self._counts()[0]

    def scan(self) -> tuple[bool, ...]:
        """Whether each region was accessed or changed since the last scan; none of a process that is gone."""
        folder, idle = Path(f"/proc/{self._process.pid}"), set[str]()
        with contextlib.suppress(ProcessLookupError, FileNotFoundError):
            idle = set(_IDLE.findall((folder / "smaps").read_text(errors="replace")))
            (folder / "clear_refs").write_text("1")
        spans = self._spans if self._process.lives() else ()
        return tuple(f"{start:08x}-{end:08x}" not in idle for start, end in spans)

    def page_out(self, regions: Sequence[int]) -> int:
        """Send them away; how many pages fewer the process then has in memory."""
        self._sent, before = self._sent | set(regions), self._counts()[1]
        self._advise(regions, _PAGEOUT)
        return max(0, before - self._counts()[1])

    def remote(self) -> float:
        """Major faults since the last call, as a share of the pages that the process has in memory."""
        before, (self._faults, resident) = self._faults, self._counts()
        return max(0, self._faults - before) / max(1, resident)

    def bring_back(self) -> int:
        """Have the kernel read what was sent away; how many regions."""
        regions, self._sent = sorted(self._sent), set()
        self._advise(regions, _WILLNEED)
        return len(regions)

    def _counts(self) -> tuple[int, int]:
        fields = stat(self._process.pid) or ["0"] * 22
        return int(fields[9]), int(fields[21])

    def _advise(self, regions: Sequence[int], advice: int) -> None:
        with contextlib.suppress(ProcessLookupError), open(os.pidfd_open(self._process.pid)) as process:
            for start, end in [self._spans[region] for region in regions] if self._process.lives() else []:
                span = (ctypes.c_size_t * 2)(start, end - start), ctypes.c_size_t(1)
                number = libc.syscall(_ADVISE, process.fileno(), *span, advice, 0) < 0 and ctypes.get_errno()
                if number not in _FINE:
                    raise LinuxError(f"memory is not moved: {os.strerror(number)}", number)
