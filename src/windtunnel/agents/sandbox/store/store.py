"""Process images, kept page by page: what an image shares with any earlier one is stored once.

An image is one transaction on the `Database`: its new pages, in compressed frames, and its recipe. So a crash
at any point leaves the images that were there, and nothing else. ``collect``, one transaction too, removes
frames of which nothing is needed, and makes those smaller of which less than half is: pages that are not
become zeros, and those that stay keep their places.

A page that equals the one in the same place of the image before (``like``) is not even hashed. The newest
images also stay as they were written (see `RawImages`); what is restored from them is hashed all the same.
Every page is checked whenever it is read. A frame in which damage was found is looked up no more, so such
pages are stored anew with the next image that has them.

Source: Crab (arXiv 2604.28138), section 5, keeps whole dumps; pages addressed by content are ours.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import sqlite3
import tempfile
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor, wait
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import zstandard
from numpy.typing import NDArray

from windtunnel.agents.sandbox.store.database import Database
from windtunnel.agents.sandbox.store.pages import (
    DIGEST,
    FRAME,
    LEVEL,
    PAGE,
    WINDOW,
    Digests,
    Pages,
    Places,
    Recipe,
    by_frame,
    digests_of,
    files_in,
    keys_of,
    page_count,
    windows,
    zeros,
)
from windtunnel.agents.sandbox.store.raw import RawImages
from windtunnel.agents.sandbox.store.writing import Before, Writer
from windtunnel.base.atomic import write_all
from windtunnel.store.objects.chunks import compress, decompress, in_order
from windtunnel.store.objects.files import ObjectError, checked, told

_AHEAD = 4
"""Frames that are read at once in a scrub."""


@dataclass(frozen=True)
class StoredImage:
    """What ``keep`` stored. ``bytes_raw``: size of the image; ``bytes_new``: by how much the store grew."""

    bytes_raw: int
    bytes_new: int


class StaleCopy(ObjectError):
    """The copy of an image in the cache was not what was kept, and is dropped; the store has the image."""


@dataclass(frozen=True)
class Scrubbed:
    """Bytes that were read from the disk, and what is damaged of each image, in words."""

    bytes: int
    damage: dict[str, list[str]]


class PageStore:
    """The images in ``folder``, which one process holds. Any method may be called from several threads."""

    def __init__(self, folder: Path) -> None:
        with told(f"the page store {folder} cannot be opened"):
            folder.mkdir(parents=True, exist_ok=True)
            self.database = Database(folder)
            self._raw = RawImages(folder / "raw")
            self._work = folder / "work"
            shutil.rmtree(self._work, ignore_errors=True)
            self._work.mkdir()
        self._damaged: set[int] = set()
        self._jobs = ThreadPoolExecutor(min(4, os.cpu_count() or 1), "windtunnel-pages")
        self._young: set[str] = set()

    def keep(self, id: str, images: Path, *, like: str = "") -> StoredImage:
        """Store the folder ``images`` under ``id``; durable with the next manifest. The folder stays the
        caller's.

        ``like``: an image that is probably much the same, best the one before of the same sandbox.
        """
        with told(f"image {checked(id)} cannot be kept"):
            if id in self.ids():
                raise ObjectError(f"there is an image {id} already, and an image is never replaced")
            folder = self._raw.folder(like) if like else None
            self._young.add(id)
            try:
                with self.database.writing() as db:
                    before: Before | None = None
                    if folder is not None:
                        with contextlib.suppress(ObjectError):
                            before = folder, _recipe(db, like)
                    used = self.database.used(db)
                    size = Writer(db, self._jobs, self._damaged).keep(id, images, before)
                    grown = self.database.used(db) - used
            except BaseException:
                self._young.discard(id)
                with contextlib.suppress(OSError):  # what was begun of it gives its room back
                    self.database.settle(whole=True)
                raise
            self._raw.put(id, images)
        return StoredImage(size, grown)

    def materialise(self, id: str, into: Path) -> None:
        """Write the files of an image into the folder ``into``, which must be empty or not there yet.

        Every byte is one that was kept, or ObjectError names what is damaged and nothing is left in ``into``.
        The files may share their bytes with a cache, so they must not be written to.
        """
        try:
            self.begin(id, into)()
        except StaleCopy:
            for file in into.iterdir():
                file.unlink()
            self.begin(id, into)()

    def begin(self, id: str, into: Path) -> Callable[[], None]:
        """`materialise`, of which the check of bytes that come from the cache may still be under way.

        What is returned waits for it, and raises StaleCopy when they are not those that were kept.
        """
        with told(f"image {id} cannot be written to {into}"):
            recipe = self.recipe(id)
            missing = not into.exists()
            into.mkdir(parents=True, exist_ok=True)
            if any(into.iterdir()):
                raise ObjectError(f"the folder {into} for image {id} is not empty")
            if self._raw.give(id, into):
                return self._jobs.submit(self._confirm, id, recipe, into).result
            try:
                self._write_out(recipe, into)
            except (OSError, ObjectError) as error:
                for file in into.iterdir():
                    file.unlink()
                if missing:
                    into.rmdir()
                if isinstance(error, ObjectError):
                    raise ObjectError(f"image {id} is damaged: {'; '.join(self.verify(id))}") from error
                raise
            self._raw.put(id, into)
        return lambda: None

    def recipe(self, id: str) -> Recipe:
        """How an image is put together."""
        with told(f"image {id} cannot be read"), self.database.reading() as db:
            return _recipe(db, checked(id))

    def ids(self) -> list[str]:
        with told("the page store cannot be read"), self.database.reading() as db:
            return [str(id) for (id,) in db.execute("SELECT id FROM image ORDER BY id")]

    def drop(self, id: str) -> None:
        """Forget an image, if there is one. Its bytes go when ``collect`` finds that no other needs them."""
        self._young.discard(id)
        with told(f"image {id} cannot be dropped"), self.database.writing() as db:
            db.execute("DELETE FROM image WHERE id=?", (checked(id),))
        self._raw.forget(id)

    def collect(self, needed: Iterable[str]) -> int:
        """Drop all images but the ``needed`` ones, and the pages that no other has; returns bytes freed.

        Images that this process has kept stay until ``drop`` names them: what needs them may be about to be
        written. When a needed image cannot be read nothing is removed, since its pages are not known.
        """
        with told("the page store cannot be collected"):
            with self.database.writing() as db:
                before = self.database.used(db)
                wanted = {*needed, *self._young}
                gone = [id for (id,) in db.execute("SELECT id FROM image") if id not in wanted]
                db.executemany("DELETE FROM image WHERE id=?", [(id,) for id in gone])
                used = self._in_use(db)
                for (number,) in db.execute("SELECT id FROM frame").fetchall():
                    self._thin(db, number, used.get(number, np.empty(0, np.int64)))
                freed = before - self.database.used(db)
            for id in gone:
                self._raw.forget(id)
            self.database.shrink()
        return freed

    def verify(self, id: str) -> list[str]:
        """Read every page of an image from the disk; what is damaged, in words."""
        return self.scrub([id]).damage[id]

    def scrub(self, ids: Iterable[str]) -> Scrubbed:
        """Read all that some images need from the disk, each frame once, and check every page.

        What is damaged serves no restore while it is, and later images store it anew.
        """
        damage: dict[str, list[str]] = {}
        recipes: dict[str, Recipe] = {}
        with told("the page store cannot be scrubbed"):
            self.database.forget()
            for id in ids:
                try:
                    recipes[id] = self.recipe(id)
                except ObjectError as error:
                    damage[id] = [str(error)]
            frames = sorted({frame for recipe in recipes.values() for frame in recipe.frames()})
            read, wrong = 0, dict[int, tuple[Places, str]]()
            for number, (size, rows, why) in zip(frames, in_order(self._look, frames, _AHEAD), strict=True):
                read += size
                if why:
                    wrong[number] = rows, why
            self._damaged.difference_update(frames)
            self._damaged |= wrong.keys()
            if wrong:
                # where the disk is full, this process remembers it all the same
                with contextlib.suppress(OSError), self.database.writing() as db:
                    db.executemany("DELETE FROM page WHERE place/?=?", [(FRAME, number) for number in wrong])
            for id, recipe in recipes.items():
                damage[id] = _hit(recipe, wrong)
                if damage[id]:
                    self._raw.forget(id)
        return Scrubbed(read, damage)

    @contextlib.contextmanager
    def scratch(self) -> Iterator[Path]:
        """A folder for the time being, on the disk of the store."""
        with told("the page store has no room to work in"):
            folder = Path(tempfile.mkdtemp(dir=self._work))
        try:
            yield folder
        finally:
            shutil.rmtree(folder, ignore_errors=True)

    def close(self) -> None:
        self._jobs.shutdown()
        self.database.close()

    def _digests(self, recipe: Recipe) -> Digests:
        """The address of each page of an image, one a row; zeros for a page of zeros."""
        found = np.zeros((len(recipe.places), DIGEST), np.uint8)
        with self.database.reading() as db:
            for number, which in by_frame(recipe.places):
                (held,) = db.execute("SELECT digests FROM frame WHERE id=?", (number,)).fetchone()
                found[which] = np.frombuffer(held, np.uint8).reshape(-1, DIGEST)[recipe.places[which] % FRAME]
        return found

    def _confirm(self, id: str, recipe: Recipe, images: Path) -> None:
        """Raises StaleCopy when the files of an image that came from the cache are not those kept."""
        with contextlib.suppress(ObjectError, OSError, ValueError, IndexError, TypeError):
            if files_in(images) == list(recipe.files):
                right = self._digests(recipe)
                for name, size, begin in recipe.begins():
                    for first, pages in windows(images / name, size):
                        digests = digests_of(pages)
                        digests[zeros(pages)] = 0
                        if not np.array_equal(digests, right[begin + first :][: len(pages)]):
                            raise ObjectError(name)
                return
        self._raw.forget(id)
        raise StaleCopy(f"the copy of image {id} in the cache is damaged")

    def _write_out(self, recipe: Recipe, into: Path) -> None:
        """Write every file of an image. While some pages are written the next are read."""
        buffers = [np.empty((min(WINDOW, len(recipe.places)), PAGE), np.uint8) for _ in range(2)]
        for name, _ in recipe.files:
            os.close(os.open(into / name, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600))
        written: list[Future[None]] = []
        try:
            for turn, first in enumerate(range(0, len(recipe.places), WINDOW)):
                places = recipe.places[first : first + WINDOW]
                pages = buffers[turn % 2][: len(places)]
                pages[places == 0] = 0
                reads = [self._jobs.submit(self._fill, *each, places, pages) for each in by_frame(places)]
                wait(reads)
                for job in (*reads, *written):
                    job.result()
                written = [self._jobs.submit(_spread, recipe, into, first, pages)]
            for job in written:
                job.result()
        finally:
            # the caller removes the folder after a failure; nothing may write to it then
            wait(written)

    def _fill(self, number: int, which: NDArray[np.intp], places: Places, pages: Pages) -> None:
        """Put those of the ``pages`` that lie in a frame where they belong, each checked."""
        with self.database.reading() as db:
            held, digests = self._frame(db, number)
        rows = places[which] % FRAME
        if rows.max() >= len(held) or (digests_of(held[rows]) != digests[rows]).any():
            raise ObjectError(f"frame {number} of {self.database.path} is damaged")
        pages[which] = held[rows]

    def _frame(self, db: sqlite3.Connection, number: int) -> tuple[Pages, Digests]:
        """The pages of a frame, not yet checked against their digests."""
        row = db.execute("SELECT digests, pages FROM frame WHERE id=?", (number,)).fetchone()
        if row is None:
            raise ObjectError(f"frame {number} of {self.database.path} is missing")
        try:
            digests = np.frombuffer(row[0], np.uint8).reshape(-1, DIGEST)
            plain = decompress(row[1], len(digests) * PAGE)
        except (ValueError, TypeError, zstandard.ZstdError) as error:
            raise ObjectError(f"frame {number} of {self.database.path} is damaged: {error}") from None
        return np.frombuffer(plain, np.uint8).reshape(-1, PAGE), digests

    def _in_use(self, db: sqlite3.Connection) -> dict[int, Places]:
        """Rows of each frame that images take pages from. Raises ObjectError where that cannot be known."""
        for table in ("image", "manifest"):
            (said,) = db.execute(f"PRAGMA quick_check({table})").fetchone()
            if said != "ok":
                raise ObjectError(f"nothing is collected while {self.database.path} is damaged: {said}")
        used = np.empty(0, np.int64)
        for id, data in db.execute("SELECT id, recipe FROM image"):
            try:
                used = np.union1d(used, Recipe.unpack(id, data).places)
            except ObjectError as error:
                raise ObjectError(
                    f"nothing is collected while an image that is needed is damaged: {error}"
                ) from None
        return {number: used[which] % FRAME for number, which in by_frame(used)}

    def _thin(self, db: sqlite3.Connection, number: int, used: Places) -> None:
        """Remove a frame of which nothing is used; make one smaller of which less than half is."""
        (held,) = db.execute("SELECT digests FROM frame WHERE id=?", (number,)).fetchone()
        digests = np.frombuffer(held[: len(held) // DIGEST * DIGEST], np.uint8).reshape(-1, DIGEST)
        there = np.flatnonzero(digests.any(axis=1))
        if 2 * len(used) > len(there):
            return
        gone = np.setdiff1d(there, used)
        places = [number * FRAME + int(row) for row in gone]
        keys = keys_of(digests[gone])
        db.executemany("DELETE FROM page WHERE key=? AND place=?", zip(keys, places, strict=True))
        if len(used):
            try:
                pages, digests = (each.copy() for each in self._frame(db, number))
            except ObjectError:
                return
            pages[gone], digests[gone] = 0, 0
            packed = compress(pages.reshape(-1).data, LEVEL)
            db.execute("UPDATE frame SET digests=?, pages=? WHERE id=?", (digests.tobytes(), packed, number))
        else:
            db.execute("DELETE FROM frame WHERE id=?", (number,))
            self._damaged.discard(number)

    def _look(self, number: int) -> tuple[int, Places, str]:
        """Bytes of a frame, its rows that are damaged, and why."""
        try:
            with self.database.reading() as db:
                pages, digests = self._frame(db, number)
                (size,) = db.execute("SELECT length(pages) FROM frame WHERE id=?", (number,)).fetchone()
        except (ObjectError, OSError) as error:
            return 0, np.arange(FRAME), str(error)
        wrong = np.flatnonzero((digests_of(pages) != digests).any(axis=1) & digests.any(axis=1))
        count = f"frame {number} of {self.database.path} is damaged: {len(wrong)} of its pages do not match"
        return int(size) + digests.size, wrong, f"{count} their digests" if len(wrong) else ""


def _recipe(db: sqlite3.Connection, id: str) -> Recipe:
    row = db.execute("SELECT recipe FROM image WHERE id=?", (id,)).fetchone()
    if row is None:
        raise ObjectError(f"there is no image {id}")
    return Recipe.unpack(id, row[0])


def _hit(recipe: Recipe, wrong: Mapping[int, tuple[Places, str]]) -> list[str]:
    """In words, what an image takes from damaged pages."""
    found = []
    for number in sorted(wrong.keys() & set(recipe.frames())):
        rows, why = wrong[number]
        own = recipe.places[recipe.places // FRAME == number] % FRAME
        if count := int(np.isin(own, rows).sum()):
            found.append(f"{count} of its pages: {why}")
    return found


def _spread(recipe: Recipe, into: Path, first: int, pages: Pages) -> None:
    """Write some pages of the image, of which the first is number ``first``, to the files they belong to."""
    for name, size, begin in recipe.begins():
        low, high = max(begin, first), min(begin + page_count(size), first + len(pages))
        if low < high:
            at = (low - begin) * PAGE
            with open(into / name, "r+b", buffering=0) as file:
                file.seek(at)
                write_all(file.fileno(), pages[low - first : high - first].reshape(-1).data[: size - at])
