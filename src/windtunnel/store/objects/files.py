"""Files by name under one root: a local folder, or anything that fsspec reaches.

A write is seen whole or not at all. Locally: a temporary file beside it, fsync, rename; and `settle`, which
makes the names durable too, before anything is written that relies on them. An object store does this by
itself (a put is atomic and durable, as with S3, GCS and Azure).

Everything here raises OSError with the name of the file in it; `object_errors` makes it an `ObjectError`.
"""

from __future__ import annotations

import contextlib
import errno
import os
import re
import secrets
import stat
import time
from collections.abc import Iterable, Iterator
from pathlib import Path
from types import ModuleType
from typing import Any, Protocol

from windtunnel.base import atomic
from windtunnel.base.errors import HostError, UserError

PART = ".part-"
"""What a name begins with while its file is not whole."""
BLOCK = 8 << 20
"""Bytes that are read at once."""


_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,119}")


class ObjectError(HostError):
    """An object is damaged, missing or cannot be written; the message names which."""


class OtherVersion(ObjectError):
    """A manifest of another version: what it names is not known here."""


@contextlib.contextmanager
def object_errors(what: str) -> Iterator[None]:
    """Errors of the system as an `ObjectError`, with what it was about."""
    try:
        yield
    except OSError as error:
        full = error.errno in (errno.ENOSPC, errno.EDQUOT)
        more = "; what was stored before is unharmed" if full else ""
        raise ObjectError(f"{what}: {error}{more}") from error


def checked(name: str) -> str:
    """``name``, or an `ObjectError`: it comes from elsewhere, and becomes the name of a file."""
    if not _NAME.fullmatch(name) or name.endswith(atomic.PART):
        raise ObjectError(f"{name!r} cannot name a file")
    return name


class Files(Protocol):
    """A place to keep files. Names are relative, with ``/``; ``url`` is what they are relative to."""

    url: str

    def write(self, name: str, data: bytes | memoryview) -> None:
        """The file is whole under its name, or unchanged where this raises."""

    def create(self, name: str, data: bytes) -> None:
        """As `write`, but durably at once, and only where nothing has the name: else FileExistsError. Of
        several that try, one succeeds."""

    def upload(self, name: str, source: Path) -> None:
        """As `write`, with the content of the file ``source``, of any size."""

    def rely(self, name: str) -> None:
        """This file, which another may have written, counts as written here: its name may not be durable
        yet."""

    def settle(self) -> None:
        """All that was written and removed is so after a power loss too."""

    def read(self, name: str, at: int = 0, length: int | None = None) -> bytes:
        """All from ``at`` on, or as much of ``length`` bytes as there is. Raises FileNotFoundError."""

    def size(self, name: str) -> int | None:
        """Bytes; None where there is no such file."""

    def names(self, folder: str) -> list[str]:
        """What lies in it, sorted, without unfinished writes; nothing where it does not exist."""

    def remove(self, name: str) -> None:
        """A file, or a folder with all in it; it may be gone already."""

    def remove_empty(self, folder: str) -> None:
        """A folder, if nothing is in it."""

    def tidy(self, folder: str, older: float) -> None:
        """Remove what writes of more than ``older`` seconds ago left unfinished."""


def open_files(url: str | Files) -> Files:
    """The files under ``url``: a path, ``file://path``, or another protocol of fsspec.

    Raises:
        UserError: fsspec knows no such protocol, or its library is not installed.
    """
    if not isinstance(url, str):
        return url
    protocol, separator, path = url.partition("://")
    if not separator or protocol in ("file", "local"):
        return LocalFiles(path if separator else url)
    try:
        import fsspec  # only here: an agent starts without it

        filesystem, root = fsspec.core.url_to_fs(url)
    except ImportError as error:
        # fsspec says in words what to install; the name of it stands in the error beneath
        missing = error.__cause__ if isinstance(error.__cause__, ImportError) else error
        raise UserError(
            f"{url} cannot be used: {protocol}:// needs the package {missing.name or protocol}, which is not "
            f"installed where this runs; pip install {missing.name or protocol}"
        ) from None
    except ValueError as error:
        raise UserError(f"{url} cannot be used: {error}; accepted are folders and URLs of fsspec") from None
    return RemoteFiles(filesystem, root, url)


