"""The file of one image: the pages that were new with it, and the recipe of all its pages.

Layout: zstd frames of up to 64 pages each; the *index* (where each frame lies, the number of each page and
its digest); the *recipe* (names and sizes of the image's files, and for every page of theirs its place); a
footer with the places and checksums of both. A place is the number of a pack in the recipe's own list, in the
high half, and the number of a page in that pack. A file is written once and published by a rename, so there
is no append that a crash could tear, and no index beside it that could disagree.

A pack may later be replaced by one with the same name and fewer pages. Page numbers stay, so recipes that
point into it need no change.
"""

from __future__ import annotations

import hashlib
import json
import os
import struct
import threading
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import zstandard
from numpy.typing import NDArray

from windtunnel.agents.sandbox.live.images.fault import ImageError, checked_id
from windtunnel.agents.sandbox.live.images.pages import DIGEST, PAGE, Pages, digests, page_count, read_exactly

FRAME = 64
"""Pages that are compressed together."""
ZERO = np.uint64(2**64 - 1)
"""Place of a page of zeros, which lies nowhere."""
LEVEL = 3

_MAGIC = b"WTPACK01"
_SECTIONS = struct.Struct("<QQ16sQQ16s")
_FOOTER = _SECTIONS.size + 16 + len(_MAGIC)
_FRAMES = np.dtype([("at", "<u8"), ("bytes", "<u4"), ("pages", "<u4")])
_LENGTH = struct.Struct("<Q")
_own = threading.local()

Places = NDArray[np.uint64]


@dataclass(frozen=True)
class Recipe:
    """How an image is put together. ``packs[0]`` is the pack that was written with it."""

    id: str
    files: tuple[tuple[str, int], ...]
    packs: tuple[str, ...]
    places: Places


@dataclass(frozen=True)
class Index:
    """Which pages a pack holds: ``numbers`` ascend; ``starts`` says which of them begins each frame."""

    frames: NDArray[Any]
    numbers: NDArray[np.uint32]
    digests: NDArray[np.uint8]
    starts: NDArray[np.int64]


def check(data: bytes) -> bytes:
    return hashlib.blake2b(data, digest_size=16).digest()


def compress(data: bytes | memoryview | Pages) -> bytes:
    """One zstd frame. Compressors are kept, one a thread: making one costs more than a small frame."""
    if not hasattr(_own, "compressor"):
        _own.compressor = zstandard.ZstdCompressor(level=LEVEL)
    packed: bytes = _own.compressor.compress(data)
    return packed


def decompress(data: bytes, size: int) -> bytes:
    """The plain bytes of a frame, which must be ``size`` many."""
    if not hasattr(_own, "decompressor"):
        _own.decompressor = zstandard.ZstdDecompressor()
    # the size that the frame claims is not trusted with an allocation
    if zstandard.frame_content_size(data) != size:
        raise zstandard.ZstdError("another size than expected")
    plain: bytes = _own.decompressor.decompress(data)
    return plain


def tail(
    at: int, frames: list[tuple[int, int]], numbers: NDArray[np.uint32], sums: bytes, recipe: Recipe
) -> bytes:
    """Everything after the frames, which end at ``at``. ``frames``: bytes and pages of each, in order."""
    table = np.zeros(len(frames), _FRAMES)
    if frames:
        table["bytes"], table["pages"] = np.array(frames).T
        table["at"] = table["bytes"].cumsum(dtype=np.uint64) - table["bytes"]
    index = _joined(compress(table.tobytes()), _steps(numbers.astype(np.uint64)), sums)
    head = json.dumps({"id": recipe.id, "files": recipe.files, "packs": recipe.packs}).encode()
    cooked = _joined(compress(head), _steps(recipe.places))
    sections = _SECTIONS.pack(at, len(index), check(index), at + len(index), len(cooked), check(cooked))
    return index + cooked + sections + check(sections) + _MAGIC


