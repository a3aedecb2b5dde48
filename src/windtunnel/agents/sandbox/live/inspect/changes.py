"""The net effect of a stream of changes on a tree of files: what was born and is gone again does not count.

For every path that was touched it is remembered whether it existed when the window began, as far as the
stream tells: a path that is created was not there before, one that is deleted or written was, and the target
of a rename may or may not have been. Whether it exists *now* is asked of the tree itself at the end, so the
order in which two processes' events arrive cannot hide a change. All doubt falls on the side of a change.

Source: the net-change rule of Crab (arXiv 2604.28138), section 4.
"""

from __future__ import annotations

import os
import stat
from collections.abc import Callable
from dataclasses import dataclass, field

from windtunnel.agents.sandbox.model import Change, FileChange

MOST = 50_000
"""Paths that are remembered; beyond, only that there were more."""


@dataclass(slots=True)
class _Entry:
    before: bool | None
    """Did it exist at the start? None: not known."""
    replaced: bool = False
    modified: bool = False
    moved_in: bool = False


@dataclass
class Changes:
    """Paths are absolute byte strings, without symbolic links in their directories."""

    _entries: dict[bytes, _Entry] = field(default_factory=dict)
    overflow: int = 0

    def __len__(self) -> int:
        return len(self._entries)

    def _touched(self, path: bytes, before: bool | None) -> _Entry:
        entry = self._entries.get(path)
        if entry is None:
            entry = _Entry(False if before is not False and self._below_new(path) else before)
            if len(self._entries) < MOST:
                self._entries[path] = entry
            else:
                self.overflow += 1
        return entry

    def _below_new(self, path: bytes) -> bool:
        """Was a directory above it made or moved here within the window? Then nothing of this name was
        there before, or its removal would be known."""
        at = path.rfind(b"/")
        while at > 0:
            entry = self._entries.get(path[:at])
            if entry is not None and (entry.before is False or entry.moved_in):
                return True
            at = path.rfind(b"/", 0, at)
        return False

    def created(self, path: bytes) -> None:
        self._touched(path, False).replaced = True

    def modified(self, path: bytes) -> None:
        self._touched(path, True).modified = True

    def metadata(self, path: bytes) -> None:
        self._touched(path, True)

    def deleted(self, path: bytes) -> None:
        self._touched(path, True).replaced = True

    def moved_in(self, path: bytes) -> None:
        """The target of a rename, whose source counts as deleted."""
        entry = self._touched(path, None)
        entry.replaced = entry.moved_in = True

    def net(
        self, lstat: Callable[[bytes], os.stat_result | None], most: int = 4096
    ) -> tuple[list[FileChange], int]:
        """Up to ``most`` changes that remain, and how many there are."""
        found: list[FileChange] = []
        total = self.overflow
        for path, entry in self._entries.items():
            now = lstat(path)
            if now is None and entry.before is False:
                continue
            total += 1
            if len(found) < most:
                size = now.st_size if now is not None and stat.S_ISREG(now.st_mode) else 0
                found.append(FileChange(os.fsdecode(path), _word(entry, now is not None), size))
        return found, total


def _word(entry: _Entry, exists: bool) -> Change:
    if not exists:
        return "deleted"
    if entry.before is None:
        return "renamed"
    if entry.before is False or entry.replaced:
        return "created"
    return "modified" if entry.modified else "metadata"
