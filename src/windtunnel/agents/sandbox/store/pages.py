"""Process images as pages: how files are cut, compared and addressed, and how an image is put together.

An image, a folder of files, is cut into pages of 4096 bytes. The last page of a file is filled up with zeros;
the size of the file, kept beside, cuts it again. So small files are stored by the same means as memory. A
page is addressed by 20 bytes of its SHA-256: a sandbox chooses the bytes of its own memory, so a hash for
which collisions can be made would let it exchange pages of others; and processors of today hash 4 KiB by
SHA-256 faster than by BLAKE2.

Up to 64 pages are compressed together, as a frame. A place is the number of a frame times 64, and the row in
it; place 0 is the page of zeros, which lies nowhere.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import zstandard
from numpy.typing import NDArray

from windtunnel.store.objects.chunks import compress, decompress
from windtunnel.store.objects.files import ObjectError, checked

PAGE = 4096
DIGEST = 20
FRAME = 64
WINDOW = 1024
"""Pages that are looked at together: bounds the memory that an image of any size needs."""
LEVEL = 3
_BLOCK = 64
_SAMPLE = 64
_CHECK = 16

Pages = NDArray[np.uint8]
Digests = NDArray[np.uint8]
Places = NDArray[np.int64]


@dataclass(frozen=True)
class Recipe:
    """How an image is put together: names and sizes of its files, and the place of every page of theirs."""

    files: tuple[tuple[str, int], ...]
    places: Places

    def pack(self, id: str) -> bytes:
        """Places mostly follow one another, so their differences leave little to store."""
        head = json.dumps(self.files).encode()
        steps = np.diff(self.places, prepend=np.int64(0)).astype("<i8").tobytes()
        body = compress(len(head).to_bytes(8, "little") + head + steps, LEVEL)
        return _seal(id, body) + body

    @staticmethod
    def unpack(id: str, data: bytes) -> Recipe:
        try:
            if data[:_CHECK] != _seal(id, data[_CHECK:]):
                raise ValueError("it does not match its checksum")
            body = decompress(data[_CHECK:], zstandard.frame_content_size(data[_CHECK:]))
            size = int.from_bytes(body[:8], "little")
            files = tuple((checked(str(name)), int(bytes)) for name, bytes in json.loads(body[8 : 8 + size]))
            places = np.frombuffer(body[8 + size :], "<i8").cumsum(dtype=np.int64)
        except (ValueError, TypeError, zstandard.ZstdError) as error:
            raise ObjectError(f"the recipe of image {id} is damaged: {error}") from None
        return Recipe(files, places)

    def begins(self) -> Iterator[tuple[str, int, int]]:
        """Name and size of each file, and the number of its first page."""
        first = 0
        for name, size in self.files:
            yield name, size, first
            first += page_count(size)

    def frames(self) -> list[int]:
        """Numbers of the frames that hold its pages, in order."""
        used = self.places[self.places != 0]
        return [int(number) for number in np.unique(used // FRAME)]


def _seal(id: str, body: bytes) -> bytes:
    return hashlib.blake2b(id.encode() + b"\0" + body, digest_size=_CHECK).digest()


def by_frame(places: Places) -> Iterator[tuple[int, NDArray[np.intp]]]:
    """Frames that hold pages of these places, and which of ``places`` are theirs."""
    used = np.flatnonzero(places)
    order = used[np.argsort(places[used], kind="stable")]
    number = places[order] // FRAME
    for which in np.split(order, np.flatnonzero(np.diff(number)) + 1) if len(order) else []:
        yield int(places[which[0]] // FRAME), which


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
            if os.preadv(file, [flat[:wanted]], first * PAGE) != wanted:
                raise ObjectError(f"{path} is cut short: {size} bytes were expected")
            count = page_count(wanted)
            flat[wanted : count * PAGE] = bytes(count * PAGE - wanted)
            yield first, buffer[:count]
    finally:
        os.close(file)


def digests_of(pages: Pages) -> Digests:
    """The address of each page, one a row."""
    flat = pages.reshape(-1).data
    sha256 = hashlib.sha256
    whole = b"".join(
        [sha256(flat[at : at + PAGE], usedforsecurity=False).digest() for at in range(0, len(flat), PAGE)]
    )
    return np.frombuffer(whole, np.uint8).reshape(-1, 32)[:, :DIGEST].copy()


def keys_of(digests: Digests) -> list[int]:
    """What each digest is looked up by."""
    return [int(key) for key in np.ascontiguousarray(digests[:, :8]).view("<i8")[:, 0]]


def zeros(pages: Pages) -> NDArray[np.bool_]:
    """Which pages hold nothing but zeros."""
    words = pages.view(np.uint64)
    found = np.logical_not(words[:, ::_SAMPLE].any(axis=1))
    likely = found.nonzero()[0]
    found[likely] = np.logical_not(words[likely].any(axis=1))
    return found


def differing(pages: Pages, others: Pages) -> NDArray[np.bool_]:
    """Which of the pages are not equal; in blocks, so that the intermediate result stays in the cache."""
    buffer = np.empty(len(pages), np.bool_)
    left, right = pages.view(np.uint64), others.view(np.uint64)
    for at in range(0, len(pages), _BLOCK):
        (left[at : at + _BLOCK] != right[at : at + _BLOCK]).any(axis=1, out=buffer[at : at + _BLOCK])
    return buffer