class Pack:
    """A pack that is open for reading. Every error names the file and what in it is damaged."""

    def __init__(
        self, name: str, size: int, read: Callable[[int, int], bytes], close: Callable[[], object]
    ) -> None:
        """``read(offset, length)`` gives exactly that many bytes, or raises."""
        self.name, self.size = name, size
        self._bytes, self.close = read, close
        try:
            footer = self._read(self.size - _FOOTER, _FOOTER, "footer")
            sections = footer[: _SECTIONS.size]
            if footer[_SECTIONS.size :] != check(sections) + _MAGIC:
                raise ImageError(f"pack {name} is damaged: its footer does not match its checksum")
            self._sections = _SECTIONS.unpack(sections)
        except BaseException:
            self.close()
            raise

    def __enter__(self) -> Pack:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def index(self) -> Index:
        table, numbers, sums = self._section(*self._sections[:3], name="index", count=3)
        try:
            frames = np.frombuffer(_plain(table), _FRAMES)
            starts = np.concatenate([[0], frames["pages"].cumsum(dtype=np.int64)])
            rows = np.frombuffer(sums, np.uint8).reshape(-1, DIGEST)
            pages = _from_steps(numbers).astype(np.uint32)
        except (ValueError, zstandard.ZstdError) as error:
            raise ImageError(f"pack {self.name} is damaged: its index ({error})") from None
        if not starts[-1] == len(rows) == len(pages) or (frames["pages"] > FRAME).any():
            raise ImageError(f"pack {self.name} is damaged: its index contradicts itself")
        return Index(frames, pages, rows, starts)

    def recipe(self) -> Recipe:
        head, steps = self._section(*self._sections[3:], name="recipe", count=2)
        try:
            plain = json.loads(_plain(head))
            files = tuple((checked_id(str(name)), int(size)) for name, size in plain["files"])
            packs = tuple(checked_id(str(name)) for name in plain["packs"])
            places = _from_steps(steps)
            id = str(plain["id"])
        except (ValueError, KeyError, TypeError, zstandard.ZstdError) as error:
            raise ImageError(f"pack {self.name} is damaged: its recipe ({error})") from None
        some = places[places != ZERO] >> np.uint64(32)
        if len(places) != sum(page_count(size) for _, size in files) or (some >= len(packs)).any():
            raise ImageError(f"pack {self.name} is damaged: its recipe contradicts itself")
        return Recipe(id, files, packs, places)

    def frame(self, index: Index, number: int) -> Pages:
        """The pages of one frame, not yet checked against their digests."""
        at, length, pages = (int(value) for value in index.frames[number])
        try:
            plain = decompress(self._read(at, length, f"frame {number}"), pages * PAGE)
        except zstandard.ZstdError as error:
            raise ImageError(f"pack {self.name} is damaged: frame {number} at byte {at} ({error})") from None
        return np.frombuffer(plain, np.uint8).reshape(pages, PAGE)

    def frames_of(self, index: Index, numbers: NDArray[np.uint32]) -> Iterable[tuple[int, Any, Any]]:
        """Where the pages ``numbers`` lie: (frame, which of ``numbers``, their rows in the frame)."""
        rows = np.searchsorted(index.numbers, numbers)
        held = rows < len(index.numbers)
        held[held] = index.numbers[rows[held]] == numbers[held]
        if not held.all():
            raise ImageError(f"pack {self.name} does not hold page {numbers[~held][0]}, which is needed")
        frame = np.searchsorted(index.starts, rows, side="right") - 1
        order = np.argsort(frame, kind="stable")
        cuts = np.flatnonzero(np.diff(frame[order])) + 1
        for which in np.split(order, cuts) if len(order) else []:
            number = int(frame[which[0]])
            yield number, which, rows[which] - index.starts[number]

    def pages(self, index: Index, number: int, rows: NDArray[np.int64]) -> Pages:
        """Some pages of one frame, each checked."""
        found = self.frame(index, number)
        if not np.array_equal(rows, np.arange(len(found))):
            found = found[rows]
        wrong = (digests(found) != index.digests[index.starts[number] + rows]).any(axis=1)
        if wrong.any():
            page = index.numbers[index.starts[number] + rows[wrong][0]]
            raise ImageError(f"pack {self.name} is damaged: page {page} does not match its digest")
        return found

    def _section(self, at: int, length: int, seal: bytes, *, name: str, count: int) -> list[bytes]:
        data = self._read(at, length, name)
        if check(data) != seal:
            raise ImageError(f"pack {self.name} is damaged: its {name} does not match its checksum")
        return _split(data, count)

    def _read(self, at: int, length: int, name: str) -> bytes:
        if at < 0 or at + length > self.size:
            raise ImageError(f"pack {self.name} is cut short: its {name} is not there")
        return self._bytes(at, length)


def opened(path: Path) -> Pack:
    """A pack on this machine."""
    try:
        file = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    except FileNotFoundError:
        raise ImageError(f"pack {path} is missing") from None

    def read(at: int, length: int) -> bytes:
        data = bytearray(length)
        read_exactly(file, memoryview(data), at, str(path))
        return bytes(data)

    return Pack(str(path), os.fstat(file).st_size, read, lambda: os.close(file))


def _plain(data: bytes) -> bytes:
    return decompress(data, zstandard.frame_content_size(data))


def _steps(values: Places) -> bytes:
    """Numbers as differences: places mostly follow one another, so that little is left to store."""
    return compress(np.diff(values, prepend=np.uint64(0)).astype("<u8").tobytes())


def _from_steps(data: bytes) -> Places:
    return np.frombuffer(_plain(data), "<u8").cumsum(dtype=np.uint64)


def _joined(*parts: bytes) -> bytes:
    return b"".join(_LENGTH.pack(len(part)) + part for part in parts)


def _split(data: bytes, count: int) -> list[bytes]:
    parts = []
    for _ in range(count):
        (length,) = _LENGTH.unpack_from(data)
        parts.append(data[_LENGTH.size : _LENGTH.size + length])
        data = data[_LENGTH.size + length :]
    return parts
