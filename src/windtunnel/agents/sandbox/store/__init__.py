"""The checkpoints of a home: process images, kept page by page, and manifests, in one SQLite file.

A checkpoint is one transaction, synced at its end: the new pages of its image in compressed frames, the
image's recipe, and its manifest, which is never replaced. What it shares with any earlier image is stored
once. Writers follow one another in a write-ahead log, which is synced in order, and readers wait for nobody;
a process that is killed leaves whole transactions only. ``collect``, one transaction too, removes frames of
which nothing is needed, and makes those smaller of which less than half is: pages that are not become zeros,
and those that stay keep their places.

The newest images also stay as they were written (`Copies`); what is restored from them is hashed all the
same. Every page is checked whenever it is read, and every manifest is sealed. A frame that turns out to be
damaged is looked up no more, so its pages are stored anew with the next image that has them.

Source: Crab (arXiv 2604.28138), section 5, keeps whole dumps; pages addressed by content are ours.
"""

from __future__ import annotations

import bisect
import contextlib
import errno
import os
import secrets
import shutil
import sqlite3
import tempfile
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor, wait
from dataclasses import replace
from pathlib import Path

import numpy as np
import zstandard
from numpy.typing import NDArray

from windtunnel.agents.sandbox.model import CheckpointManifest
from windtunnel.agents.sandbox.store.pages import (
    DIGEST,
    FRAME,
    LEVEL,
    PAGE,
    Copies,
    Digests,
    Earlier,
    Pages,
    Places,
    Recipe,
    Writer,
    by_frame,
    digests_of,
    files_in,
    windows,
    zeros,
)
from windtunnel.base.errors import UserError
from windtunnel.store.objects.chunks import compress, decompress
from windtunnel.store.objects.files import ObjectError, checked, object_errors
from windtunnel.store.objects.manifest import seal, unseal

KIND, VERSION = "manifest of a sandbox", 6
_LOG_BYTES = 8 << 20
"""A log that is longer than this is brought into the file."""
_SCHEMA = """
CREATE TABLE image(id TEXT PRIMARY KEY, recipe BLOB NOT NULL);
CREATE TABLE frame(id INTEGER PRIMARY KEY, digests BLOB NOT NULL, pages BLOB NOT NULL);
CREATE TABLE page(digest BLOB PRIMARY KEY, place INTEGER NOT NULL) WITHOUT ROWID;
CREATE TABLE manifest(id TEXT PRIMARY KEY, data BLOB NOT NULL);
"""
"""``image.recipe``: see `pages.Recipe`. ``frame``: up to 64 pages as one zstd frame, and 20 bytes of SHA-256
of each. ``page``: where the page of that digest lies."""


def new_id() -> str:
    """An id for a checkpoint: sorts by time (UTC, seconds), and is unique."""
    return time.strftime("%Y%m%d-%H%M%S", time.gmtime()) + "-" + secrets.token_hex(3)


class StaleCopy(ObjectError):
    """The copy of an image was not what was kept, and is dropped; the store has the image."""


