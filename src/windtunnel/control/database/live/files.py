"""Files in tables as a file system of fsspec: whole files appear, are replaced and go in one transaction each.

    fs = fsspec.filesystem("control", db="sqlite:///control.db")
    with fs.open("runs/7/notes.txt", "w") as file: ...

Folders are the parts of paths, as in an object store. A file that is written is held in memory until it is
closed; one that is read is fetched in blocks. Who is asked for the largest files asks in SQL.
"""

from __future__ import annotations

import io
from typing import Any

import fsspec
from fsspec.spec import AbstractBufferedFile

from windtunnel.control.database.handlers import BLOCK
from windtunnel.control.database.live.control import open_control


class _Written(io.BytesIO):
    """What is written, until it is closed; it is left out where the block that writes raises."""

    def __init__(self, files: ControlFileSystem, path: str) -> None:
        super().__init__()
        self._files, self._path = files, path

    def __exit__(self, kind: Any, *rest: Any) -> None:
        if kind is not None:
            super().close()
        self.close()

    def close(self) -> None:
        if not self.closed:
            data = self.getvalue()
            super().close()
            self._files.pipe_file(self._path, data)

    def __del__(self) -> None:  # a file that nobody closed was not finished
        io.BytesIO.close(self)


class _Read(AbstractBufferedFile):  # type: ignore[misc]
    def _fetch_range(self, start: int, end: int) -> bytes:
        return self.fs.cat_file(self.path, start, end)


class ControlFileSystem(fsspec.AbstractFileSystem):  # type: ignore[misc]
    """``db``: of a control plane, as `open_control` takes it.

    Raises:
        UserError, DatabaseError: as `open_control` does.
    """

    protocol = "control"
    cachable = False

    def __init__(self, db: str, **options: Any) -> None:
        super().__init__(**options)
        self.control = open_control(db, option="db")

    @classmethod
    def _strip_protocol(cls, path: Any) -> Any:
        return path if isinstance(path, list) else super()._strip_protocol(path).strip("/")

    def ls(self, path: str, detail: bool = True, **_: Any) -> list[Any]:
        path = self._strip_protocol(path)
        found: dict[str, dict[str, Any]] = {}
        for name, size, modified in self.control.run("list_files", prefix=path):
            inner = name if name == path else name[len(path) + 1 :] if path else name
            if name != path and path and name[len(path)] != "/":
                continue
            if name != path and "/" in inner:
                folder = f"{path}/{inner.partition('/')[0]}".strip("/")
                found[folder] = {"name": folder, "size": 0, "type": "directory"}
            else:
                found[name] = {"name": name, "size": size, "type": "file", "modified": modified}
        if path and not found:
            raise FileNotFoundError(path)
        return list(found.values()) if detail else list(found)

    def cat_file(self, path: str, start: int | None = None, end: int | None = None, **_: Any) -> bytes:
        path = self._strip_protocol(path)
        if start is None or end is None or min(start, end) < 0:
            size = self.info(path)["size"]
            start, end, _ = slice(start, end).indices(size)
        data = self.control.run("read_file", path=path, start=start, end=end)
        if data is None:
            raise FileNotFoundError(path)
        return bytes(data)

    def pipe_file(self, path: str, value: bytes, **_: Any) -> None:
        self.control.run("write_file", path=self._strip_protocol(path), data=bytes(value))

    def _open(self, path: str, mode: str = "rb", **options: Any) -> Any:
        if mode == "rb":
            return _Read(self, path, mode, block_size=BLOCK, size=self.info(path)["size"])
        if mode != "wb":
            raise NotImplementedError(f"mode {mode} of {path}: files are read, or written whole")
        return _Written(self, path)

    def makedirs(self, path: str, exist_ok: bool = False) -> None:
        """Folders are there as soon as there is a file in them."""

    mkdir = makedirs

    def rm(self, path: Any, recursive: bool = False, maxdepth: int | None = None) -> None:
        """All of them in one transaction."""
        files = self.expand_path(path, recursive=recursive, maxdepth=maxdepth)
        if not self.control.run("remove_files", paths=files):
            raise FileNotFoundError(path)

    _rm = rm

    def mv(self, path1: str, path2: str, **_: Any) -> None:
        """One file, in one transaction."""
        if not self.control.run("move_file", path=self._strip_protocol(path1), to=self._strip_protocol(path2)):
            raise FileNotFoundError(path1)

    def cp_file(self, path1: str, path2: str, **_: Any) -> None:
        self.pipe_file(path2, self.cat_file(path1))