def read_if_there(files: Files, name: str) -> bytes | None:
    """A whole file; None where there is none."""
    try:
        return files.read(name)
    except FileNotFoundError:
        return None


class LocalFiles:
    """A local folder. ``system`` stands for ``os``, so that tests may interrupt any call."""

    def __init__(self, root: str, system: ModuleType | Any = os) -> None:
        self.url = os.path.abspath(root)
        self._os = system
        self._touched: set[str] = set()

    def write(self, name: str, data: bytes | memoryview) -> None:
        self._write(name, [data])

    def create(self, name: str, data: bytes) -> None:
        path = Path(self._path(name))
        self._folder(str(path.parent))
        atomic.write_new(path, data)

    def upload(self, name: str, source: Path) -> None:
        with source.open("rb") as file:
            self._write(name, iter(lambda: file.read(BLOCK), b""))

    def rely(self, name: str) -> None:
        self._touched.add(os.path.dirname(self._path(name)))

    def settle(self) -> None:
        # With the folders above: a process that was killed may have made them, and not settled them.
        folders = set(self._touched)
        for folder in self._touched:
            while folder.startswith(self.url + os.sep):
                folder = os.path.dirname(folder)
                folders.add(folder)
        for folder in sorted(folders):
            self._sync(folder)
        self._touched.clear()

    def read(self, name: str, at: int = 0, length: int | None = None) -> bytes:
        path = self._path(name)
        handle = self._os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        try:
            with _named(path):
                if at:
                    self._os.lseek(handle, at, os.SEEK_SET)
                parts, left = [], BLOCK if length is None else length
                while left and (part := self._os.read(handle, min(left, BLOCK))):
                    parts.append(part)
                    left -= len(part) if length is not None else 0
                return b"".join(parts)
        finally:
            self._os.close(handle)

    def size(self, name: str) -> int | None:
        try:
            status = self._os.stat(self._path(name))
        except (FileNotFoundError, NotADirectoryError):
            return None
        return status.st_size if stat.S_ISREG(status.st_mode) else None

    def names(self, folder: str) -> list[str]:
        return [name for name in self._list(folder) if not name.startswith(PART)]

    def remove(self, name: str) -> None:
        path = self._path(name)
        try:
            is_folder = stat.S_ISDIR(self._os.lstat(path).st_mode)
        except FileNotFoundError:
            return
        if not is_folder:
            self._touched.add(os.path.dirname(path))
            with contextlib.suppress(FileNotFoundError):
                self._os.unlink(path)
            return
        for inside in self._list(name):
            self.remove(f"{name}/{inside}")
        self.remove_empty(name)

    def remove_empty(self, folder: str) -> None:
        path = self._path(folder)
        with contextlib.suppress(OSError):  # somebody has just written into it, or removed it
            self._os.rmdir(path)
            self._touched.discard(path)
            self._touched.add(os.path.dirname(path))

    def tidy(self, folder: str, older: float) -> None:
        for name in self._list(folder):
            path = self._path(f"{folder}/{name}")
            with contextlib.suppress(FileNotFoundError):
                if name.startswith(PART) and self._os.stat(path).st_mtime < time.time() - older:
                    self._os.unlink(path)

    def _write(self, name: str, blocks: Iterable[bytes | memoryview]) -> None:
        path = self._path(name)
        folder, base = os.path.split(path)
        self._folder(folder)
        part = os.path.join(folder, f"{PART}{secrets.token_hex(6)}-{base}")
        try:
            with _named(path):
                handle = self._os.open(part, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o644)
                try:
                    for block in blocks:
                        left = memoryview(block)
                        while left:
                            left = left[self._os.write(handle, left) :]
                    self._os.fsync(handle)
                finally:
                    self._os.close(handle)
            self._os.replace(part, path)
        except OSError:
            with contextlib.suppress(OSError):
                self._os.unlink(part)
            raise
        self._touched.add(folder)

    def _path(self, name: str) -> str:
        return os.path.join(self.url, name) if name else self.url

    def _list(self, folder: str) -> list[str]:
        try:
            return sorted(self._os.listdir(self._path(folder)))
        except (FileNotFoundError, NotADirectoryError):
            return []

    def _folder(self, folder: str) -> None:
        """Make it and those above."""
        try:
            self._os.mkdir(folder, 0o755)
        except FileExistsError:
            return
        except FileNotFoundError:
            self._folder(os.path.dirname(folder))
            with contextlib.suppress(FileExistsError):
                self._os.mkdir(folder, 0o755)
        self._touched.add(os.path.dirname(folder))

    def _sync(self, folder: str) -> None:
        try:
            handle = self._os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        except FileNotFoundError:
            return  # removed meanwhile, and what was in it with it
        try:
            with _named(folder):
                self._os.fsync(handle)
        finally:
            self._os.close(handle)


