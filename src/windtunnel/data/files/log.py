"""The write-ahead log: framed operations in a ring of bytes that is the same on every host.

A frame is a header, the two paths, and the data. Its checksum covers all of that, its sequence number follows
the one before it, and its offset is logical (it only grows; the place in the ring is the offset modulo the
ring's size). So what was left by an earlier lap, a torn write or a flipped bit is never taken for a frame:
recovery reads from a point that is known to be good to the first frame that does not fit, and what it finds
is a prefix without a hole (LineFS, SOSP 2021, section 3; Assise, OSDI 2020).

Beside the ring lie two superblocks, written in turn, each with a checksum: the newer one that is whole says
up to where the log is published, which is where recovery begins.
"""

from __future__ import annotations

import mmap
import os
import struct
import zlib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from windtunnel.data.files.model import Operation, OperationKind, Position

MAGIC = b"wtLF"
# magic, checksum, whole length; kind, epoch, sequence, client, request, offset, time, lengths of both paths
_HEAD = struct.Struct("<4sII BIQQQqdHH")
_CHECKED = 8  # bytes before what the checksum covers: magic and the checksum
_BLOCK = struct.Struct("<4sIQQQI")  # magic, checksum, turn, sequence, offset, epoch
_SECTOR = 512


@dataclass(frozen=True)
class LogFrame:
    """A frame: what was done, with which data. ``after``: the position behind it, with the frame's epoch."""

    operation: Operation
    data: bytes
    sequence: int
    after: Position


def frame(operation: Operation, data: bytes, epoch: int, sequence: int) -> bytes:
    """The bytes of one operation in the log."""
    path, target = operation.path.encode(), operation.target.encode()
    length = _HEAD.size + len(path) + len(target) + len(data)
    head = _HEAD.pack(
        MAGIC, 0, length, operation.kind, epoch, sequence, operation.client, operation.request,
        operation.offset, operation.time, len(path), len(target),
    )  # fmt: skip
    body = b"".join((head[_CHECKED:], path, target, data))
    return MAGIC + zlib.crc32(body).to_bytes(4, "little") + body


def entry(data: bytes | memoryview, at: Position) -> LogFrame | None:
    """The frame with which ``data`` begins, if it is whole and is the one that belongs at ``at``."""
    head = frame_head(data, at)
    if head is None or len(data) < head[0]:
        return None
    length, fields = head
    view = memoryview(data)[:length]
    if zlib.crc32(view[_CHECKED:]) != fields[1]:
        return None
    *_, kind, epoch, sequence, client, request, offset, time, path, target = fields
    text = _HEAD.size + path + target
    operation = Operation(
        OperationKind(kind), str(view[_HEAD.size : _HEAD.size + path], "utf-8"),
        str(view[_HEAD.size + path : text], "utf-8"), offset, time, client, request,
    )  # fmt: skip
    after = Position(sequence + 1, at.offset + length, epoch)
    return LogFrame(operation, bytes(view[text:]), sequence, after)


def parse(data: bytes, at: Position) -> Iterator[LogFrame]:
    """The frames of ``data`` from its beginning on, up to the first that is none."""
    view = memoryview(data)
    begin = at.offset
    while whole := entry(view[at.offset - begin :], at):
        yield whole
        at = whole.after


def frame_head(data: bytes | memoryview, at: Position) -> tuple[int, tuple[int, ...]] | None:
    """Length and fields of the header with which ``data`` begins, if it belongs at ``at``; unchecked."""
    if len(data) < _HEAD.size:
        return None
    fields = _HEAD.unpack_from(data)
    if fields[0] != MAGIC or fields[5] != at.sequence or fields[4] < at.epoch:
        return None
    return (fields[2], fields) if fields[2] >= _HEAD.size + fields[10] + fields[11] else None


class LogRing:
    """The ring of the log: the region of the host's engine of `data.group`, which has made the file."""

    def __init__(self, path: Path, size: int) -> None:
        self.file = os.open(path, os.O_RDWR | os.O_CLOEXEC)
        self.size = size
        self._map = mmap.mmap(self.file, size)

    def write(self, offset: int, data: bytes) -> None:
        """Put bytes at a logical offset. Who reads meanwhile finds a frame whose checksum does not fit."""
        for at, part in self.pieces(offset, len(data)):
            self._map[at : at + len(part)] = data[part.start : part.stop]

    def read(self, offset: int, length: int) -> bytes:
        return b"".join(self._map[at : at + len(part)] for at, part in self.pieces(offset, length))

    def pieces(self, offset: int, length: int) -> list[tuple[int, range]]:
        """Where the bytes from a logical offset lie: places in the ring, each with its range of the bytes."""
        at = offset % self.size
        first = min(length, self.size - at)
        return [(at, range(first)), *([(0, range(first, length))] if first < length else [])]

    def fetch(self, start: Position, most: int) -> bytes:
        """The bytes of the frames from ``start`` on whose headers fit, up to ``most`` (but one frame)."""
        at = start
        while at.offset - start.offset < most:
            head = frame_head(self.read(at.offset, _HEAD.size), at)
            if head is None or head[0] > self.size:
                break
            at = Position(at.sequence + 1, at.offset + head[0], head[1][4])
        return self.read(start.offset, at.offset - start.offset)

    def entries(self, start: Position) -> Iterator[LogFrame]:
        """Whole frames from ``start`` on, up to the first that is none."""
        while runs := list(parse(self.fetch(start, 1 << 20), start)):
            yield from runs
            start = runs[-1].after

    def clear(self) -> None:
        """Nothing of it is a log any more, on the disk either."""
        self._map[:] = bytes(self.size)
        self._map.flush()
        self.sync()

    def sync(self) -> None:
        """All that was written is on the disk."""
        os.fdatasync(self.file)

    def close(self) -> None:
        self._map.close()
        os.close(self.file)


class Superblocks:
    """Up to where a host has published. ``turn``: which snapshot of the tree belongs to that."""

    def __init__(self, path: Path) -> None:
        self.file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        self.turn, *fields = max(self._read(turn) for turn in (0, 1))
        self.published = Position(*fields)

    def _read(self, turn: int) -> tuple[int, int, int, int]:
        data = os.pread(self.file, _BLOCK.size, turn * _SECTOR)
        if len(data) == _BLOCK.size:
            magic, check, *fields = _BLOCK.unpack(data)
            if magic == MAGIC and zlib.crc32(data[_CHECKED:]) == check:
                turn, sequence, offset, epoch = fields
                return turn, sequence, offset, epoch
        return 0, 1, 0, 0

    def write(self, published: Position) -> None:
        """Durably: the other of the two blocks stays as it is."""
        self.turn, self.published = self.turn + 1, published
        fields = (self.turn, published.sequence, published.offset, published.epoch)
        body = _BLOCK.pack(MAGIC, 0, *fields)[_CHECKED:]
        block = MAGIC + zlib.crc32(body).to_bytes(4, "little") + body
        os.pwrite(self.file, block, self.turn % 2 * _SECTOR)
        os.fdatasync(self.file)

    def close(self) -> None:
        os.close(self.file)
