"""Put one image into the store: find its new pages while it is read, compress them, and write its recipe.

What is new goes into frames of its own, compressed by several threads while the next pages are read. All of
it is one transaction of the caller's: what SQLite does not hold of it in memory lies in its log.
"""

from __future__ import annotations

import contextlib
import os
import sqlite3
from collections import deque
from collections.abc import Collection, Sequence
from concurrent.futures import Executor, Future
from pathlib import Path
from typing import Any

import numpy as np

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

Before = tuple[Path, Recipe]
"""A folder that is surely the image of this recipe."""


class Writer:
    """``db``: in a transaction; no page of the frames ``damaged`` is built upon."""

    def __init__(self, db: sqlite3.Connection, jobs: Executor, damaged: Collection[int]) -> None:
        self._db, self._jobs, self._damaged = db, jobs, tuple(damaged)
        (last,) = db.execute("SELECT max(id) FROM frame").fetchone()
        self._first = int(last or 0) + 1
        self._mine: dict[bytes, int] = {}
        self._sums: list[bytes] = []
        self._held: dict[int, bytes] = {}
        self._places: list[Places] = []
        self._loose: list[Pages] = []
        self._emitted = 0
        self._waiting: deque[tuple[int, bytes, Future[bytes]]] = deque()

    def keep(self, id: str, images: Path, before: Before | None) -> int:
        """Returns bytes of the image."""
        files = files_in(images)
        try:
            for name, size in files:
                with _Earlier(before, name) as earlier:
                    for first, pages in windows(images / name, size):
                        self._add(pages, earlier.same(first, pages, self._damaged))
            self._emit(last=True)
            while self._waiting:
                self._write()
        finally:
            for _, _, job in self._waiting:
                job.cancel()
        places = np.concatenate(self._places) if self._places else np.empty(0, np.int64)
        digests = np.frombuffer(b"".join(self._sums), np.uint8).reshape(-1, DIGEST)
        rows = sorted(zip(keys_of(digests), self._mine.values(), strict=True))
        self._db.executemany("INSERT OR REPLACE INTO page VALUES(?,?)", rows)
        self._db.execute("INSERT INTO image VALUES(?,?)", (id, Recipe(tuple(files), places).pack(id)))
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
        self._sums.append(key)
        return self._first * FRAME + len(self._sums) - 1

    def _stored(self, digests: Digests) -> list[int]:
        """Places of pages that the store has; 0: it has not. A key is only part of a digest, so what it leads
        to is compared."""
        keys = keys_of(digests)
        found = _chosen(self._db, "SELECT key, place FROM page WHERE key IN", keys)
        wanted = {place // FRAME for place in found.values()} - self._held.keys()
        self._held |= _chosen(self._db, "SELECT id, digests FROM frame WHERE id IN", list(wanted))
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
            self._waiting.append((self._first + self._emitted, sums, job))
            self._emitted += 1
            if len(self._waiting) > _WAITING:
                self._write()
        self._loose = [pages[full:]] if full < count else []

    def _write(self) -> None:
        number, sums, job = self._waiting.popleft()
        self._db.execute("INSERT INTO frame VALUES(?,?,?)", (number, sums, job.result()))


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
