"""A disk in memory that knows what a kill and what a power loss leave, and can fail at any call.

It stands for ``os`` in `LocalFiles`. Data are durable after fsync of the file, names after fsync of their
folder. Every call counts; one can be made to fail, to end the process, or to wait for its turn.
"""

from __future__ import annotations

import copy
import os
import stat
from collections.abc import Callable
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Literal

Crash = Literal["kill", "power", "names"]
"""Left are: everything done so far; only what is durable; all names, with only the durable data."""


class Killed(BaseException):
    """The process ends here."""


@dataclass
class File:
    data: bytes = b""
    durable: bytes = b""


@dataclass
class Folder:
    names: dict[str, File | Folder] = field(default_factory=dict)
    durable: dict[str, File | Folder] = field(default_factory=dict)


class Disk:
    def __init__(self) -> None:
        self.root = Folder()
        self.calls = 0
        self.before: Callable[[str, int], None] = lambda call, number: None
        """Called before each call with its name and number; may raise."""
        self._open: dict[int, tuple[File | Folder, int]] = {}
        self._next = 100

    def after(self, crash: Crash) -> Disk:
        """What the next process finds."""
        disk = Disk()
        kept = copy.deepcopy(self.root)
        # The system outlives a killed process, with what it has not written out yet.
        disk.root = kept if crash == "kill" else _settled(kept, crash)
        return disk

    def open(self, path: str, flags: int, mode: int = 0o777) -> int:
        self._called("open")
        folder, name = self._parent(path)
        entry = folder.names.get(name) if name else folder
        if flags & os.O_CREAT:
            if entry is not None:
                raise FileExistsError(path)
            entry = folder.names[name] = File()
        if entry is None:
            raise FileNotFoundError(path)
        self._next += 1
        self._open[self._next] = (entry, 0)
        return self._next

    def write(self, handle: int, data: memoryview) -> int:
        file, at = self._open[handle]
        assert isinstance(file, File)
        half = bytes(data[: (len(data) + 1) // 2])
        file.data += half  # a call that is interrupted has done part of its work
        self._open[handle] = (file, at + len(half))
        self._called("write")
        return len(half)

    def read(self, handle: int, size: int) -> bytes:
        self._called("read")
        file, at = self._open[handle]
        assert isinstance(file, File)
        part = file.data[at : at + size]
        self._open[handle] = (file, at + len(part))
        return part

    def fsync(self, handle: int) -> None:
        self._called("fsync")
        entry, _ = self._open[handle]
        if isinstance(entry, File):
            entry.durable = entry.data
        else:
            entry.durable = dict(entry.names)

    def close(self, handle: int) -> None:
        del self._open[handle]
        self._called("close")

    def replace(self, path: str, to: str) -> None:
        self._called("replace")
        folder, name = self._parent(path)
        if name not in folder.names:
            raise FileNotFoundError(path)
        target, new = self._parent(to)
        target.names[new] = folder.names.pop(name)

    def unlink(self, path: str) -> None:
        self._called("unlink")
        folder, name = self._parent(path)
        if name not in folder.names:
            raise FileNotFoundError(path)
        del folder.names[name]

    def mkdir(self, path: str, mode: int = 0o777) -> None:
        self._called("mkdir")
        folder, name = self._parent(path)
        if name in folder.names:
            raise FileExistsError(path)
        folder.names[name] = Folder()

    def rmdir(self, path: str) -> None:
        self._called("rmdir")
        folder, name = self._parent(path)
        entry = folder.names.get(name)
        if not isinstance(entry, Folder):
            raise FileNotFoundError(path)
        if entry.names:
            raise OSError(39, "Directory not empty", path)
        del folder.names[name]

    def listdir(self, path: str) -> list[str]:
        self._called("listdir")
        entry = self._find(path)
        if not isinstance(entry, Folder):
            raise NotADirectoryError(path)
        return list(entry.names)

    def stat(self, path: str) -> SimpleNamespace:
        self._called("stat")
        entry = self._find(path)
        if isinstance(entry, Folder):
            return SimpleNamespace(st_mode=stat.S_IFDIR, st_size=0, st_mtime=0.0)
        return SimpleNamespace(st_mode=stat.S_IFREG, st_size=len(entry.data), st_mtime=1e12)

    lstat = stat

    def _called(self, call: str) -> None:
        self.calls += 1
        self.before(call, self.calls)

    def _parent(self, path: str) -> tuple[Folder, str]:
        above, name = os.path.split(path)
        folder = self._find(above)
        if not isinstance(folder, Folder):
            raise NotADirectoryError(path)
        return folder, name

    def _find(self, path: str) -> File | Folder:
        at: File | Folder = self.root
        for name in path.strip("/").split("/"):
            if not name:
                continue
            if not isinstance(at, Folder):
                raise NotADirectoryError(path)
            if name not in at.names:
                raise FileNotFoundError(path)
            at = at.names[name]
        return at


def _settled(folder: Folder, crash: Crash) -> Folder:
    names = folder.durable if crash == "power" else folder.names
    kept: dict[str, File | Folder] = {}
    for name, entry in names.items():
        if isinstance(entry, Folder):
            kept[name] = _settled(entry, crash)
        else:
            kept[name] = File(entry.durable, entry.durable)
    return Folder(kept, dict(kept))
