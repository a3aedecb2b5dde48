"""Cut a stream of bytes into pieces so that equal stretches of two streams give equal pieces.

Streams of files are tar: all in it begins at a multiple of 512 bytes. So a block of 512 bytes whose own hash
has its top bits set ends a piece. What is inserted or removed moves no other cut, and the hash of all blocks
is one product of arrays. The hash need not be strong; each piece is named by its SHA-256.
"""

from __future__ import annotations

import io
from collections.abc import Callable

import numpy as np

BLOCK = 512
LEAST, MOST = 256, 4096
"""Bounds of a piece, in blocks: 128 KiB and 2 MiB."""

_BITS = 10
_END = 2**_BITS - 1
"""Not zero: a long run of zero blocks, which all hash to zero, is to be cut as rarely as may be."""
_WEIGHTS = np.random.Generator(np.random.PCG64(2604)).integers(1, 2**63, BLOCK // 8, np.uint64) | np.uint64(1)
_READ = 4 * MOST * BLOCK


class Cutter(io.RawIOBase):
    """A file to write to, which hands the pieces on to ``take``; ``finish`` hands on the last one."""

    def __init__(self, take: Callable[[bytes], None]) -> None:
        self._take = take
        self._left = bytearray()

    def writable(self) -> bool:
        return True

    def write(self, data: object) -> int:
        view = memoryview(data).cast("B")  # type: ignore[arg-type]
        self._left += view
        if len(self._left) >= _READ:
            self._cut(last=False)
        return len(view)

    def finish(self) -> None:
        """The stream has ended. Not done by ``close``, which also follows a failure."""
        self._cut(last=True)

    def _cut(self, *, last: bool) -> None:
        count = len(self._left) // BLOCK
        words = np.frombuffer(bytes(self._left[: count * BLOCK]), "<u8").reshape(count, BLOCK // 8)
        ends = (
            np.flatnonzero((words * _WEIGHTS).sum(axis=1, dtype=np.uint64) >> np.uint64(64 - _BITS) == _END)
            + 1
        )
        begin = 0
        # before the end of the stream, a piece is cut only where all blocks that could end it are known
        while count - begin >= MOST or (last and count > begin):
            at = np.searchsorted(ends, begin + LEAST)
            end = min(int(ends[at]) if at < len(ends) else count, begin + MOST, count)
            self._take(bytes(self._left[begin * BLOCK : end * BLOCK]))
            begin = end
        rest = bytes(self._left[begin * BLOCK :])
        if last and rest:
            self._take(rest)
        self._left = bytearray() if last else bytearray(rest)
