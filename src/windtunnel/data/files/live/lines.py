"""``lines://NAME/path`` for fsspec: pandas, Parquet, checkpoints and whatever else opens URLs.

A file that is written appears whole, under its name, when it is closed, and is then on the disks of all
hosts: its parts have a name beside it before."""

from __future__ import annotations

import errno
import os
import posixpath
import secrets
from typing import Any, ClassVar

from fsspec.spec import AbstractBufferedFile, AbstractFileSystem

from windtunnel.data.files.live.client import FileClient, connect
from windtunnel.data.files.model import OperationKind, Stat

PART = ".part-"


class LinesFileSystem(AbstractFileSystem):  # type: ignore[misc]
    """``timeout``: seconds in which another primary must have come (default: `client.TIMEOUT`)."""

    protocol = "lines"
    cachable = True
    clients: ClassVar[dict[tuple[int, str], FileClient]] = {}

    def _place(self, path: str) -> tuple[FileClient, str]:
        """The client of a path's name, and the path there."""
        name, _, rest = self._strip_protocol(path).partition("/")
        key = (os.getpid(), name)
        if key not in self.clients:
            self.clients[key] = connect(name, **self.storage_options)
        return self.clients[key], posixpath.normpath(f"/{rest}")

    def _entry(self, path: str, stat: Stat) -> dict[str, Any]:
        kind = "directory" if stat.folder else "file"
        return {"name": path, "size": stat.size, "type": kind, "mtime": stat.modified}

    def info(self, path: str, **kwargs: Any) -> dict[str, Any]:
        client, place = self._place(path)
        return self._entry(self._strip_protocol(path), client.stat(place))

    def ls(self, path: str, detail: bool = True, **kwargs: Any) -> list[Any]:
        client, place = self._place(path)
        path = self._strip_protocol(path)
        if not client.stat(place).folder:
            return [self.info(path)] if detail else [path]
        names = [name for name in client.names(place) if not name.startswith(PART)]
        paths = [f"{path}/{name}" for name in names]
        return [self.info(path) for path in paths] if detail else paths

    def mkdir(self, path: str, create_parents: bool = True, **kwargs: Any) -> None:
        if create_parents:
            self.makedirs(self._parent(path), exist_ok=True)
        client, place = self._place(path)
        client.perform(OperationKind.MKDIR, place)

    def makedirs(self, path: str, exist_ok: bool = False) -> None:
        client, place = self._place(path)
        parts = place.strip("/").split("/") if place != "/" else []
        for end in range(1, len(parts) + 1):
            try:
                client.perform(OperationKind.MKDIR, "/" + "/".join(parts[:end]))
            except FileExistsError:
                if end == len(parts) and not exist_ok:
                    raise

    def rmdir(self, path: str) -> None:
        client, place = self._place(path)
        client.perform(OperationKind.RMDIR, place)
        client.sync()

    def rm_file(self, path: str) -> None:
        client, place = self._place(path)
        client.perform(OperationKind.UNLINK, place)
        client.sync()

    _rm = rm_file

    def rm(self, path: Any, recursive: bool = False, maxdepth: int | None = None) -> None:
        for entry in reversed(self.expand_path(path, recursive=recursive, maxdepth=maxdepth)):
            if self.isdir(entry):
                self.rmdir(entry)
            else:
                self.rm_file(entry)

    def mv(self, path1: str, path2: str, **kwargs: Any) -> None:
        client, source = self._place(path1)
        other, target = self._place(path2)
        if other is not client:
            raise OSError(errno.EXDEV, os.strerror(errno.EXDEV), path2)
        client.perform(OperationKind.RENAME, source, target=target)
        client.sync()

    def cp_file(self, path1: str, path2: str, **kwargs: Any) -> None:
        with self.open(path1) as source, self.open(path2, "wb") as target:
            while part := source.read(self.blocksize):
                target.write(part)

    def modified(self, path: str) -> Any:
        from datetime import UTC, datetime

        return datetime.fromtimestamp(self.info(path)["mtime"], UTC)

    def _open(self, path: str, mode: str = "rb", **kwargs: Any) -> LinesFile:
        block_size = kwargs.pop("block_size", None) or "default"
        return LinesFile(self, path, mode, block_size, **kwargs)


class LinesFile(AbstractBufferedFile):  # type: ignore[misc]
    """An open file. Its writes go to the log as they come; closing it is the rename and the sync."""

    def _initiate_upload(self) -> None:
        self.client, self.place = self.fs._place(self.path)
        self.part = self.place
        if self.mode == "ab":
            try:
                self.offset = self.client.stat(self.place).size
            except FileNotFoundError:
                self.client.perform(OperationKind.CREATE, self.place)
            return
        if self.mode == "wb":
            folder, name = posixpath.split(self.place)
            self.part = posixpath.join(folder, f"{PART}{secrets.token_hex(6)}-{name}"[:255])
        self.client.perform(OperationKind.CREATE, self.part)

    def _upload_chunk(self, final: bool = False) -> bool:
        self.client.write(self.part, self.offset, self.buffer.getvalue())
        if final and self.autocommit:
            self.commit()
        return True

    def commit(self) -> None:
        if self.part != self.place:
            self.client.perform(OperationKind.RENAME, self.part, target=self.place)
        self.client.sync()

    def discard(self) -> None:
        self.client.perform(OperationKind.UNLINK, self.part)

    def _fetch_range(self, start: int, end: int) -> bytes:
        client, place = self.fs._place(self.path)
        return client.read(place, start, end - start)
