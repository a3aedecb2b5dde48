"""``shield::URL`` for fsspec: a folder in storage that sees ciphertext, and cannot bring back what was there.

Storage holds blobs, each written once, under names that say nothing. Which blob is which file, its size and
version are in the state, a SQLite file with the key, as trusted as the program (option ``state``, or
``$WINDTUNNEL_SHIELD_STATE``). So listings are not storage's to say, and a file that it lost is an error. A
write puts a new blob, then changes the state: who is killed between leaves the older file, and a blob that
nobody names. Who can bring back an older state brings back what it names. All who use a folder need the same
state, on one host or a file system with POSIX locks. A file is held in memory while it is written.
"""

from __future__ import annotations

import errno
import hmac
import os
import sqlite3
from collections.abc import Iterator
from contextlib import closing, contextmanager
from typing import Any

import fsspec
from cryptography.exceptions import InvalidTag
from cryptography.hazmat.primitives.ciphers.aead import AESGCM
from fsspec.spec import AbstractBufferedFile, AbstractFileSystem

from windtunnel.base.errors import UserError
from windtunnel.store.objects.files import Files, LocalFiles, RemoteFiles
from windtunnel.trust.shield.model import TAG

VARIABLE, CHUNK = "WINDTUNNEL_SHIELD_STATE", 65536
TABLES = (
    "CREATE TABLE IF NOT EXISTS state (one INTEGER PRIMARY KEY CHECK (one = 1), key BLOB, version INTEGER)",
    "CREATE TABLE IF NOT EXISTS file (path TEXT PRIMARY KEY, version INTEGER, size INTEGER) WITHOUT ROWID",
)


