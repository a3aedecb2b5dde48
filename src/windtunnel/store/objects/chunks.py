"""Chunks: pieces of data, each kept once under the SHA-256 of its bytes, whoever needs it.

A chunk's name is ``<sha256>``, or ``<sha256>.zst`` where it lies compressed; its file is
``chunks/<first 2 digits>/<name>``. The name is all that a manifest has to say of it.

Two ways to cut, both so that equal stretches of two versions give equal pieces, which are not written again:

- `pieces`: every `PIECE` bytes. For data where all lies at the same place each time.
- `Cutter`: where the content says so. For streams into which something may be inserted, as archives of files.
  All in a tar begins at a multiple of 512 bytes. So a block of 512 bytes whose own hash has its top bits set
  ends a piece: what is inserted or removed moves no other cut, and the hash of all blocks is one product of
  arrays. The hash need not be strong.
"""

from __future__ import annotations

import hashlib
import io
import re
import threading
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from typing import TypeVar

import numpy as np
import zstandard

from windtunnel.store.objects.files import Files, ObjectError, read_if_there

PIECE = 2 << 20
"""Bytes of a piece of fixed size, and the most that any has: a forged one cannot fill the memory."""
FOLDER = "chunks"
BLOCK = 512
LEAST, MOST = 256, (2 << 20) // BLOCK
"""Bounds of a piece that `Cutter` makes, in blocks: 128 KiB and 2 MiB."""

_BITS = 10
_END = 2**_BITS - 1
"""Not zero: a long run of zero blocks, which all hash to zero, is to be cut as rarely as may be."""
_WEIGHTS = np.random.Generator(np.random.PCG64(2604)).integers(1, 2**63, BLOCK // 8, np.uint64) | np.uint64(1)
_READ = 4 * MOST * BLOCK
_NAME = re.compile(r"[0-9a-f]{64}(\.zst)?")
_own = threading.local()

T = TypeVar("T")
U = TypeVar("U")


def pieces(data: memoryview) -> Iterator[memoryview]:
    """``data`` in pieces of `PIECE` bytes."""
    for begin in range(0, len(data), PIECE):
        yield data[begin : begin + PIECE]


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
        hashes = (words * _WEIGHTS).sum(axis=1, dtype=np.uint64)
        ends = np.flatnonzero(hashes >> np.uint64(64 - _BITS) == _END) + 1
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


def path(name: str) -> str:
    """Where a chunk lies."""
    return f"{FOLDER}/{name[:2]}/{name}"


def put(files: Files, piece: bytes, level: int | None = None) -> str:
    """Write ``piece`` unless it is there, compressed or not; returns its name. ``level``: of zstd, None for
    none."""
    digest = hashlib.sha256(piece).hexdigest()
    packed = f"{digest}.zst"
    for name in (digest, packed) if level is None else (packed, digest):
        size = files.size(path(name))
        # A plain file of another size was damaged from outside: it is written again.
        if size is not None and (name != digest or size == len(piece)):
            files.rely(path(name))
            return name
    name, data = (digest, piece) if level is None else (packed, compress(piece, level))
    files.write(path(name), data)
    return name


def get(files: Files, name: str) -> bytes:
    """The bytes of a chunk, checked.

    Raises:
        ObjectError: it is missing, or its bytes are not those of its name.
    """
    if not _NAME.fullmatch(name):
        raise ObjectError(f"{name!r} cannot be the name of a chunk")
    where = f"chunk {files.url}/{path(name)}"
    data = read_if_there(files, path(name))
    if data is None:
        raise ObjectError(f"{where} is missing")
    if name.endswith(".zst"):
        try:
            data = decompress(data, min(zstandard.frame_content_size(data), PIECE))
        except zstandard.ZstdError as error:
            raise ObjectError(f"{where} is damaged: {error}") from None
    if hashlib.sha256(data).hexdigest() != name[:64]:
        raise ObjectError(f"{where} is damaged: its bytes do not match its name")
    return data


def get_all(files: Files, names: Iterable[str], at_once: int) -> Iterator[bytes]:
    """The bytes of chunks in order, up to ``at_once`` read at a time. Raises as `get`."""
    return in_order(lambda name: get(files, name), names, at_once)


def in_order(act: Callable[[T], U], items: Iterable[T], at_once: int) -> Iterator[U]:
    """``act`` on each, in order, up to ``at_once`` at a time."""
    if at_once <= 1:
        yield from map(act, items)
        return
    with ThreadPoolExecutor(at_once) as pool:
        running: deque[Future[U]] = deque()
        try:
            for item in items:
                running.append(pool.submit(act, item))
                if len(running) >= 2 * at_once:
                    yield running.popleft().result()
            while running:
                yield running.popleft().result()
        finally:
            for future in running:
                future.cancel()


def compress(data: bytes | memoryview, level: int) -> bytes:
    """One zstd frame. Compressors are kept, one a thread: making one costs more than a small frame."""
    compressors = _own.__dict__.setdefault("compressors", {})
    if level not in compressors:
        compressors[level] = zstandard.ZstdCompressor(level=level)
    packed: bytes = compressors[level].compress(data)
    return packed


def decompress(data: bytes, size: int) -> bytes:
    """The plain bytes of a frame, which must be ``size`` many.

    Raises:
        zstandard.ZstdError: they are not, or it is no frame.
    """
    if not hasattr(_own, "decompressor"):
        _own.decompressor = zstandard.ZstdDecompressor()
    # the size that the frame claims is not trusted with an allocation
    if zstandard.frame_content_size(data) != size:
        raise zstandard.ZstdError("another size than expected")
    plain: bytes = _own.decompressor.decompress(data)
    return plain
