"""Write packs: that of a new image, and the one that takes the place of a pack of which little is needed.

An image's new pages are found and compressed while they are read; they and the recipe make one file. A sweep
removes packs of which no image takes a page, and thins those of which less than half is needed.
"""

from __future__ import annotations

import contextlib
import os
import secrets
import threading
from collections import deque
from concurrent.futures import Executor, Future
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from windtunnel.agents.sandbox.store.packs import (
    DIGEST,
    FRAME,
    LEVEL,
    PAGE,
    ZERO,
    Pages,
    Places,
    Recipe,
    differing,
    digests,
    files_in,
    opened,
    page_count,
    tail,
    windows,
    zeros,
)
from windtunnel.agents.sandbox.store.scrub import Damaged
from windtunnel.base.atomic import PART, sync_folder, write_all
from windtunnel.store.objects.chunks import compress
from windtunnel.store.objects.files import ObjectError

_SHIFT = np.uint64(32)
_LOW = np.uint64(2**32 - 1)
_WAITING = 16
"""Frames that may wait for their compression: bounds memory."""


@dataclass
class Known:
    """Where every page of the store lies: the number of its pack in ``packs``, and its own number in it.

    It only grows, so that threads may read it while another adds; after a collection a new one is loaded.
    """

    epoch: int
    packs: list[str] = field(default_factory=list)
    places: dict[bytes, int] = field(default_factory=dict)
    _adding: threading.Lock = field(default_factory=threading.Lock)

    def add(self, pack: str, sums: bytes, numbers: list[int]) -> None:
        with self._adding:
            base = len(self.packs) << 32
            self.packs.append(pack)
        rows = [sums[at : at + DIGEST] for at in range(0, len(sums), DIGEST)]
        self.places.update(zip(rows, [base | number for number in numbers], strict=True))


def load(folder: Path, epoch: int, damaged: Damaged) -> Known:
    """Read the indexes of all packs. Damaged pages are left out: they will be stored again."""
    known = Known(epoch)
    for path in sorted(folder.glob("*.pack")):
        bad = damaged.pages(path.stem)
        with contextlib.suppress(ObjectError), opened(path) as pack:
            index = pack.index()
            if bad is not None:
                whole = np.isin(index.numbers, np.array(bad, np.uint32), invert=True)
                known.add(path.stem, index.digests[whole].tobytes(), index.numbers[whole].tolist())
    return known


def keep(
    folder: Path, id: str, images: Path, known: Known, base: tuple[Path, Recipe] | None, jobs: Executor
) -> tuple[int, int]:
    """Write the pack of ``images`` and link it as ``id``; returns bytes of the image and of the pack."""
    token = f"{id}.{secrets.token_hex(4)}"
    files = files_in(images)
    temporary = folder / f"{token}{PART}"
    final = folder / f"{token}.pack"
    linked = False
    try:
        writer = _Writer(temporary, token, known, jobs)
        try:
            for name, size in files:
                before = _Before(base, name, writer) if base else None
                for first, pages in windows(images / name, size):
                    writer.add(pages, before.same(first, pages) if before else None)
                if before:
                    before.close()
            new = writer.finish(id, files)
        finally:
            writer.close()
        temporary.rename(final)
        os.link(final, folder / f"{id}.image")
        linked = True
        sync_folder(folder)
    except BaseException as error:
        for path in (temporary, *((folder / f"{id}.image",) if linked else ()), final):
            with contextlib.suppress(OSError):
                path.unlink()
        if isinstance(error, FileExistsError):
            raise ObjectError(f"there is an image {id} already, and an image is never replaced") from None
        raise
    known.add(token, b"".join(writer.sums), list(range(len(writer.sums))))
    return sum(size for _, size in files), new