class ShieldFileSystem(AbstractFileSystem):  # type: ignore[misc]
    """``fo``: the folder, in ``target_protocol`` with ``target_options``, as fsspec chains them. Raises
    UserError: there is no state, or it is no file of this."""

    protocol = "shield"

    def __init__(
        self, fo: str = "", target_protocol: str = "file", target_options: dict[str, Any] | None = None,
        state: str = "", **options: Any,
    ) -> None:  # fmt: skip
        super().__init__(fo=fo, target_protocol=target_protocol, state=state, **options)
        self._state, self._folder = state or os.environ.get(VARIABLE, ""), f"{target_protocol}://{fo}/"
        self._files: Files = LocalFiles(fo)  # with fsync, as other than fsspec's
        if target_protocol not in ("file", "local"):
            target = fsspec.filesystem(target_protocol, **target_options or {})
            self._files = RemoteFiles(target, fo, self._folder)
        try:
            os.close(os.open(self._state, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600))
            with self._database() as base:
                for table in TABLES:
                    base.execute(table)
                base.execute("INSERT OR IGNORE INTO state VALUES (1, ?, 0)", (os.urandom(32),))
                (key,) = base.execute("SELECT key FROM state").fetchone()
        except (OSError, sqlite3.Error) as error:
            raise UserError(
                f"shield::{fo}: the state {self._state!r} cannot be used ({error}); accepted is a file, by"
                f" {VARIABLE} or the option state, that storage cannot reach"
            ) from None
        self._cipher, self._names = AESGCM(key), hmac.digest(key, b"names", "sha256")

    @contextmanager
    def _database(self) -> Iterator[sqlite3.Connection]:
        """One transaction, on the disk at its end. Its connection is its own: for forks and threads."""
        with closing(sqlite3.connect(self._state, timeout=60.0, isolation_level=None)) as base, base:
            base.execute("BEGIN IMMEDIATE")
            yield base

    def _key(self, path: str) -> str:
        return self._folder + self._strip_protocol(path).strip("/")

    def _blob(self, version: int) -> str:
        name = hmac.digest(self._names, version.to_bytes(8, "big"), "sha256").hex()
        return f"{name[:2]}/{name[2:40]}"

    def _find(self, path: str) -> dict[str, tuple[int, int]]:
        """Version and size of the file ("") and of all files below. Raises FileNotFoundError: none."""
        key = self._key(path).rstrip("/")
        with self._database() as base:
            query = "SELECT path, version, size FROM file WHERE path = ? OR path > ? AND path < ?"
            rows = base.execute(query, (key, key + "/", key + "0")).fetchall()  # "0" comes after "/"
        if not rows:
            raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), path)
        return {name[len(key) + 1 :]: (version, size) for name, version, size in rows}

    def info(self, path: str, **_: Any) -> dict[str, Any]:
        file = self._find(path).get("")
        kind = {"size": file[1], "type": "file"} if file else {"size": 0, "type": "directory"}
        return {"name": self._strip_protocol(path), **kind}

    def ls(self, path: str, detail: bool = True, **_: Any) -> list[Any]:
        folder, entries = self._strip_protocol(path).rstrip("/"), dict[str, dict[str, Any]]()
        for name, (_version, size) in self._find(path).items():
            first, deeper, _rest = name.partition("/")
            kind = {"size": 0, "type": "directory"} if deeper else {"size": size, "type": "file"}
            entries[first] = {"name": f"{folder}/{first}".rstrip("/"), **kind}
        return [entry if detail else entry["name"] for entry in entries.values()]

    def pipe_file(self, path: str, value: Any, mode: str = "overwrite", **_: Any) -> None:
        with self._database() as base:  # on the disk before it is used: no nonce comes twice
            (version,) = base.execute("UPDATE state SET version = version + 1 RETURNING version").fetchone()
        view = memoryview(value).cast("B")
        parts = enumerate(view[at : at + CHUNK] for at in range(0, len(view), CHUNK))
        sealed = [self._cipher.encrypt(_nonce(index, version), part, None) for index, part in parts]
        self._files.write(self._blob(version), b"".join(sealed))
        self._files.settle()
        row, verb = (self._key(path), version, len(view)), "INSERT" if mode == "create" else "REPLACE"
        try:
            with self._database() as base:
                old = base.execute("SELECT version FROM file WHERE path = ?", row[:1]).fetchone()
                base.execute(f"{verb} INTO file VALUES (?, ?, ?)", row)
        except sqlite3.IntegrityError:
            self._files.remove(self._blob(version))
            raise FileExistsError(errno.EEXIST, os.strerror(errno.EEXIST), path) from None
        if old:
            self._files.remove(self._blob(*old))

    def cat_file(self, path: str, start: int | None = None, end: int | None = None, **_: Any) -> bytes:
        if "" not in (blocks := self._find(path)):
            raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), path)
        version, size = blocks[""]
        first, last, _step = slice(start, end).indices(size)
        chunks, whole = range(first // CHUNK, -(-max(first, last) // CHUNK)), CHUNK + TAG
        try:
            sealed = self._files.read(self._blob(version), chunks.start * whole, len(chunks) * whole)
            parts = [sealed[at : at + whole] for at in range(0, len(chunks) * whole, whole)]
            both = zip(chunks, parts, strict=True)
            data = b"".join([self._cipher.decrypt(_nonce(at, version), part, None) for at, part in both])
            if len(data) != min(size, chunks.stop * CHUNK) - chunks.start * CHUNK:
                raise InvalidTag
        except (InvalidTag, FileNotFoundError):
            if self._find(path).get("") != (version, size):
                return self.cat_file(path, start, end)  # another process has just written it anew
            raise OSError(errno.EIO, "what storage has is not what was written last", path) from None
        return data[first - chunks.start * CHUNK : last - chunks.start * CHUNK]

    def _rm(self, path: str) -> None:
        with self._database() as base:
            query = "DELETE FROM file WHERE path = ? RETURNING version"
            rows = base.execute(query, (self._key(path),)).fetchall()
        for (version,) in rows:
            self._files.remove(self._blob(version))

    def _open(self, path: str, mode: str = "rb", **kwargs: Any) -> ShieldFile:
        return ShieldFile(self, path, mode, kwargs.pop("block_size", None) or "default", **kwargs)


class ShieldFile(AbstractBufferedFile):  # type: ignore[misc]
    """An open file; what is written is there when it is closed."""

    def _upload_chunk(self, final: bool = False) -> bool:
        if final:
            self.fs.pipe_file(self.path, self.buffer.getvalue())
        return final

    def _fetch_range(self, start: int, end: int) -> bytes:
        return bytes(self.fs.cat_file(self.path, start, end))


def _nonce(index: int, version: int) -> bytes:
    return index.to_bytes(4, "big") + version.to_bytes(8, "big")
