"""Put one image into the store: find its new pages while it is read, compress them, and write its recipe.

What is new goes into frames of its own, compressed by several threads. Frames of a large image are written in
transactions on the way, so that memory stays bounded; nothing refers to them before the last one, which also
has the digests and the recipe.
"""

from __future__ import annotations

import contextlib
import os
import sqlite3
from collections import deque
from collections.abc import Callable, Collection, Iterator, Sequence
from concurrent.futures import Executor, Future
from pathlib import Path
from typing import Any

import numpy as np

from windtunnel.agents.sandbox.store.database import Database
from windtunnel.agents.sandbox.store.pages import (
    DIGEST,
    FRAME,
    LEVEL,
    PAGE,
    Digests,
    Pages,
    Places,
    Recipe,
    differing,
    digests_of,
    files_in,
    keys_of,
    windows,
    zeros,
)
from windtunnel.store.objects.chunks import compress

_UNKNOWN = np.int64(-1)
_WAITING = 16
"""Frames that may wait for their compression."""
_READY = 16 << 20
"""Bytes of compressed frames that may wait for their transaction."""

Before = tuple[Path, Recipe]
"""A folder that is surely the image of this recipe."""


class Writer:
    """``number`` gives a frame that nobody else has; no page of the frames ``damaged`` is built upon."""

    def __init__(
        self, database: Database, jobs: Executor, number: Callable[[], int], damaged: Collection[int]
    ) -> None:
        self._database, self._jobs, self._number, self._damaged = database, jobs, number, damaged
        self._frames: list[int] = []
        self._mine: dict[bytes, int] = {}
        self._sums: list[bytes] = []
        self._held: dict[int, bytes] = {}
        self._places: list[Places] = []
        self._loose: list[Pages] = []
        self._emitted = 0
        self._waiting: deque[tuple[int, bytes, Future[bytes]]] = deque()
        self._ready: list[tuple[int, bytes, bytes]] = []
        self._spilled = False
        self.bytes_new = 0

    def keep(self, id: str, images: Path, before: Before | None) -> int:
        """Returns bytes of the image. What was written on the way is removed again when this raises."""
        files = files_in(images)
        try:
            for name, size in files:
                with _Earlier(before, name) as earlier:
                    for first, pages in windows(images / name, size):
                        self._add(pages, earlier.same(first, pages, self._damaged))
            self._emit(last=True)
            while self._waiting:
                self._take()
            places = np.concatenate(self._places) if self._places else np.empty(0, np.int64)
            self._finish(id, Recipe(tuple(files), places).pack(id))
        except BaseException:
            for _, _, job in self._waiting:
                job.cancel()
            if self._spilled:
                gone = [(number,) for number in self._frames]
                with contextlib.suppress(OSError), self._database.writing() as db:
                    db.executemany("DELETE FROM frame WHERE id=?", gone)
            with contextlib.suppress(OSError):  # what was begun of it gives its room back
                self._database.settle(whole=True)
            raise
        return sum(size for _, size in files)

    def _add(self, pages: Pages, places: Places) -> None:
        rest = np.flatnonzero(places == _UNKNOWN)
        left = pages if len(rest) == len(pages) else pages[rest]
        empty = zeros(left)
        places[rest[empty]] = 0
        if empty.any():
            rest, left = rest[~empty], left[~empty]
        if len(rest):
            digests = digests_of(left)
            fresh = []
            for row, place in enumerate(self._stored(digests)):
                if not place:
                    key = digests[row].tobytes()
                    place = self._mine.get(key, 0)
                    if not place:
                        place = self._mine[key] = self._next(key)
                        fresh.append(row)
                places[rest[row]] = place
            if fresh:
                self._loose.append(left[fresh])
                self._emit(last=False)
        self._places.append(places)

    def _next(self, key: bytes) -> int:
        if len(self._sums) % FRAME == 0:
            self._frames.append(self._number())
        self._sums.append(key)
        return self._frames[-1] * FRAME + (len(self._sums) - 1) % FRAME

    def _stored(self, digests: Digests) -> list[int]:
        """Places of pages that the store has; 0: it has not. A key is only part of a digest, so what it leads
        to is compared."""
        keys = keys_of(digests)
        with self._database.reading() as db:
            found = _chosen(db, "SELECT key, place FROM page WHERE key IN", keys)
            wanted = {place // FRAME for place in found.values()} - self._held.keys()
            self._held |= _chosen(db, "SELECT id, digests FROM frame WHERE id IN", list(wanted))
        places = []
        for row, key in enumerate(keys):
            frame, at = divmod(found.get(key, 0), FRAME)
            held = self._held.get(frame, b"")[at * DIGEST : (at + 1) * DIGEST]
            whole = held == digests[row].tobytes() and frame not in self._damaged
            places.append(frame * FRAME + at if whole else 0)
        return places

    def _emit(self, *, last: bool) -> None:
        """Hand on full frames, and the last one, to be compressed."""
        count = sum(map(len, self._loose))
        if not count or (count < FRAME and not last):
            return
        pages = np.concatenate(self._loose)
        full = count if last else count // FRAME * FRAME
        for at in range(0, full, FRAME):
            some = pages[at : min(at + FRAME, full)]
            begin = self._emitted * FRAME
            sums = b"".join(self._sums[begin : begin + len(some)])
            job = self._jobs.submit(compress, some.reshape(-1).data, LEVEL)
            self._waiting.append((self._frames[self._emitted], sums, job))
            self._emitted += 1
            if len(self._waiting) > _WAITING:
                self._take()
        self._loose = [pages[full:]] if full < count else []

    def _take(self) -> None:
        number, sums, job = self._waiting.popleft()
        self._ready.append((number, sums, job.result()))
        if sum(len(data) for _, _, data in self._ready) > _READY:
            with self._writing():
                pass
            self._spilled = True
            self._database.settle()

    def _finish(self, id: str, recipe: bytes) -> None:
        digests = np.frombuffer(b"".join(self._sums), np.uint8).reshape(-1, DIGEST)
        rows = sorted(zip(keys_of(digests), self._mine.values(), strict=True))
        with self._writing() as db:
            db.executemany("INSERT OR REPLACE INTO page VALUES(?,?)", rows)
            db.execute("INSERT INTO image VALUES(?,?)", (id, recipe))

    @contextlib.contextmanager
    def _writing(self) -> Iterator[sqlite3.Connection]:
        """A transaction that writes the frames that are ready; how much it added is counted."""
        with self._database.writing() as db:
            used = self._database.used(db)
            db.executemany("INSERT INTO frame VALUES(?,?,?)", self._ready)
            yield db
            self.bytes_new += self._database.used(db) - used
        self._ready.clear()


class _Earlier:
    """A file of the image before: which pages of the new one are the same, and where those lie."""

    def __init__(self, before: Before | None, name: str) -> None:
        self._places, self._file = np.empty(0, np.int64), -1
        if before is not None:
            for other, size, first in before[1].begins():
                if other == name:
                    # a last page that is not full is hashed like a new one
                    self._places = before[1].places[first : first + size // PAGE]
        if before is not None and len(self._places):
            with contextlib.suppress(FileNotFoundError):
                self._file = os.open(before[0] / name, os.O_RDONLY | os.O_CLOEXEC)

    def __enter__(self) -> _Earlier:
        return self

    def __exit__(self, *_: object) -> None:
        if self._file >= 0:
            os.close(self._file)

    def same(self, first: int, pages: Pages, damaged: Collection[int]) -> Places:
        """Places of the pages that are as before; ``_UNKNOWN`` for the others."""
        found = np.full(len(pages), _UNKNOWN)
        places = self._places[first : first + len(pages)]
        if self._file < 0 or not len(places):
            return found
        other = np.empty((len(places), PAGE), np.uint8)
        if os.preadv(self._file, [other.reshape(-1).data], first * PAGE) == other.nbytes:
            found[: len(places)] = np.where(differing(pages[: len(places)], other), _UNKNOWN, places)
            if damaged:
                frames = np.fromiter(damaged, np.int64)
                found[np.isin(found // FRAME, frames)] = _UNKNOWN
        return found


def _chosen(db: sqlite3.Connection, query: str, keys: Sequence[int]) -> dict[int, Any]:
    marks = ",".join("?" * len(keys))
    return dict(db.execute(f"{query} ({marks})", keys).fetchall())
