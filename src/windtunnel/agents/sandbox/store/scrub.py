"""Is what lies on the disk still what was written? Packs are read past the page cache, page by page.

What is found is written down: a damaged page serves no restore, and no later image rests on it, until a scrub
finds its pack whole again. Packs never change, so one whose size or time of change is another than before was
changed from outside; that costs a look at the file, and is looked for before every use.
"""

from __future__ import annotations

import contextlib
import json
import os
import threading
from collections import deque
from collections.abc import Iterable, Sequence
from concurrent.futures import Executor, Future
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from windtunnel.agents.sandbox.store.packs import Index, Pack, Recipe, digests, opened
from windtunnel.base import atomic
from windtunnel.store.objects.files import ObjectError

_AHEAD = 32
"""Frames that may be under way at once: bounds memory."""

Pages = NDArray[np.uint32]


@dataclass(frozen=True)
class Found:
    """What a look at one pack found: bytes read, the damage in words, and the pages that are damaged (None:
    all of them, since its index cannot be read)."""

    bytes: int
    words: tuple[str, ...]
    pages: Pages | None


def scrub(path: Path, jobs: Executor) -> Found:
    """Read a whole pack from the disk and check every page of it, its index and its recipe."""
    try:
        with opened(path, cold=True) as pack:
            index = pack.index()
            words: list[str] = []
            bad: list[Pages] = []
            try:
                pack.recipe()
            except ObjectError as error:
                words.append(str(error))
            waiting: deque[Future[tuple[str, Pages]]] = deque()

            def take() -> None:
                said, pages = waiting.popleft().result()
                if said:
                    words.append(said)
                    bad.append(pages)

            for number in range(len(index.frames)):
                waiting.append(jobs.submit(_frame, pack, index, number))
                if len(waiting) > _AHEAD:
                    take()
            while waiting:
                take()
            return Found(pack.size, tuple(words), np.concatenate([*bad, np.empty(0, np.uint32)]))
    except (ObjectError, OSError) as error:
        return Found(0, (str(error),), None)


def _frame(pack: Pack, index: Index, number: int) -> tuple[str, Pages]:
    """What is wrong with one frame, in words (nothing: empty), and its damaged pages."""
    numbers = index.numbers[index.starts[number] : index.starts[number + 1]]
    try:
        pages = pack.frame(index, number)
    except (ObjectError, OSError) as error:
        return str(error), numbers
    wrong = (digests(pages) != index.digests[index.starts[number] : index.starts[number + 1]]).any(axis=1)
    if not wrong.any():
        return "", numbers[:0]
    first, more = numbers[wrong][0], int(wrong.sum()) - 1
    others = f" and {more} more do" if more else " does"
    return f"pack {pack.name} is damaged: page {first}{others} not match its digest", numbers[wrong]


class Damaged:
    """The pages that scrubs have found damaged, kept in a file; may be used from several threads."""

    def __init__(self, file: Path) -> None:
        self._file = file
        self._lock = threading.Lock()
        self._packs: dict[str, tuple[str, list[int] | None]] = {}
        with contextlib.suppress(OSError, ValueError):
            known = json.loads(file.read_text(encoding="utf-8"))
            self._packs = {str(pack): (str(why), pages) for pack, (why, pages) in known.items()}

    def note(self, pack: str, found: Found) -> bool:
        """Remember what a scrub of a pack found; whether that is news. Raises OSError."""
        pages = None if found.pages is None else [int(page) for page in found.pages]
        with self._lock:
            known = dict(self._packs)
            known.pop(pack, None)
            if pages is None or pages:
                known[pack] = found.words[0], pages
            if known == self._packs:
                return False
            self._packs = known
            atomic.replace(self._file, json.dumps(known).encode())
            return True

    def keep_only(self, packs: set[str]) -> None:
        """Forget what was found of packs that are gone. Raises OSError."""
        with self._lock:
            known = {pack: found for pack, found in self._packs.items() if pack in packs}
            if known != self._packs:
                self._packs = known
                atomic.replace(self._file, json.dumps(known).encode())

    def pages(self, pack: str) -> list[int] | None:
        """Damaged pages of a pack; None: all."""
        return self._packs.get(pack, ("", []))[1]

    def hit(self, recipe: Recipe) -> list[str]:
        """In words, what an image takes from damaged pages."""
        found = []
        for number, name in enumerate(recipe.packs):
            why, bad = self._packs.get(name, ("", []))
            if not why:
                continue
            own = recipe.places[recipe.places >> np.uint64(32) == number] & np.uint64(2**32 - 1)
            count = len(own) if bad is None else int(np.isin(own, np.array(bad, np.uint64)).sum())
            if count or (bad is None and number == 0):
                found.append(f"{count} of its pages: {why}")
        return found


class Unchanged:
    """Size, identity and time of change of packs, as they were first seen by this process."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._seen: dict[str, tuple[int, int, int]] = {}

    def see(self, packs: Iterable[str]) -> None:
        """These are right as they are now."""
        for pack in packs:
            if (now := self._now(pack)) is not None:
                self._seen[pack] = now

    def forget(self) -> None:
        self._seen.clear()

    def suspects(self, packs: Sequence[str]) -> list[str]:
        """Those of ``packs`` that are not as they were; ones that were not seen yet are seen now."""
        found = []
        for pack in packs:
            now = self._now(pack)
            if now is None or self._seen.setdefault(pack, now) != now:
                found.append(pack)
        return found

    def _now(self, pack: str) -> tuple[int, int, int] | None:
        try:
            about = os.stat(self._folder / f"{pack}.pack")
        except OSError:
            return None
        return about.st_size, about.st_mtime_ns, about.st_ino