class _Before:
    """A file of the image before: which pages of the new one are the same, and where those lie."""

    def __init__(self, base: tuple[Path, Recipe], name: str, writer: _Writer) -> None:
        folder, recipe = base
        at = 0
        self._places: Places = np.empty(0, np.uint64)
        for other, size in recipe.files:
            if other == name:
                # a last page that is not full is hashed like a new one
                self._places = writer.taken_over(recipe, at, at + size // PAGE)
            at += page_count(size)
        try:
            self._file = os.open(folder / name, os.O_RDONLY | os.O_CLOEXEC) if len(self._places) else -1
        except FileNotFoundError:
            self._file = -1

    def close(self) -> None:
        if self._file >= 0:
            os.close(self._file)

    def same(self, first: int, pages: Pages) -> Places | None:
        """Places of the pages that are as before; ``_UNSEEN`` for the others; None when none can be."""
        places = self._places[first : first + len(pages)]
        if self._file < 0 or not len(places):
            return None
        other = np.empty((len(places), PAGE), np.uint8)
        if os.preadv(self._file, [other.reshape(-1).data], first * PAGE) != other.nbytes:
            return None
        found = np.full(len(pages), _UNSEEN)
        found[: len(places)] = np.where(differing(pages[: len(places)], other), _UNSEEN, places)
        return found


_UNSEEN = np.uint64(2**64 - 2)


class _Writer:
    """The pack that is being written: pages come in the order of the image, new ones go out in frames."""

    def __init__(self, path: Path, token: str, known: Known, jobs: Executor) -> None:
        self._file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
        self._known, self._jobs = known, jobs
        self._packs = {token: 0}
        self._local: dict[int, int] = {}
        self._mine: dict[bytes, int] = {}
        self.sums: list[bytes] = []
        self._places: list[Places] = []
        self._loose: list[Pages] = []
        self._waiting: deque[tuple[int, Future[bytes]]] = deque()
        self._frames: list[tuple[int, int]] = []
        self._at = 0

    def close(self) -> None:
        for _, job in self._waiting:
            job.cancel()
        os.close(self._file)

    def taken_over(self, recipe: Recipe, begin: int, end: int) -> Places:
        """Places of another image's recipe, as this one writes them."""
        table = np.array([self._pack(name) for name in recipe.packs], np.uint64)
        places = recipe.places[begin:end]
        empty = places == ZERO
        pack = np.where(empty, 0, places >> _SHIFT).astype(np.intp)
        return np.where(empty, ZERO, (table[pack] << _SHIFT) | (places & _LOW))

    def add(self, pages: Pages, same: Places | None) -> None:
        places = np.full(len(pages), _UNSEEN) if same is None else same
        rest = np.flatnonzero(places == _UNSEEN)
        left = pages if len(rest) == len(pages) else pages[rest]
        empty = zeros(left)
        places[rest[empty]] = ZERO
        if empty.any():
            rest, left = rest[~empty], left[~empty]
        raw = digests(left).tobytes() if len(rest) else b""
        fresh = []
        found = np.empty(len(rest), np.uint64)
        for row in range(len(rest)):
            key = raw[row * DIGEST : (row + 1) * DIGEST]
            place = self._mine.get(key)
            if place is None:
                held = self._known.places.get(key)
                if held is None:
                    place = self._mine[key] = len(self.sums)
                    self.sums.append(key)
                    fresh.append(row)
                else:
                    place = self._place(held)
            found[row] = place
        places[rest] = found
        self._places.append(places)
        if fresh:
            self._loose.append(left[fresh])
            if sum(map(len, self._loose)) >= FRAME:
                self._emit(last=False)

    def finish(self, id: str, files: list[tuple[str, int]]) -> int:
        """Write what is left and sync; returns the size of the pack."""
        self._emit(last=True)
        while self._waiting:
            self._write_one()
        places = np.concatenate(self._places) if self._places else np.empty(0, np.uint64)
        recipe = Recipe(id, tuple(files), *_without_unused(list(self._packs), places))
        numbers = np.arange(len(self.sums), dtype=np.uint32)
        rest = tail(self._at, self._frames, numbers, b"".join(self.sums), recipe)
        write_all(self._file, rest)
        os.fsync(self._file)
        return self._at + len(rest)

    def _pack(self, name: str) -> int:
        return self._packs.setdefault(name, len(self._packs))

    def _place(self, held: int) -> int:
        """A place in the whole store, as the recipe writes it."""
        pack = self._local.get(held >> 32)
        if pack is None:
            pack = self._local[held >> 32] = self._pack(self._known.packs[held >> 32])
        return pack << 32 | held & 0xFFFFFFFF

    def _emit(self, *, last: bool) -> None:
        pages = np.concatenate(self._loose) if self._loose else np.empty((0, PAGE), np.uint8)
        full = len(pages) if last else len(pages) // FRAME * FRAME
        for at in range(0, full, FRAME):
            frame = pages[at : min(at + FRAME, full)]
            self._waiting.append((len(frame), self._jobs.submit(compress, frame.reshape(-1).data, LEVEL)))
            if len(self._waiting) > _WAITING:
                self._write_one()
        self._loose = [pages[full:]] if full < len(pages) else []

    def _write_one(self) -> None:
        count, job = self._waiting.popleft()
        packed = job.result()
        write_all(self._file, packed)
        self._frames.append((len(packed), count))
        self._at += len(packed)


def _without_unused(packs: list[str], places: Places) -> tuple[tuple[str, ...], Places]:
    """A recipe names only packs that it needs, and its own as the first."""
    some = places != ZERO
    number = (places[some] >> _SHIFT).astype(np.intp)
    needed = np.union1d([0], number)
    places = places.copy()
    places[some] = np.searchsorted(needed, number).astype(np.uint64) << _SHIFT | places[some] & _LOW
    return tuple(packs[one] for one in needed.tolist()), places


def sweep(folder: Path) -> int:
    """Remove packs from which no image takes a page, and thin those of which less than half is needed.

    Raises ObjectError, with nothing removed, when the recipe of an image cannot be read.
    """
    whole, used = _mark(folder)
    freed = 0
    thin: list[Path] = []
    for path in sorted(folder.iterdir()):
        if path.suffix == PART or (path.suffix == ".pack" and path.stem not in whole | used.keys()):
            freed += path.stat().st_size
            path.unlink()
        elif path.suffix == ".pack" and path.stem not in whole:
            thin.append(path)
    for path in thin:
        # a damaged pack is left as it is: what is still right in it can be read
        with contextlib.suppress(ObjectError):
            freed += _thinned(path, np.unique(np.concatenate(used[path.stem])))
    sync_folder(folder)
    return freed


def _mark(folder: Path) -> tuple[set[str], dict[str, list[NDArray[np.uint32]]]]:
    """Packs that belong to an image, which takes all their pages; and the pages taken from the others."""
    whole: set[str] = set()
    used: dict[str, list[NDArray[np.uint32]]] = {}
    for path in sorted(folder.glob("*.image")):
        try:
            with opened(path) as pack:
                recipe = pack.recipe()
        except ObjectError as error:
            raise ObjectError(
                f"nothing is collected while an image that is needed is damaged: {error}"
            ) from None
        whole.add(recipe.packs[0])
        places = np.unique(recipe.places[recipe.places != ZERO])
        number = places >> np.uint64(32)
        for one, name in enumerate(recipe.packs[1:], 1):
            pages = places[number == one] & np.uint64(2**32 - 1)
            used.setdefault(name, []).append(pages.astype(np.uint32))
    return whole, used


def _thinned(path: Path, needed: NDArray[np.uint32]) -> int:
    """Replace a pack by one that holds only the pages ``needed``; returns bytes freed."""
    with opened(path) as pack:
        index = pack.index()
        if 2 * len(needed) > len(index.numbers):
            return 0
        pages = np.empty((len(needed), PAGE), np.uint8)
        sums = np.empty((len(needed), index.digests.shape[1]), np.uint8)
        for frame, which, rows in pack.frames_of(index, needed):
            pages[which] = pack.pages(index, frame, rows)
            sums[which] = index.digests[index.starts[frame] + rows]
        temporary = path.with_name(f"{path.stem}.{secrets.token_hex(4)}{PART}")
        try:
            _write(temporary, path.stem, pages, needed, sums)
            size = temporary.stat().st_size
            temporary.rename(path)
        except BaseException:
            with contextlib.suppress(OSError):
                temporary.unlink()
            raise
        return pack.size - size


def _write(path: Path, name: str, pages: Pages, numbers: NDArray[np.uint32], sums: NDArray[np.uint8]) -> None:
    frames: list[tuple[int, int]] = []
    written = 0
    file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
    try:
        for at in range(0, len(pages), FRAME):
            some = pages[at : at + FRAME]
            packed = compress(some.reshape(-1).data, LEVEL)
            write_all(file, packed)
            frames.append((len(packed), len(some)))
            written += len(packed)
        recipe = Recipe("", (), (name,), np.empty(0, np.uint64))
        write_all(file, tail(written, frames, numbers, sums.tobytes(), recipe))
        os.fsync(file)
    finally:
        os.close(file)
