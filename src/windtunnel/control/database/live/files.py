"""Files in tables as a file system of fsspec: whole files appear, are replaced and go in one transaction
each.

    files = fsspec.filesystem("control", db="sqlite:///control.db")
    with files.open("runs/7/notes.txt", "w") as file: ...

Folders are the parts of paths, as in an object store. A file is read, or written until it is closed, in
memory. Who wants to know the largest files asks in SQL."""

from __future__ import annotations

from typing import Any

import fsspec
from fsspec.spec import AbstractBufferedFile

from windtunnel.control.database.live.control import open_control


class _StoredFile(AbstractBufferedFile):  # type: ignore[misc]
    def _fetch_range(self, start: int, end: int) -> bytes:
        return self.fs.cat_file(self.path, start, end)

    def _upload_chunk(self, final: bool = False) -> bool:
        if final:
            self.fs.pipe_file(self.path, self.buffer.getvalue())
        return final  # else it stays in the buffer


class ControlFileSystem(fsspec.AbstractFileSystem):  # type: ignore[misc]
    """``db``: the URL of a control plane.

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
        stripped = super()._strip_protocol(path)
        return stripped.strip("/") if isinstance(stripped, str) else stripped

    def ls(self, path: str, detail: bool = True, **_: Any) -> list[Any]:
        path = self._strip_protocol(path)
        entries: dict[str, dict[str, Any]] = {}
        for name, size, modified in self.control.run("list_files", prefix=path):
            if not path or name == path or name.startswith(f"{path}/"):
                first = name[len(path) :].strip("/").partition("/")[0]
                inner = name if name == path else f"{path}/{first}".strip("/")
                kind = "file" if inner == name else "directory"
                entries[inner] = {"name": inner, "size": size if kind == "file" else 0, "type": kind,
                                "modified": modified}  # fmt: skip
        if path and not entries:
            raise FileNotFoundError(path)
        return list(entries.values()) if detail else list(entries)

    def cat_file(self, path: str, start: int | None = None, end: int | None = None, **_: Any) -> bytes:
        data: bytes | None = self.control.run("read_file", path=self._strip_protocol(path))
        if data is None:
            raise FileNotFoundError(path)
        return data[start:end]

    def pipe_file(self, path: str, value: bytes, **_: Any) -> None:
        self.control.run("write_file", path=self._strip_protocol(path), data=bytes(value))

    def cp_file(self, path1: str, path2: str, **_: Any) -> None:
        self.pipe_file(path2, self.cat_file(path1))

    def rm(self, path: Any, recursive: bool = False, maxdepth: int | None = None) -> None:
        """All of them in one transaction."""
        paths = self.expand_path(path, recursive=recursive, maxdepth=maxdepth)
        if not self.control.run("remove_files", paths=paths):
            raise FileNotFoundError(path)

    def mkdir(self, path: str, create_parents: bool = True, **_: Any) -> None:
        """A folder is there as soon as there is a file in it."""

    def _open(self, path: str, mode: str = "rb", **_: Any) -> Any:
        if mode not in ("rb", "wb"):
            raise NotImplementedError(f"mode {mode} of {path}: files are read, or written whole")
        return _StoredFile(self, path, mode, cache_type="all")
