"""Process images as pages: how files are cut, compared and addressed, and how an image goes into the store.

An image, a folder of files, is cut into pages of 4096 bytes. The last page of a file is filled up with zeros;
the size of the file, kept beside, cuts it again. So small files are stored by the same means as memory. A
page is addressed by 20 bytes of its SHA-256: a sandbox chooses the bytes of its own memory, so a hash for
which collisions can be made would let it exchange pages of others; and processors of today hash 4 KiB by
SHA-256 faster than by BLAKE2.

Up to 64 pages are compressed together, as a frame. A place is the number of a frame times 64, and the row in
it; place 0 is the page of zeros, which lies nowhere. What an image has that is new goes into frames of its
own, which several threads compress while the next pages are read.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import shutil
import sqlite3
import threading
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import zstandard
from numpy.typing import NDArray

from windtunnel.linux.system import opened
from windtunnel.store.objects.chunks import compress, decompress, in_order
from windtunnel.store.objects.files import ObjectError, checked

PAGE = 4096
DIGEST = 20
FRAME = 64
WINDOW = 1024
"""Pages that are looked at together: bounds the memory that an image of any size needs."""
LEVEL = 3
COPIES_BYTES = 2 * 2**30
"""What the copies of the newest images may hold together."""
_AT_ONCE = 4
"""Frames that are compressed at a time."""
_BLOCK = 64
_SAMPLE = 64
_CHECK = 16
_UNKNOWN = np.int64(-1)

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
    files = []
    with os.scandir(folder) as entries:
        for entry in entries:
            if not entry.is_file(follow_symlinks=False):
                raise ObjectError(f"{entry.path} is no plain file, so it cannot be part of a process image")
            files.append((checked(entry.name), entry.stat().st_size))
    return sorted(files)


def windows(path: Path, size: int) -> Iterator[tuple[int, Pages]]:
    """The pages of a file, some at a time: (number of the first, pages). The array is used again."""
    buffer = np.empty((min(WINDOW, page_count(size)), PAGE), np.uint8)
    flat = buffer.reshape(-1).data
    with opened(path) as file:
        for first in range(0, page_count(size), WINDOW):
            length = min(WINDOW * PAGE, size - first * PAGE)
            if os.preadv(file, [flat[:length]], first * PAGE) != length:
                raise ObjectError(f"{path} is cut short: {size} bytes were expected")
            count = page_count(length)
            flat[length : count * PAGE] = bytes(count * PAGE - length)
            yield first, buffer[:count]


def digests_of(pages: Pages) -> Digests:
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
    empty = np.logical_not(words[:, ::_SAMPLE].any(axis=1))
    likely = empty.nonzero()[0]
    empty[likely] = np.logical_not(words[likely].any(axis=1))
    return empty


def differing(pages: Pages, others: Pages) -> NDArray[np.bool_]:
    """Which of the pages are not equal; in blocks, so that the intermediate result stays in the cache."""
    buffer = np.empty(len(pages), np.bool_)
    left, right = pages.view(np.uint64), others.view(np.uint64)
    for at in range(0, len(pages), _BLOCK):
        (left[at : at + _BLOCK] != right[at : at + _BLOCK]).any(axis=1, out=buffer[at : at + _BLOCK])
    return buffer


class Copies:
    """The newest images as CRIU wrote them, so that a restore or a fork soon after costs links, not reads.

    They are taken in, and given out, by hard links, and nobody writes to them; what is restored from one is
    hashed while CRIU already reads it. What an earlier process has left is dropped: after a crash of the
    host, files that were never synced may hold anything. The oldest go when all hold more than
    `COPIES_BYTES`.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._lock = threading.Lock()
        self._sizes: dict[str, int] = {}
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir(parents=True)

    def put(self, id: str, images: Path) -> None:
        """Take the files of ``images`` in; silently not, when links cannot be made there."""
        try:
            size = sum(size for _, size in files_in(images))
            (self._folder / id).mkdir(mode=0o700)
            _link_all(images, self._folder / id)
        except FileExistsError:
            return  # another thread has put it here meanwhile
        except OSError:
            return self.forget(id)
        with self._lock:
            self._sizes[id] = size
        for oldest in list(self._sizes):
            if sum(list(self._sizes.values())) <= COPIES_BYTES:
                break
            self.forget(oldest)

    def folder(self, id: str) -> Path | None:
        """The files of an image."""
        return self._folder / id if id in self._sizes else None

    def give(self, id: str, into: Path) -> bool:
        """Link the files of an image into ``into``; False, with nothing left, when it is not to be had."""
        if id not in self._sizes:
            return False
        try:
            _link_all(self._folder / id, into)
        except OSError:
            for file in into.iterdir():
                file.unlink()
            return False
        return True

    def forget_all(self) -> None:
        for id in list(self._sizes):
            self.forget(id)

    def forget(self, id: str) -> None:
        with self._lock:
            self._sizes.pop(id, None)
        shutil.rmtree(self._folder / id, ignore_errors=True)


