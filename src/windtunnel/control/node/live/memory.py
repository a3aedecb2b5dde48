"""Cold memory of a process sent to the slow tier: its swap (such as zram), or the files that it maps.

A region is a private mapping of `LEAST` bytes or more. Linux clears accessed bits by process and tells them by
mapping (proc(5): clear_refs, Referenced of smaps), so a scan is of the whole process. Without swap only pages
that lie in files can go (process_madvise(2), MADV_PAGEOUT), so only they are regions.
"""

from __future__ import annotations

import ctypes
import errno
import os
import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from windtunnel.linux import system

LEAST = 256 << 10
_PROCESS_MADVISE, WILL_NEED, PAGE_OUT = 440, 3, 21
_MAPPING = re.compile(r"^([0-9a-f]+-[0-9a-f]+) \S\S\Sp \S+ \S+ \d+ *(\S*).*\n((?:[A-Z]\w+: .*\n)*)", re.M)


@dataclass
class Process:
    """The host of a `MemoryModel` or a `MemoryActuator`. Methods raise OSError when there is no such process,
    or it is another user's."""

    pid: int
    _out: set[str] = field(default_factory=set)
    _faults: int = 0

    def scan(self) -> dict[str, bool]:
        """Whether each region was accessed since the last scan, by its addresses."""
        regions, swap = {}, len(Path("/proc/swaps").read_text().splitlines()) > 1
        for span, path, text in _MAPPING.findall(Path(f"/proc/{self.pid}/smaps").read_text()):
            size = {name: int(number) << 10 for name, number in re.findall(r"(\w+): +(\d+) kB", text)}
            if size["Size"] >= LEAST and (path.startswith("/") or swap):
                regions[span] = size["Referenced"] > 0
        Path(f"/proc/{self.pid}/clear_refs").write_text("1")
        return regions

    def page_out(self, regions: Sequence[str]) -> int:
        """Send what is not yet out; how many are meant to be there."""
        self._advise(set(regions) - self._out, PAGE_OUT)
        self._out = set(regions)
        return len(regions)

    def remote(self) -> float:
        """Pages that came from the slow tier since the last call, as a share of those accessed of late."""
        before = self._faults
        self._faults = int(Path(f"/proc/{self.pid}/stat").read_text().rpartition(")")[2].split()[9])
        text = Path(f"/proc/{self.pid}/smaps_rollup").read_text()
        pages = sum(int(number) for number in re.findall(r"Referenced: +(\d+)", text)) // 4
        return (self._faults - before) / max(1, pages)

    def bring_back(self) -> int:
        """Ask the kernel to read all of it in again, as an access would; how many regions."""
        regions, self._out = self._out, set()
        self._advise(regions, WILL_NEED)
        return len(regions)

    def _advise(self, regions: set[str], advice: int) -> None:
        with system.process_handle(self.pid) as handle:
            for region in sorted(regions):
                start, end = (int(word, 16) for word in region.split("-"))
                span = (ctypes.c_size_t * 2)(start, end - start)
                if system.libc.syscall(_PROCESS_MADVISE, handle, span, 1, advice, 0) < 0:
                    number = ctypes.get_errno()
                    if number not in (errno.ENOMEM, errno.EINVAL):  # it is unmapped by now, or locked
                        raise OSError(number, os.strerror(number), f"memory of process {self.pid}")
