"""Take one image out of the store again, every page checked against its digest."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from concurrent.futures import Executor, Future, wait
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from windtunnel.agents.sandbox.store.packs import (
    DIGEST,
    PAGE,
    ZERO,
    Index,
    Pack,
    Pages,
    Places,
    Recipe,
    digests,
    files_in,
    opened,
    page_count,
    windows,
    zeros,
)
from windtunnel.base.atomic import write_all

_TOGETHER = 1024
"""Pages that are put together in memory before they are written."""


class _Packs:
    """The packs of one recipe, opened when they are needed."""

    def __init__(self, folder: Path, recipe: Recipe, stack: contextlib.ExitStack) -> None:
        self._folder, self._recipe, self._stack = folder, recipe, stack
        self._open: dict[int, tuple[Pack, Index]] = {}

    def __getitem__(self, number: int) -> tuple[Pack, Index]:
        if number not in self._open:
            path = self._folder / f"{self._recipe.packs[number]}.pack"
            pack = self._stack.enter_context(opened(path))
            self._open[number] = (pack, pack.index())
        return self._open[number]

    def jobs(self, places: Places) -> Iterator[tuple[Pack, Index, int, NDArray[np.int64], NDArray[np.int64]]]:
        """What has to be read: pack, its index, frame, which of ``places``, and their rows in the frame."""
        some = np.flatnonzero(places != ZERO)
        number = (places[some] >> np.uint64(32)).astype(np.int64)
        page = (places[some] & np.uint64(2**32 - 1)).astype(np.uint32)
        for one in np.unique(number).tolist():
            pack, index = self[one]
            which = some[number == one]
            for frame, chosen, rows in pack.frames_of(index, page[number == one]):
                yield pack, index, frame, which[chosen], rows


def materialise(folder: Path, recipe: Recipe, into: Path, jobs: Executor) -> None:
    """Write every file of the image into ``into``. While some pages are written the next are read."""
    buffers = [np.empty((min(_TOGETHER, len(recipe.places)), PAGE), np.uint8) for _ in range(2)]
    for name, _ in recipe.files:
        os.close(os.open(into / name, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600))
    written: list[Future[None]] = []
    try:
        with contextlib.ExitStack() as stack:
            packs = _Packs(folder, recipe, stack)
            for turn, first in enumerate(range(0, len(recipe.places), _TOGETHER)):
                places = recipe.places[first : first + _TOGETHER]
                pages = buffers[turn % 2][: len(places)]
                pages[places == ZERO] = 0
                _fill(jobs, packs, places, pages)
                if written:
                    written.pop().result()
                written.append(jobs.submit(_spread, recipe, into, first, pages))
        for job in written:
            job.result()
    finally:
        # the caller removes the folder after a failure; nothing may write to it then
        wait(written)


def matches(folder: Path, recipe: Recipe, images: Path) -> bool:
    """Whether the files in ``images`` are, byte for byte, those of the recipe."""
    if files_in(images) != list(recipe.files):
        return False
    right = np.zeros((len(recipe.places), DIGEST), np.uint8)
    with contextlib.ExitStack() as stack:
        for _, index, frame, which, rows in _Packs(folder, recipe, stack).jobs(recipe.places):
            right[which] = index.digests[index.starts[frame] + rows]
    at = 0
    for name, size in recipe.files:
        for first, pages in windows(images / name, size):
            if not np.array_equal(right[at + first : at + first + len(pages)], _sums(pages)):
                return False
        at += page_count(size)
    return True


def _sums(pages: Pages) -> NDArray[np.uint8]:
    """Digests, and zeros for a page of zeros, which has none in a recipe."""
    found = digests(pages)
    found[zeros(pages)] = 0
    return found


def _fill(jobs: Executor, packs: _Packs, places: Places, pages: Pages) -> None:
    """Put the pages that lie at ``places`` into ``pages``."""

    def read(pack: Pack, index: Index, frame: int, which: NDArray[np.int64], rows: NDArray[np.int64]) -> None:
        pages[which] = pack.pages(index, frame, rows)

    waiting = [jobs.submit(read, *job) for job in packs.jobs(places)]
    wait(waiting)
    for job in waiting:
        job.result()


def _spread(recipe: Recipe, into: Path, first: int, pages: Pages) -> None:
    """Write some pages of the image, of which the first is number ``first``, to the files they belong to."""
    begin = 0
    for name, size in recipe.files:
        end = begin + page_count(size)
        low, high = max(begin, first), min(end, first + len(pages))
        if low < high:
            data = pages[low - first : high - first].reshape(-1).data
            at = (low - begin) * PAGE
            file = os.open(into / name, os.O_WRONLY | os.O_CLOEXEC)
            try:
                os.lseek(file, at, os.SEEK_SET)
                write_all(file, data[: size - at])
            finally:
                os.close(file)
        begin = end
