"""The SQLite file of a home: process images page by page, and the manifests of checkpoints.

Writers follow one another in a write-ahead log, and readers wait for nobody. A checkpoint is one transaction,
synced at its end; the log is synced in order, so all that was written before is on the disk then. A process
that is killed leaves whole transactions only.

One process at a time uses the file (a host holds its home); any number of its threads may.
"""

from __future__ import annotations

import contextlib
import errno
import os
import sqlite3
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import zstandard

from windtunnel.agents.sandbox.store.pages import DIGEST, PAGE, Digests, Pages, Recipe
from windtunnel.base.errors import UserError
from windtunnel.store.objects.chunks import decompress
from windtunnel.store.objects.files import ObjectError, checked, object_errors

VERSION = 6
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


class DamagedFrame(ObjectError):
    """A frame that cannot be read, or is not what was stored."""

    def __init__(self, number: int, words: str) -> None:
        super().__init__(words)
        self.number = number


class Database:
    """The file in ``folder``."""

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
            raise DamagedFrame(number, f"frame {number} of {self.path} is missing")
        try:
            digests = np.frombuffer(row[0], np.uint8).reshape(-1, DIGEST)
            plain = decompress(row[1], len(digests) * PAGE)
        except (ValueError, TypeError, zstandard.ZstdError) as error:
            raise DamagedFrame(number, f"frame {number} of {self.path} is damaged: {error}") from None
        return np.frombuffer(plain, np.uint8).reshape(-1, PAGE), digests
