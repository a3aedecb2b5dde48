"""A slot: one file in memory (tmpfs) that holds one shard of one step, or the torn rest of one.

4 KiB of header, then the data. Writing goes dirty -> data -> complete: `begin` puts the header of the new
step down as dirty, the writer fills `data` (mapped memory, touched beforehand), `complete` puts the checksum
of the data into the header and its state to complete. The header carries a CRC of itself, so one that was
half written when its writer died counts as dirty.

A reader trusts a slot only if its header is complete and the xxh3_128 of the data *that it read* is the
header's; a writer that comes in between can therefore never be mistaken for either of the two steps. `load`
is that reader for a slot on the own host. A killed process loses nothing here: what it has stored stays in
the page cache.
"""

from __future__ import annotations

import contextlib
import mmap
import os
import re
import struct
import zlib
from dataclasses import dataclass, replace
from pathlib import Path

import xxhash

from windtunnel.training.checkpoint.model import SLOT_HEADER, Shard

HEADER = SLOT_HEADER
BLOCK = 4 << 20
"""Bytes that are read and hashed at a time (xxhash lets other threads run meanwhile)."""

_MAGIC = b"WTSLOT\r\n"
_VERSION = 2
_FIELDS = struct.Struct("<8sIIqqQQII64s40s40s")
_CRC = struct.Struct("<I")
_DIRTY, _COMPLETE = 1, 2
_POPULATE_WRITE = 23  # MADV_POPULATE_WRITE, Linux 5.14; the mmap module has no name for it
_NAME = re.compile(r"[A-Za-z0-9_-]{1,64}")


class CopyError(Exception):
    """A copy of a shard is missing, torn, or not what its checksum says."""


@dataclass(frozen=True)
class Header:
    """What a slot says of itself. ``shard.step`` is -1 in a slot that was never written.

    ``capacity``: bytes of data that there is room for.
    """

    shard: Shard
    capacity: int
    complete: bool = False

    def packed(self) -> bytes:
        """As the bytes at the start of the file."""
        it = self.shard
        packed = _FIELDS.pack(
            _MAGIC, _VERSION, _COMPLETE if self.complete else _DIRTY, it.step, it.generation, it.nbytes,
            self.capacity, it.world, it.has_shared, it.name.encode(), it.layout.encode(),
            it.checksum.encode(),
        )  # fmt: skip
        return packed + _CRC.pack(zlib.crc32(packed))

    @staticmethod
    def unpacked(raw: bytes) -> Header | None:
        """The inverse of `packed`; None where ``raw`` is no whole header of this version."""
        if len(raw) < SIZE:
            return None
        packed = raw[: _FIELDS.size]
        if zlib.crc32(packed) != _CRC.unpack_from(raw, _FIELDS.size)[0]:
            return None
        magic, version, state, step, generation, nbytes, capacity, world, has_shared, *texts = _FIELDS.unpack(
            packed
        )
        if magic != _MAGIC or version != _VERSION:
            return None
        name, layout, checksum = (text.rstrip(b"\0").decode(errors="replace") for text in texts)
        shard = Shard(name, step, world, bool(has_shared), generation, layout, nbytes, checksum)
        return Header(shard, capacity, state == _COMPLETE)


SIZE = _FIELDS.size + _CRC.size
"""Bytes of the header that are used."""


def require_name(name: str) -> str:
    """``name`` if it can be a shard's or a layout's, since it becomes part of a file's name.

    Raises:
        ValueError: it cannot.
    """
    if not _NAME.fullmatch(name):
        raise ValueError(f"{name!r} is no name: 1 to 64 letters, digits, '_' or '-' are accepted")
    return name