class CheckpointStore:
    """The checkpoints in ``folder``, which one process holds. Any method may be called from several threads,
    and raises ObjectError."""

    def __init__(self, folder: Path) -> None:
        """Raises UserError where another version has written it."""
        with object_errors(f"the store {folder} cannot be opened"):
            folder.mkdir(parents=True, exist_ok=True)
            self.path = folder / "store.db"
            self._idle: list[sqlite3.Connection] = []
            self._writer, self._settling = threading.Lock(), threading.Lock()
            self._jobs = ThreadPoolExecutor(min(4, os.cpu_count() or 1), "windtunnel-pages")
            with self.reading() as db:
                (version,) = db.execute("PRAGMA user_version").fetchone()
                if version not in (0, VERSION) or (folder / "images").is_dir():
                    raise UserError(
                        f"sandbox: {folder} was made by another version, whose checkpoints are not read; "
                        "name another home (WINDTUNNEL_SANDBOX_HOME), or remove this one"
                    )
                if not version:
                    db.executescript(
                        f"PRAGMA page_size={PAGE}; PRAGMA auto_vacuum=INCREMENTAL; PRAGMA journal_mode=WAL; "
                        f"BEGIN; {_SCHEMA} PRAGMA user_version={VERSION}; COMMIT"
                    )
            self.copies = Copies(folder / "raw")
            self._work = folder / "work"
            shutil.rmtree(self._work, ignore_errors=True)
            self._work.mkdir()

    # --- checkpoints

    def add(
        self, manifest: CheckpointManifest, images: Path | None = None, *, like: str = "", begin: float = 0.0
    ) -> CheckpointManifest:
        """Store a checkpoint; it is on the disk on return, or else nothing of it is.

        ``images``: the files of its process image, where that is a new one; the folder stays the caller's.
        ``like``: an image that is probably much the same, best the one before of the same sandbox. Returned,
        and stored, is the manifest with what the image takes, and the time that all took from ``begin`` on.
        """
        with object_errors("the checkpoint cannot be stored"):
            try:
                with self.transaction(durable=True) as db:
                    if images is not None and manifest.image is not None:
                        used, part = self.used(db), manifest.image
                        size = Writer(db, self.earlier(like)).add(checked(part.id), images)
                        part = replace(part, bytes_raw=size, bytes_new=self.used(db) - used)
                        manifest = replace(manifest, image=part)
                    if begin:
                        manifest = replace(manifest, total_seconds=time.monotonic() - begin)
                    row = checked(manifest.id), compress(seal(KIND, VERSION, manifest), LEVEL)
                    db.execute("INSERT INTO manifest VALUES(?,?)", row)
            except BaseException:
                with contextlib.suppress(OSError):  # what was begun of it gives its room back
                    self.settle(whole=True)
                raise
        if images is not None and manifest.image is not None:
            self.copies.put(manifest.image.id, images)
        return manifest

    def earlier(self, id: str) -> Earlier:
        """The files of the copy of that image, if there is one."""
        if (folder := self.copies.folder(id)) is not None:
            with contextlib.suppress(ObjectError):
                recipe = self.recipe(id)
                # a last page that is not full is hashed like a new one
                return {
                    name: (folder / name, recipe.places[at : at + size // PAGE])
                    for name, size, at in recipe.begins()
                }
        return {}

    def drop(self, manifests: Iterable[str] = (), images: Iterable[str] = ()) -> None:
        """Forget these, as far as they are there. Bytes go when `collect` finds that no other image needs
        them."""
        gone = tuple(images)
        with object_errors("checkpoints cannot be dropped"), self.transaction() as db:
            db.executemany("DELETE FROM manifest WHERE id=?", [(checked(id),) for id in manifests])
            db.executemany("DELETE FROM image WHERE id=?", [(checked(id),) for id in gone])
        for id in gone:
            self.copies.forget(id)

    def collect(self) -> int:
        """Remove the pages that no image has; returns bytes freed. Where one cannot be read nothing is
        removed, since its pages are not known."""
        with object_errors("the store cannot be collected"):
            with self.transaction() as db:
                before, needed = self.used(db), self._needed(db)
                for (number,) in db.execute("SELECT id FROM frame").fetchall():
                    self._thin(db, number, needed.get(number, np.empty(0, np.int64)))
                freed = before - self.used(db)
                (free,) = db.execute("PRAGMA freelist_count").fetchone()
            # free pages are given back to the disk in steps, since each needs room in the log
            for _ in range(0, free, 1024):
                with self._writer, self.reading() as db:
                    # a row without columns for each page: only a script is stepped to its end
                    db.executescript("PRAGMA incremental_vacuum(1024)")
                self.settle()
            self.settle(whole=True)
        return freed

    def load(self, id: str) -> CheckpointManifest:
        """The manifest of a checkpoint."""
        where = f"manifest {id} in {self.path}"
        with object_errors(f"manifest {id} cannot be read"), self.reading() as db:
            row = db.execute("SELECT data FROM manifest WHERE id=?", (checked(id),)).fetchone()
        if row is None:
            raise ObjectError(f"checkpoint {id} is not there")
        try:
            plain = decompress(row[0], zstandard.frame_content_size(row[0]))
        except (zstandard.ZstdError, TypeError) as error:
            raise ObjectError(f"{where} is damaged: {error}") from None
        manifest = unseal(CheckpointManifest, KIND, VERSION, plain, where)
        if manifest.id != id:
            raise ObjectError(f"{where} is the manifest of another checkpoint, {manifest.id}")
        return manifest

    def named(self, prefix: str) -> str:
        """The id that is ``prefix``, or the only one that begins with it; readable or not."""
        ids = self.ids()
        matching = [prefix] if prefix in ids else [id for id in ids if prefix and id.startswith(prefix)]
        if not matching:
            newest = f"the newest are {', '.join(ids[-3:])}" if ids else "there is none yet"
            raise UserError(f"checkpoint {prefix!r} is not known; {newest}")
        if len(matching) > 1:
            more = f" and {len(matching) - 5} more" if len(matching) > 5 else ""
            raise UserError(f"checkpoint {prefix!r} is ambiguous: {', '.join(matching[:5])}{more}")
        return matching[0]

    def all(self) -> tuple[list[CheckpointManifest], list[str]]:
        """Those that can be read, in the order of their ids, and what is wrong with each of the others."""
        good, problems = [], []
        for id in self.ids():
            try:
                good.append(self.load(id))
            except ObjectError as error:
                problems.append(str(error))
        return good, problems

    def ids(self) -> list[str]:
        """Of all checkpoints that there are, readable or not, sorted."""
        return self._ids("manifest")

    def images(self) -> list[str]:
        return self._ids("image")

    def _ids(self, table: str) -> list[str]:
        with object_errors("the store cannot be read"), self.reading() as db:
            return [str(id) for (id,) in db.execute(f"SELECT id FROM {table} ORDER BY id")]

    # --- images

    def materialise(self, id: str, into: Path) -> None:
        """Write the files of an image into the folder ``into``, which is made.

        Every byte is one that was kept, or ObjectError names what is damaged and nothing is left of ``into``.
        The files may share their bytes with a copy, so they must not be written to.
        """
        try:
            self.begin(id, into)()
        except StaleCopy:
            shutil.rmtree(into)
            self.begin(id, into)()

    def begin(self, id: str, into: Path) -> Callable[[], None]:
        """`materialise`, of which the check of bytes that come from a copy may still be under way.

        What is returned waits for it, and raises StaleCopy when they are not those that were kept.
        """
        with object_errors(f"image {id} cannot be written to {into}"):
            recipe = self.recipe(id)
            into.mkdir(parents=True)
            if self.copies.give(id, into):
                return self._jobs.submit(self._confirm, id, recipe, into).result
            try:
                self._write_out(recipe, into)
            except BaseException as error:
                shutil.rmtree(into, ignore_errors=True)
                if isinstance(error, ObjectError):
                    raise ObjectError(f"image {id} is damaged: {error}") from error
                raise
            self.copies.put(id, into)
        return lambda: None

    @contextlib.contextmanager
    def scratch(self) -> Iterator[Path]:
        """A folder for the time being, on the disk of the store."""
        with object_errors("the store has no room to work in"):
            folder = tempfile.TemporaryDirectory(dir=self._work, ignore_cleanup_errors=True)
        with folder as path:
            yield Path(path)

    def _needed(self, db: sqlite3.Connection) -> dict[int, Places]:
        """Rows of each frame that images take pages from. Raises ObjectError where that cannot be known."""
        for table in ("image", "manifest"):
            (result,) = db.execute(f"PRAGMA quick_check({table})").fetchone()
            if result != "ok":
                raise ObjectError(f"nothing is collected while {self.path} is damaged: {result}")
        needed = np.empty(0, np.int64)
        for id, data in db.execute("SELECT id, recipe FROM image"):
            try:
                needed = np.union1d(needed, Recipe.unpack(id, data).places)
            except ObjectError as error:
                words = f"nothing is collected while an image that is needed is damaged: {error}"
                raise ObjectError(words) from None
        return {number: needed[which] % FRAME for number, which in by_frame(needed)}

    def _confirm(self, id: str, recipe: Recipe, images: Path) -> None:
        """Raises StaleCopy when the files of an image that came from a copy are not those kept."""
        with contextlib.suppress(ObjectError, OSError, ValueError, IndexError, TypeError):
            if files_in(images) == list(recipe.files):
                right = np.zeros((len(recipe.places), DIGEST), np.uint8)  # those of pages of zeros, too
                with self.reading() as db:
                    for number, which in by_frame(recipe.places):
                        (data,) = db.execute("SELECT digests FROM frame WHERE id=?", (number,)).fetchone()
                        rows = np.frombuffer(data, np.uint8).reshape(-1, DIGEST)
                        right[which] = rows[recipe.places[which] % FRAME]
                for name, size, begin in recipe.begins():
                    for first, pages in windows(images / name, size):
                        digests = digests_of(pages)
                        digests[zeros(pages)] = 0
                        if not np.array_equal(digests, right[begin + first :][: len(pages)]):
                            raise ObjectError(name)
                return
        self.copies.forget(id)
        raise StaleCopy(f"the copy of image {id} is damaged")

    def _write_out(self, recipe: Recipe, into: Path) -> None:
        """Write every file of an image; pages of zeros are holes."""
        files: list[tuple[int, int, int]] = []
        with contextlib.ExitStack() as stack:
            for name, size, first in recipe.begins():
                file = os.open(into / name, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
                stack.callback(os.close, file)
                os.ftruncate(file, size)
                files.append((first, size, file))
            jobs = [
                self._jobs.submit(self._fill, number, which, recipe.places[which] % FRAME, files)
                for number, which in by_frame(recipe.places)
            ]
            # the caller removes the folder after a failure; nothing may write to it then
            wait(jobs)
            for job in jobs:
                job.result()

    def _distrust(self, frame: int) -> None:
        """Pages of this frame are looked up no more, so later images store them anew."""
        self.copies.forget_all()  # the places that they tell are built upon
        with self.transaction() as db:
            db.execute("DELETE FROM page WHERE place/?=?", (FRAME, frame))

    def _fill(
        self, number: int, which: NDArray[np.intp], rows: Places, files: list[tuple[int, int, int]]
    ) -> None:
        """Write the ``rows`` of a frame, each checked, to the pages ``which`` of an image. ``files``: number
        of the first page, size and descriptor of each."""
        try:
            pages, digests = self.frame(number)
            if rows.max() >= len(pages) or (digests_of(pages[rows]) != digests[rows]).any():
                raise ObjectError(f"frame {number} of {self.path} is damaged")
        except ObjectError:
            self._distrust(number)
            raise
        begins = [first for first, _, _ in files]
        for page, row in zip(which.tolist(), rows.tolist(), strict=True):
            first, size, file = files[bisect.bisect_right(begins, page) - 1]
            offset = (page - first) * PAGE
            piece = pages[row].data[: size - offset]
            if os.pwrite(file, piece, offset) != len(piece):
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    def _thin(self, db: sqlite3.Connection, number: int, needed: Places) -> None:
        """Remove a frame of which nothing is needed; make one smaller of which less than half is."""
        (data,) = db.execute("SELECT digests FROM frame WHERE id=?", (number,)).fetchone()
        digests = np.frombuffer(data[: len(data) // DIGEST * DIGEST], np.uint8).reshape(-1, DIGEST)
        there = np.flatnonzero(digests.any(axis=1))
        if 2 * len(needed) > len(there):
            return
        gone = np.setdiff1d(there, needed)
        at = [(digests[row].tobytes(), number * FRAME + int(row)) for row in gone]
        db.executemany("DELETE FROM page WHERE digest=? AND place=?", at)
        if not len(needed):
            db.execute("DELETE FROM frame WHERE id=?", (number,))
            return
        with contextlib.suppress(ObjectError):  # what is damaged stays as it is
            pages, digests = (each.copy() for each in self.frame(number))
            pages[gone], digests[gone] = 0, 0
            packed = compress(pages.reshape(-1).data, LEVEL)
            db.execute("UPDATE frame SET digests=?, pages=? WHERE id=?", (digests.tobytes(), packed, number))

    # --- the file

    @contextlib.contextmanager
    def reading(self) -> Iterator[sqlite3.Connection]:
        """A connection for one thread; each statement reads what was committed when it began. Raises OSError
        with the name of the file."""
        try:
            db = self._idle.pop() if self._idle else self._connect()
            try:
                yield db
            except BaseException:
                db.close()
                raise
            self._idle.append(db)
        except sqlite3.IntegrityError as error:  # what is there already is never replaced
            raise OSError(errno.EEXIST, "it is there already", str(self.path)) from error
        except sqlite3.Error as error:
            full = getattr(error, "sqlite_errorcode", 0) & 0xFF == sqlite3.SQLITE_FULL
            words = os.strerror(errno.ENOSPC) if full else str(error)
            raise OSError(errno.ENOSPC if full else errno.EIO, words, str(self.path)) from error

    @contextlib.contextmanager
    def transaction(self, *, durable: bool = False) -> Iterator[sqlite3.Connection]:
        """``durable``: it, and all before it, is on the disk after the block. Raises OSError."""
        with self._writer, self.reading() as db:
            db.execute(f"PRAGMA synchronous={'FULL' if durable else 'NORMAL'}")
            db.execute("BEGIN IMMEDIATE")
            try:
                yield db
                db.execute("COMMIT")
            except BaseException:
                with contextlib.suppress(sqlite3.Error):
                    db.execute("ROLLBACK")
                raise
        if durable:
            self._jobs.submit(self.settle)

    def used(self, db: sqlite3.Connection) -> int:
        """Bytes of the file that hold something, as the connection reads it."""
        names = ("page_count", "freelist_count")
        count, free = (db.execute(f"PRAGMA {name}").fetchone()[0] for name in names)
        return int(count - free) * PAGE

    def settle(self, *, whole: bool = False) -> None:
        """Bring the log into the file where it has become long. ``whole``: in any case, and to its end."""
        with contextlib.suppress(FileNotFoundError):
            if not whole and os.stat(f"{self.path}-wal").st_size < _LOG_BYTES:
                return
        # SQLite does not wait for another one that settles, but leaves the log as it is
        with self._settling, self.reading() as db:
            db.execute(f"PRAGMA wal_checkpoint({'TRUNCATE' if whole else 'PASSIVE'})").fetchone()

    def close(self) -> None:
        self._jobs.shutdown()
        while self._idle:
            self._idle.pop().close()

    def _connect(self) -> sqlite3.Connection:
        db = sqlite3.connect(self.path, timeout=60, isolation_level=None, check_same_thread=False)
        db.execute("PRAGMA wal_autocheckpoint=0")
        db.execute("PRAGMA cell_size_check=ON")
        db.execute(f"PRAGMA journal_size_limit={4 * _LOG_BYTES}")
        return db

    def recipe(self, id: str) -> Recipe:
        """How an image is put together."""
        with object_errors(f"image {id} cannot be read"), self.reading() as db:
            row = db.execute("SELECT recipe FROM image WHERE id=?", (checked(id),)).fetchone()
        if row is None:
            raise ObjectError(f"there is no image {id}")
        return Recipe.unpack(id, row[0])

    def frame(self, number: int) -> tuple[Pages, Digests]:
        """The pages of a frame, not yet checked against their digests."""
        with self.reading() as db:
            row = db.execute("SELECT digests, pages FROM frame WHERE id=?", (number,)).fetchone()
        if row is None:
            raise ObjectError(f"frame {number} of {self.path} is missing")
        try:
            digests = np.frombuffer(row[0], np.uint8).reshape(-1, DIGEST)
            plain = decompress(row[1], len(digests) * PAGE)
        except (ValueError, TypeError, zstandard.ZstdError) as error:
            raise ObjectError(f"frame {number} of {self.path} is damaged: {error}") from None
        return np.frombuffer(plain, np.uint8).reshape(-1, PAGE), digests
