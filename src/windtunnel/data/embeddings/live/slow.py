"""Slow memory for records of rows: host memory, or a file that is read past the page cache.

A record is a row's weights and its optimizer's state, ``width`` float32, so that one read brings both. Rows
are counted by place; what was never written takes no memory and no disk.

A file is read in blocks: the fewest whole records that end at a multiple of a disk's sector. A batch's rows
are sorted, blocks side by side are one read, and `THREADS` reads are under way at once (``O_DIRECT``; where
the file system refuses that, through the page cache without read-ahead: a plain memory map thrashes). The
blocks of the last batch are kept, so that writing its rows back needs no second read.

The file is scratch: it belongs to the process that holds it (a lock), and its rows are of that process's
steps. What a dead process left is begun anew, never read; what counts is a checkpoint.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import math
import mmap
import os
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor, wait
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from windtunnel.base.errors import HostError, UserError

MAGIC = b"windtunnel slow tier\n"
HEADER = 4096
SECTOR = 512
THREADS = 16
PIECE = 64 << 20
"""Bytes of blocks that are in memory at once."""

Ints = NDArray[np.int64]


class MemoryRecords:
    """Records in host memory."""

    def __init__(self, rows: int, width: int) -> None:
        try:
            self.records = torch.from_numpy(np.zeros((rows, width), np.float32))
        except MemoryError:
            raise HostError(f"slow tier of {rows * width * 4:,} bytes: there is not as much memory") from None

    def read(self, rows: Ints) -> Tensor:
        """Records of ``rows`` (sorted, distinct), [n, width]."""
        return self.records[torch.from_numpy(rows)]

    def write(self, rows: Ints, records: Tensor) -> None:
        self.records[torch.from_numpy(rows)] = records

    def close(self) -> None:
        self.records = self.records[:0]


class FileRecords:
    """Records in a file.

    Raises:
        UserError: ``path`` is another's file, or in use.
        HostError: it cannot be made as large, or (later) read or written.
    """

    def __init__(self, path: str | Path, rows: int, width: int) -> None:
        self.path, self.width = Path(path), width
        need = 4 * width
        step = min(SECTOR, max(4, 1 << max(0, (need // 8).bit_length() - 1)))
        self.stride = -(-need // step) * step // 4
        self.block = math.lcm(self.stride * 4, SECTOR)
        self.per_block = self.block // (self.stride * 4)
        self.size = HEADER + -(-rows // self.per_block) * self.block
        self._pool: ThreadPoolExecutor | None = None
        self._fd = self._claim()
        try:
            os.ftruncate(self._fd, 0)
            os.ftruncate(self._fd, self.size)
            os.pwrite(self._fd, MAGIC, 0)
        except OSError as error:
            self.close()
            raise self._failed(f"cannot be made {self.size:,} bytes large", error) from None
        self._buffer = mmap.mmap(-1, mmap.PAGESIZE)
        self._blocks: Ints = np.empty(0, np.int64)
        self.direct = self._bypass()

    def _claim(self) -> int:
        try:
            fd = os.open(self.path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        except OSError as error:
            raise UserError(f"slow tier {self.path}: cannot be opened ({error.strerror})") from None
        why = ""
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            why = "is in use by another table; accepted is a file for each"
        else:
            if os.fstat(fd).st_size and os.pread(fd, len(MAGIC), 0) != MAGIC:
                why = "is a file of something else and would be overwritten; accepted is a new name"
        if why:
            os.close(fd)
            raise UserError(f"slow tier {self.path}: {why}")
        return fd

    def _bypass(self) -> bool:
        """Whether the page cache is passed by."""
        flags = fcntl.fcntl(self._fd, fcntl.F_GETFL)
        try:
            fcntl.fcntl(self._fd, fcntl.F_SETFL, flags | os.O_DIRECT)
            with memoryview(self._buffer) as view:
                os.preadv(self._fd, [view[:SECTOR]], HEADER - SECTOR)
        except OSError:
            fcntl.fcntl(self._fd, fcntl.F_SETFL, flags)
            os.posix_fadvise(self._fd, 0, 0, os.POSIX_FADV_RANDOM)
            return False
        return True

    def read(self, rows: Ints) -> Tensor:
        """Records of ``rows`` (sorted, distinct), [n, width]."""
        buffer = torch.empty(len(rows), self.width)
        for part, place in self._pieces(rows):
            buffer[part] = torch.index_select(self._cached(), 0, torch.from_numpy(place))[:, : self.width]
        return buffer

    def write(self, rows: Ints, records: Tensor) -> None:
        """Replaces ``rows`` (sorted, distinct). What fails part way may be done again."""
        for part, place in self._pieces(rows):
            self._cached()[torch.from_numpy(place), : self.width] = records[part]
            touched = np.unique(place // self.per_block)
            self._move(self._blocks[touched], touched, os.pwritev, "written")

    def close(self) -> None:
        """Gives the file up and removes it."""
        if self._fd >= 0:
            if self._pool is not None:
                self._pool.shutdown()
            with contextlib.suppress(OSError):
                os.unlink(self.path)
            os.close(self._fd)
            self._fd = -1

    def _pieces(self, rows: Ints) -> Iterator[tuple[slice, Ints]]:
        """Slices of ``rows`` whose blocks are then in memory, and where in `_held` each of them is."""
        blocks = rows // self.per_block
        starts = np.flatnonzero(np.diff(blocks, prepend=-1))
        for at in range(0, len(starts), PIECE // self.block):
            mine = starts[at : at + PIECE // self.block + 1]
            last = at + PIECE // self.block >= len(starts)
            part = slice(int(mine[0]), len(rows) if last else int(mine[-1]))
            self._load(blocks[mine if last else mine[:-1]])
            place = np.searchsorted(self._blocks, blocks[part])
            yield part, place * self.per_block + rows[part] % self.per_block

    def _load(self, blocks: Ints) -> None:
        if len(self._blocks):
            place = np.searchsorted(self._blocks, blocks)
            if place[-1] < len(self._blocks) and np.array_equal(self._blocks[place], blocks):
                return
        self._blocks = np.empty(0, np.int64)
        if len(self._buffer) < len(blocks) * self.block:
            self._buffer = mmap.mmap(-1, max(len(blocks) * self.block, 2 * len(self._buffer)))
        self._move(blocks, np.arange(len(blocks)), os.preadv, "read")
        self._blocks = blocks

    def _move(self, blocks: Ints, places: Ints, call: Callable[..., int], done: str) -> None:
        """Reads or writes ``blocks``, which are (or will be) at ``places`` in memory; both ascend."""
        cuts = np.flatnonzero((np.diff(blocks) != 1) | (np.diff(places) != 1)) + 1
        firsts, lasts = np.append(0, cuts), np.append(cuts, len(blocks))
        starts, offsets = places[firsts] * self.block, HEADER + blocks[firsts] * self.block
        runs = list(
            zip(starts.tolist(), ((lasts - firsts) * self.block).tolist(), offsets.tolist(), strict=True)
        )

        def work(mine: list[tuple[int, int, int]]) -> None:
            with memoryview(self._buffer) as view:
                for start, size, offset in mine:
                    moved = 0
                    while moved < size:
                        now = call(self._fd, [view[start + moved : start + size]], offset + moved)
                        if not now:
                            raise OSError(
                                errno.EIO, f"it ends before byte {offset + size:,}, another has cut it"
                            )
                        moved += now

        try:
            hands = min(THREADS, len(runs) // 4)
            if hands < 2:
                work(runs)
            else:
                self._pool = self._pool or ThreadPoolExecutor(THREADS, "slow-tier")
                jobs = [self._pool.submit(work, runs[hand::hands]) for hand in range(hands)]
                wait(jobs)  # none may go on in the buffer when another has failed
                for job in jobs:
                    job.result()
        except OSError as error:
            raise self._failed(f"{len(blocks):,} blocks cannot be {done}", error) from None

    def _failed(self, what: str, error: OSError) -> HostError:
        free = ""
        if error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG):
            at = os.statvfs(self.path.parent)
            free = f"; {at.f_bavail * at.f_frsize:,} bytes are free there"
        return HostError(f"slow tier {self.path}: {what} ({error.strerror}{free})")

    def _cached(self) -> Tensor:
        """Records of the blocks that are in memory, [n, stride]."""
        count = len(self._blocks) * self.block // 4
        return torch.frombuffer(self._buffer, dtype=torch.float32, count=count).view(-1, self.stride)
