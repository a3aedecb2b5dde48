"""The file of one image: the pages that were new with it, and the recipe of all its pages.

An image, a folder of files, is cut into pages of 4096 bytes. The last page of a file is filled up with zeros;
the size of the file, kept beside, cuts it again. So small files are stored by the same means as memory. A
page is addressed by 20 bytes of its SHA-256: a sandbox chooses the bytes of its own memory, so a hash for
which collisions can be made would let it exchange pages of others; and processors of today hash 4 KiB by
SHA-256 faster than by BLAKE2.

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
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import zstandard
from numpy.typing import NDArray

from windtunnel.store.objects.chunks import compress, decompress
from windtunnel.store.objects.files import ObjectError, checked

PAGE = 4096
DIGEST = 20
WINDOW = 1024
"""Pages that are looked at together: bounds the memory that an image of any size needs."""
FRAME = 64
"""Pages that are compressed together."""
ZERO = np.uint64(2**64 - 1)
"""Place of a page of zeros, which lies nowhere."""
LEVEL = 3

_SAMPLE = 64
_BLOCK = 64
_MAGIC = b"WTPACK01"
_SECTIONS = struct.Struct("<QQ16sQQ16s")
_FOOTER = _SECTIONS.size + 16 + len(_MAGIC)
_FRAMES = np.dtype([("at", "<u8"), ("bytes", "<u4"), ("pages", "<u4")])
_LENGTH = struct.Struct("<Q")

Pages = NDArray[np.uint8]
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


def tail(
    at: int, frames: list[tuple[int, int]], numbers: NDArray[np.uint32], sums: bytes, recipe: Recipe
) -> bytes:
    """Everything after the frames, which end at ``at``. ``frames``: bytes and pages of each, in order."""
    table = np.zeros(len(frames), _FRAMES)
    if frames:
        table["bytes"], table["pages"] = np.array(frames).T
        table["at"] = table["bytes"].cumsum(dtype=np.uint64) - table["bytes"]
    index = _joined(compress(table.tobytes(), LEVEL), _steps(numbers.astype(np.uint64)), sums)
    head = json.dumps({"id": recipe.id, "files": recipe.files, "packs": recipe.packs}).encode()
    cooked = _joined(compress(head, LEVEL), _steps(recipe.places))
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
                raise ObjectError(f"pack {name} is damaged: its footer does not match its checksum")
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
            raise ObjectError(f"pack {self.name} is damaged: its index ({error})") from None
        if not starts[-1] == len(rows) == len(pages) or (frames["pages"] > FRAME).any():
            raise ObjectError(f"pack {self.name} is damaged: its index contradicts itself")
        return Index(frames, pages, rows, starts)

    def recipe(self) -> Recipe:
        head, steps = self._section(*self._sections[3:], name="recipe", count=2)
        try:
            plain = json.loads(_plain(head))
            files = tuple((checked(str(name)), int(size)) for name, size in plain["files"])
            packs = tuple(checked(str(name)) for name in plain["packs"])
            places = _from_steps(steps)
            id = str(plain["id"])
        except (ValueError, KeyError, TypeError, zstandard.ZstdError) as error:
            raise ObjectError(f"pack {self.name} is damaged: its recipe ({error})") from None
        some = places[places != ZERO] >> np.uint64(32)
        if len(places) != sum(page_count(size) for _, size in files) or (some >= len(packs)).any():
            raise ObjectError(f"pack {self.name} is damaged: its recipe contradicts itself")
        return Recipe(id, files, packs, places)

    def frame(self, index: Index, number: int) -> Pages:
        """The pages of one frame, not yet checked against their digests."""
        at, length, pages = (int(value) for value in index.frames[number])
        try:
            plain = decompress(self._read(at, length, f"frame {number}"), pages * PAGE)
        except zstandard.ZstdError as error:
            raise ObjectError(f"pack {self.name} is damaged: frame {number} at byte {at} ({error})") from None
        return np.frombuffer(plain, np.uint8).reshape(pages, PAGE)

    def frames_of(self, index: Index, numbers: NDArray[np.uint32]) -> Iterable[tuple[int, Any, Any]]:
        """Where the pages ``numbers`` lie: (frame, which of ``numbers``, their rows in the frame)."""
        rows = np.searchsorted(index.numbers, numbers)
        held = rows < len(index.numbers)
        held[held] = index.numbers[rows[held]] == numbers[held]
        if not held.all():
            raise ObjectError(f"pack {self.name} does not hold page {numbers[~held][0]}, which is needed")
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
            raise ObjectError(f"pack {self.name} is damaged: page {page} does not match its digest")
        return found

    def _section(self, at: int, length: int, seal: bytes, *, name: str, count: int) -> list[bytes]:
        data = self._read(at, length, name)
        if check(data) != seal:
            raise ObjectError(f"pack {self.name} is damaged: its {name} does not match its checksum")
        return _split(data, count)

    def _read(self, at: int, length: int, name: str) -> bytes:
        if at < 0 or at + length > self.size:
            raise ObjectError(f"pack {self.name} is cut short: its {name} is not there")
        return self._bytes(at, length)


def opened(path: Path, *, cold: bool = False) -> Pack:
    """A pack on this machine. ``cold``: read from the disk, not from what the kernel remembers of it."""
    try:
        file = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    except FileNotFoundError:
        raise ObjectError(f"pack {path} is missing") from None
    if cold:
        os.posix_fadvise(file, 0, 0, os.POSIX_FADV_DONTNEED)

    def read(at: int, length: int) -> bytes:
        data = bytearray(length)
        read_exactly(file, memoryview(data), at, str(path))
        return bytes(data)

    return Pack(str(path), os.fstat(file).st_size, read, lambda: os.close(file))


def _plain(data: bytes) -> bytes:
    return decompress(data, zstandard.frame_content_size(data))


def _steps(values: Places) -> bytes:
    """Numbers as differences: places mostly follow one another, so that little is left to store."""
    return compress(np.diff(values, prepend=np.uint64(0)).astype("<u8").tobytes(), LEVEL)


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


def page_count(size: int) -> int:
    return -(-size // PAGE)


def files_in(folder: Path) -> list[tuple[str, int]]:
    """Names and sizes of the files of an image, sorted by name."""
    found = []
    with os.scandir(folder) as entries:
        for entry in entries:
            if not entry.is_file(follow_symlinks=False):
                raise ObjectError(f"{entry.path} is no plain file, so it cannot be part of a process image")
            found.append((entry.name, entry.stat().st_size))
    return sorted(found)


def windows(path: Path, size: int) -> Iterator[tuple[int, Pages]]:
    """The pages of a file, some at a time: (number of the first, pages). The array is used again."""
    buffer = np.empty((min(WINDOW, page_count(size)), PAGE), np.uint8)
    flat = buffer.reshape(-1).data
    file = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        for first in range(0, page_count(size), WINDOW):
            wanted = min(WINDOW * PAGE, size - first * PAGE)
            read_exactly(file, flat[:wanted], first * PAGE, str(path))
            count = page_count(wanted)
            flat[wanted : count * PAGE] = bytes(count * PAGE - wanted)
            yield first, buffer[:count]
    finally:
        os.close(file)


def read_exactly(file: int, into: memoryview, at: int, name: str) -> None:
    """Fill ``into`` from offset ``at``; ObjectError when the file is shorter."""
    done = 0
    while done < len(into):
        count = os.preadv(file, [into[done:]], at + done)
        if count == 0:
            raise ObjectError(
                f"{name} is cut short: {at + len(into)} bytes were expected, {at + done} are there"
            )
        done += count


def digests(pages: Pages) -> NDArray[np.uint8]:
    """The address of each page, one a row."""
    flat = pages.reshape(-1).data
    sha256 = hashlib.sha256
    whole = b"".join(
        [sha256(flat[at : at + PAGE], usedforsecurity=False).digest() for at in range(0, len(flat), PAGE)]
    )
    return np.frombuffer(whole, np.uint8).reshape(-1, 32)[:, :DIGEST].copy()


def zeros(pages: Pages) -> NDArray[np.bool_]:
    """Which pages hold nothing but zeros."""
    words = pages.view(np.uint64)
    found = np.logical_not(words[:, ::_SAMPLE].any(axis=1))
    likely = found.nonzero()[0]
    found[likely] = np.logical_not(words[likely].any(axis=1))
    return found


def differing(pages: Pages, others: Pages) -> NDArray[np.bool_]:
    """Which of the pages are not equal; in blocks, so that the intermediate result stays in the cache."""
    found = np.empty(len(pages), np.bool_)
    left, right = pages.view(np.uint64), others.view(np.uint64)
    for at in range(0, len(pages), _BLOCK):
        (left[at : at + _BLOCK] != right[at : at + _BLOCK]).any(axis=1, out=found[at : at + _BLOCK])
    return found