class RemoteFiles:
    """A filesystem of fsspec, from ``root`` on."""

    def __init__(self, filesystem: Any, root: str, url: str) -> None:
        self.url = url.rstrip("/")
        self._fs = filesystem
        self._root = root.rstrip("/")

    def write(self, name: str, data: bytes | memoryview) -> None:
        with self._put(name) as path:
            self._fs.pipe_file(path, bytes(data))

    def create(self, name: str, data: bytes) -> None:
        with self._put(name) as path:
            self._fs.pipe_file(path, data, mode="create")

    def upload(self, name: str, source: Path) -> None:
        with self._put(name) as path:
            self._fs.put_file(str(source), path)

    def rely(self, name: str) -> None:
        """A put is durable when it returns."""

    def settle(self) -> None:
        """A put is durable when it returns."""

    def read(self, name: str, at: int = 0, length: int | None = None) -> bytes:
        with self._naming(name):
            if not at and length is None:
                return bytes(self._fs.cat_file(self._path(name)))
            end = None if length is None else at + length
            return bytes(self._fs.cat_file(self._path(name), start=at, end=end)) if end != at else b""

    def size(self, name: str) -> int | None:
        with self._naming(name):
            self._fs.invalidate_cache(self._path(name).rpartition("/")[0])
            try:
                info = self._fs.info(self._path(name))
            except FileNotFoundError:
                return None
            return int(info["size"]) if info["type"] == "file" else None

    def names(self, folder: str) -> list[str]:
        path = self._path(folder)
        with self._naming(folder):
            self._fs.invalidate_cache(path)
            try:
                paths = self._fs.ls(path, detail=False)
            except (FileNotFoundError, NotADirectoryError):
                return []
        return sorted(str(entry).rstrip("/").rpartition("/")[2] for entry in paths)

    def remove(self, name: str) -> None:
        with self._naming(name), contextlib.suppress(FileNotFoundError):
            self._fs.rm(self._path(name), recursive=True)

    def remove_empty(self, folder: str) -> None:
        """Stores have no empty folders; where they do, these do no harm."""

    def tidy(self, folder: str, older: float) -> None:
        """Stores show no unfinished puts."""

    def _path(self, name: str) -> str:
        return f"{self._root}/{name}" if name else self._root

    @contextlib.contextmanager
    def _put(self, name: str) -> Iterator[str]:
        path = self._path(name)
        with self._naming(name):
            # Stores with real folders (SFTP, NFS gateways) want them made; object stores pass over it.
            with contextlib.suppress(NotImplementedError, FileExistsError):
                self._fs.makedirs(path.rpartition("/")[0], exist_ok=True)
            yield path

    @contextlib.contextmanager
    def _naming(self, name: str) -> Iterator[None]:
        try:
            yield
        except FileNotFoundError:
            raise FileNotFoundError(errno.ENOENT, "there is no such object", f"{self.url}/{name}") from None
        except Exception as error:  # every store has exceptions of its own
            exists = errno.EEXIST if isinstance(error, FileExistsError) else errno.EIO
            number = getattr(error, "errno", None) or exists
            raise OSError(number, f"the store failed: {error}", f"{self.url}/{name}") from error


@contextlib.contextmanager
def _named(path: str) -> Iterator[None]:
    """An error of a call that knows only a descriptor, with the name of the file."""
    try:
        yield
    except OSError as error:
        if error.filename is None:
            error.filename = path
        raise