def _link_all(images: Path, into: Path) -> None:
    for name, _ in files_in(images):
        os.link(images / name, into / name)


Earlier = Mapping[str, tuple[Path, Places]]
"""The files of a folder that is surely an image, and where the whole pages of each lie in the store."""


class Writer:
    """Puts one image into the store. ``db``: in a transaction. A page that equals the one in the same place
    of an ``earlier`` image is not even hashed."""

    def __init__(self, db: sqlite3.Connection, earlier: Earlier) -> None:
        self._db, self._earlier = db, earlier
        (last,) = db.execute("SELECT max(id) FROM frame").fetchone()
        self._first = int(last or 0) + 1
        self._sums: list[bytes] = []
        """The digests of its new pages."""
        self._mine: dict[bytes, int] = {}
        self._places: list[Places] = []

    def add(self, id: str, images: Path) -> int:
        """Returns bytes of the image. Raises sqlite3.IntegrityError: there is one of that name."""
        files = files_in(images)
        frames = _in_frames(self._fresh(images, files))
        packed = in_order(lambda pages: compress(pages.reshape(-1).data, LEVEL), frames, _AT_ONCE)
        for number, data in enumerate(packed):
            # the digests of a frame are known before it is handed on
            digests = b"".join(self._sums[number * FRAME : (number + 1) * FRAME])
            self._db.execute("INSERT INTO frame VALUES(?,?,?)", (self._first + number, digests, data))
        self._db.executemany("INSERT INTO page VALUES(?,?)", sorted(self._mine.items()))
        places = np.concatenate([np.empty(0, np.int64), *self._places])
        self._db.execute("INSERT INTO image VALUES(?,?)", (id, Recipe(tuple(files), places).pack(id)))
        return sum(size for _, size in files)

    def _fresh(self, images: Path, files: Sequence[tuple[str, int]]) -> Iterator[Pages]:
        """Pages that the store has not, in the order of their digests."""
        for name, size in files:
            with contextlib.ExitStack() as stack:
                path, known = self._earlier.get(name, (None, np.empty(0, np.int64)))
                file = -1
                if path is not None:
                    with contextlib.suppress(FileNotFoundError):  # forgotten meanwhile
                        file = stack.enter_context(opened(path))
                for first, pages in windows(images / name, size):
                    yield self._placed(pages, _same(pages, file, first, known[first : first + len(pages)]))

    def _placed(self, pages: Pages, places: Places) -> Pages:
        """Find the places of pages, some of which are known; a copy of those that get new ones."""
        rest = np.flatnonzero(places == _UNKNOWN)
        left = pages if len(rest) == len(pages) else pages[rest]
        empty = zeros(left)
        places[rest[empty]] = 0
        if empty.any():
            rest, left = rest[~empty], left[~empty]
        fresh = []
        digests = [digest.tobytes() for digest in digests_of(left)]
        stored = self._stored(digests)
        for row, digest in enumerate(digests):
            if (place := stored.get(digest) or self._mine.get(digest)) is None:
                place = self._mine[digest] = self._first * FRAME + len(self._sums)
                self._sums.append(digest)
                fresh.append(row)
            places[rest[row]] = place
        self._places.append(places)
        return left[fresh]

    def _stored(self, digests: Sequence[bytes]) -> dict[bytes, int]:
        """Places of those pages that the store has."""
        marks = ",".join("?" * len(digests))
        return dict(self._db.execute(f"SELECT digest, place FROM page WHERE digest IN ({marks})", digests))


def _in_frames(some: Iterable[Pages]) -> Iterator[Pages]:
    """The same pages, as many at a time as a frame holds."""
    loose = np.empty((0, PAGE), np.uint8)
    for pages in some:
        loose = np.concatenate([loose, pages]) if len(loose) else pages
        while len(loose) >= FRAME:
            yield loose[:FRAME]
            loose = loose[FRAME:]
    if len(loose):
        yield loose


def _same(pages: Pages, file: int, first: int, known: Places) -> Places:
    """The places ``known`` of those pages that are in a file, -1 for none, as they were from page ``first``
    on; ``_UNKNOWN`` for the others."""
    same = np.full(len(pages), _UNKNOWN)
    if file >= 0 and len(known):
        other = np.empty((len(known), PAGE), np.uint8)
        if os.preadv(file, [other.reshape(-1).data], first * PAGE) == other.nbytes:
            same[: len(known)] = np.where(differing(pages[: len(known)], other), _UNKNOWN, known)
    return same