class SlotFile:
    """A slot that this process has mapped. One writer at a time; see the module for what readers may
    believe."""

    def __init__(self, path: Path, mapped: mmap.mmap) -> None:
        self.path = path
        self._map = mapped

    @staticmethod
    def create(path: Path, shard: str, world: int, capacity: int) -> SlotFile:
        """A new slot with all of its memory taken and touched.

        Raises:
            OSError: the memory is not there (ENOSPC, ENOMEM); nothing is left behind.
        """
        header = Header(Shard(require_name(shard), -1, world, False, -1, "", 0), capacity)
        fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
        try:
            os.posix_fallocate(fd, 0, HEADER + capacity)
            slot = SlotFile(path, mmap.mmap(fd, HEADER + capacity))
            slot._zero()
        except BaseException:
            os.unlink(path)
            raise
        finally:
            os.close(fd)
        slot._put(header)
        return slot

    @staticmethod
    def open(path: Path) -> SlotFile:
        """A slot that exists, with its pages mapped now rather than at the first write.

        Raises:
            CopyError: the file is no slot. OSError: it is not there.
        """
        fd = os.open(path, os.O_RDWR | os.O_CLOEXEC)
        try:
            size = os.fstat(fd).st_size
            if size < HEADER:
                raise CopyError(f"{path} is no slot: it has {size} bytes")
            mapped = mmap.mmap(fd, size)
        finally:
            os.close(fd)
        for at in range(0, size, 8 * BLOCK):
            with contextlib.suppress(OSError):
                mapped.madvise(_POPULATE_WRITE, at, min(8 * BLOCK, size - at))
        return SlotFile(path, mapped)

    @property
    def header(self) -> Header | None:
        """What the slot says now; None while its header is not whole."""
        return Header.unpacked(self._map[:SIZE])

    @property
    def whole(self) -> Shard | None:
        """The shard that is complete here."""
        header = self.header
        return header.shard if header is not None and header.complete else None

    @property
    def capacity(self) -> int:
        return len(self._map) - HEADER

    @property
    def data(self) -> memoryview:
        """The bytes of the step that was begun last (the whole room where none was); writable."""
        header = self.header
        written = header is not None and header.shard.step >= 0
        return self.first(header.shard.nbytes if written and header is not None else self.capacity)

    def first(self, count: int) -> memoryview:
        """The first ``count`` bytes of the data, whatever the header says by now."""
        return memoryview(self._map)[HEADER : HEADER + count]

    def begin(self, shard: Shard) -> None:
        """Declare what was here void: from now on ``shard`` is being written.

        Raises:
            ValueError: more than `capacity` bytes, or a shard that this slot is not for.
        """
        if not 0 <= shard.nbytes <= self.capacity:
            raise ValueError(f"{shard.nbytes} bytes do not fit into a slot of {self.capacity}")
        if shard.name != shard_of(self.path):
            raise ValueError(f"{self.path} is no slot of {shard.name}")
        self._put(Header(replace(shard, checksum=""), self.capacity))

    def complete(self, checksum: str) -> None:
        """The data of the begun step is all there and its xxh3_128 (hexadecimal) is ``checksum``.

        Raises:
            CopyError: no step was begun.
        """
        header = self.header
        if header is None or header.complete or header.shard.step < 0:
            raise CopyError(f"no step is being written to {self.path}")
        self._put(replace(header, shard=replace(header.shard, checksum=checksum), complete=True))

    def relabel(self, generation: int) -> None:
        """The complete step here is that of ``generation``, too, to the last bit."""
        header = self.header
        if header is not None and header.complete:
            self._put(replace(header, shard=replace(header.shard, generation=generation)))

    def close(self) -> None:
        """Unmap it; where somebody still holds a view of `data`, as soon as that is gone."""
        with contextlib.suppress(BufferError):
            self._map.close()

    def _put(self, header: Header) -> None:
        self._map[:SIZE] = header.packed()

    def _zero(self) -> None:
        # By reading zeros into it, not by assignment: the kernel copies while our other threads run.
        with open("/dev/zero", "rb", buffering=0) as zeros:
            for at in range(0, len(self._map), 8 * BLOCK):
                with memoryview(self._map)[at : at + 8 * BLOCK] as part:
                    done = 0
                    while done < len(part):
                        done += zeros.readinto(part[done:]) or 0


def file_name(shard: str, world: int, capacity: int, index: int) -> str:
    """The name of a slot's file."""
    return f"{require_name(shard)}.{world}.{capacity}.{index}.slot"


def shard_of(path: Path) -> str:
    """The shard that a file's name tells."""
    return path.name.split(".")[0]


def load(path: Path, into: memoryview, *, step: int | None = None) -> Shard:
    """Read a complete slot into ``into`` and verify it.

    ``into`` has the length of the data; ``step``: refuse any other one.

    Raises:
        CopyError: torn, corrupt, another step, or another length. OSError: the file is not there.
    """
    with open(path, "rb", buffering=0) as file:
        header = Header.unpacked(os.pread(file.fileno(), SIZE, 0))
        if header is None or not header.complete or step not in (None, header.shard.step):
            raise CopyError(f"{path} holds no complete step{'' if step is None else f' {step}'}")
        shard = header.shard
        if shard.nbytes != len(into):
            raise CopyError(f"{path} holds {shard.nbytes} bytes, {len(into)} are expected")
        hasher = xxhash.xxh3_128()
        at = 0
        while at < len(into):
            count = os.preadv(file.fileno(), [into[at : at + BLOCK]], HEADER + at)
            if count == 0:
                raise CopyError(f"{path} is truncated at byte {HEADER + at}")
            hasher.update(into[at : at + count])
            at += count
    if hasher.hexdigest() != shard.checksum:
        raise CopyError(f"the checksum of step {shard.step} in {path} does not match its data")
    return shard


def checksum_of(view: memoryview) -> str:
    """xxh3_128 of ``view``, hexadecimal, hashed block by block so that other threads run."""
    hasher = xxhash.xxh3_128()
    for at in range(0, len(view), BLOCK):
        hasher.update(view[at : at + BLOCK])
    return hasher.hexdigest()
