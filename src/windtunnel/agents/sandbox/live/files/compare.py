"""Which paths differ between two trees: by metadata first, by bytes only where metadata cannot tell.

A renamed path is one that is gone and another that is new: what a process refers to by the old name is lost
either way.
"""

from __future__ import annotations

import os
import stat
from collections.abc import Callable
from pathlib import Path

from windtunnel.agents.sandbox.live.files.tree import extended, extents
from windtunnel.agents.sandbox.live.place import CHANNEL
from windtunnel.agents.sandbox.model import FileChange

Same = Callable[[str, os.stat_result, os.stat_result], bool]
"""Whether a path (as seen inside) is surely the same in both trees; in doubt False: then contents tell."""


class Comparison:
    """Collects the differences between the trees ``older`` and ``newer``."""

    def __init__(self, older: Path, newer: Path, same: Same) -> None:
        self._older, self._newer, self._same = str(older), str(newer), same
        self.changes: dict[str, FileChange] = {}

    def result(self) -> list[FileChange]:
        return [self.changes[path] for path in sorted(self.changes)]

    def trees(self, path: str = "") -> None:
        """Compare the whole of a folder that is in both trees (``path`` as seen inside, "" for the root)."""
        before, after = _names(self._older + path), _names(self._newer + path)
        for name in before.keys() | after.keys():
            self.entry(f"{path}/{name}")

    def folder(self, path: str) -> None:
        """Compare the entries of a folder, but not what is inside of those that are the same inode in
        both."""
        before, after = _inodes(self._older + path), _inodes(self._newer + path)
        for name in before.keys() | after.keys():
            if before.get(name) != after.get(name):
                self.entry(f"{path}/{name}")

    def entry(self, path: str, *, deep: bool = True) -> None:
        """Compare one path, and with ``deep`` what lies below it."""
        if path == f"/{CHANNEL}" or path.startswith(f"/{CHANNEL}/") or path in self.changes:
            return
        before, after = _lstat(self._older + path), _lstat(self._newer + path)
        if before is None and after is None:
            return
        if before is None or after is None:
            self._one_sided(path, before, after)
            return
        if stat.S_IFMT(before.st_mode) != stat.S_IFMT(after.st_mode):
            self._replaced(path, before, after)
        elif stat.S_ISDIR(before.st_mode):
            if not self._same(path, before, after) and self._metadata(path, before, after):
                self.changes[path] = FileChange(path, "metadata")
            if deep:
                self.trees(path)
        elif not self._same(path, before, after):
            self._files(path, before, after)

    def _one_sided(self, path: str, before: os.stat_result | None, after: os.stat_result | None) -> None:
        about = after or before
        assert about is not None
        if after is not None:
            self.changes[path] = FileChange(
                path, "created", after.st_size if stat.S_ISREG(after.st_mode) else 0
            )
        else:
            self.changes[path] = FileChange(path, "deleted")
        if stat.S_ISDIR(about.st_mode):
            self.trees(path)

    def _replaced(self, path: str, before: os.stat_result, after: os.stat_result) -> None:
        """Another kind of thing under the same name."""
        self.changes[path] = FileChange(path, "modified", after.st_size if stat.S_ISREG(after.st_mode) else 0)
        if stat.S_ISDIR(before.st_mode) or stat.S_ISDIR(after.st_mode):
            self.trees(path)

    def _files(self, path: str, before: os.stat_result, after: os.stat_result) -> None:
        old, new = self._older + path, self._newer + path
        if stat.S_ISREG(before.st_mode):
            differ = before.st_size != after.st_size or not _equal_bytes(old, new, after.st_size)
        elif stat.S_ISLNK(before.st_mode):
            differ = os.readlink(old) != os.readlink(new)
        else:
            differ = before.st_rdev != after.st_rdev
        if differ:
            size = after.st_size if stat.S_ISREG(after.st_mode) else 0
            self.changes[path] = FileChange(path, "modified", size)
        elif self._metadata(path, before, after):
            self.changes[path] = FileChange(path, "metadata", after.st_size)

    def _metadata(self, path: str, before: os.stat_result, after: os.stat_result) -> bool:
        """Mode, owner or extended attributes differ, or the time of a file, by which ``make`` decides."""
        if stat.S_ISREG(before.st_mode) and before.st_mtime_ns != after.st_mtime_ns:
            return True
        if (before.st_mode, before.st_uid, before.st_gid) != (after.st_mode, after.st_uid, after.st_gid):
            return True
        return _shown(self._older + path) != _shown(self._newer + path)


def _shown(path: str) -> dict[str, bytes]:
    """Extended attributes that the sandbox sees; those of the overlay itself are not among them."""
    return {name: value for name, value in extended(path).items() if not name.startswith("trusted.overlay.")}


def _names(path: str) -> dict[str, None]:
    try:
        return dict.fromkeys(os.listdir(path))
    except (FileNotFoundError, NotADirectoryError):
        return {}


def _inodes(path: str) -> dict[str, int]:
    try:
        with os.scandir(path) as entries:
            return {entry.name: entry.inode() for entry in entries}
    except (FileNotFoundError, NotADirectoryError):
        return {}


def _lstat(path: str) -> os.stat_result | None:
    try:
        return os.lstat(path)
    except (FileNotFoundError, NotADirectoryError):
        return None


def _equal_bytes(older: str, newer: str, size: int) -> bool:
    """Whether two files of one size hold the same bytes; parts that are holes in both are not read."""
    first = os.open(older, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC)
    try:
        second = os.open(newer, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC)
        try:
            for start, end in sorted({*extents(first, size), *extents(second, size)}):
                for place in range(start, end, 1 << 20):
                    length = min(end - place, 1 << 20)
                    if os.pread(first, length, place) != os.pread(second, length, place):
                        return False
            return True
        finally:
            os.close(second)
    finally:
        os.close(first)
