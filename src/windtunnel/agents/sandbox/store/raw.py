"""The newest images as CRIU wrote them, beside the store that has them page by page."""

from __future__ import annotations

import contextlib
import os
import secrets
import shutil
import threading
from pathlib import Path

from windtunnel.base.atomic import PART

Marks = dict[str, tuple[int, int]]
"""Size and time of change (ns) of each file of an image."""


class RawImages:
    """The newest images as CRIU wrote them, so that a restore or a fork soon after costs links, not reads.

    An image is taken in, and given out, by hard links. What this process has put here it gives out as long as
    size and time of change of every file stay the same, and the store hashes it while CRIU already reads it;
    what it finds from before has to be checked by the store first, since after a crash of the host files that
    were never synced may hold anything. The cache may be deleted at any time; its oldest images go when they
    hold more than ``limit`` bytes.
    """

    def __init__(self, folder: Path, limit: int) -> None:
        self._folder = folder
        self._limit = limit
        self._lock = threading.Lock()
        self._known: dict[str, Marks] = {}
        self._sizes: dict[str, int] = {}
        for path in sorted(folder.iterdir(), key=lambda path: path.stat().st_mtime_ns):
            if path.name.endswith(PART):
                shutil.rmtree(path, ignore_errors=True)
            else:
                self._sizes[path.name] = sum(file.stat().st_size for file in path.iterdir())

    def put(self, id: str, images: Path) -> None:
        """Take the files of ``images`` in; silently not, when links cannot be made there."""
        marks = _marks(images)
        size = sum(length for length, _ in marks.values())
        if size > self._limit:
            return
        temporary = self._folder / f"{id}.{secrets.token_hex(4)}{PART}"
        try:
            temporary.mkdir(mode=0o700)
            for name in marks:
                os.link(images / name, temporary / name)
            temporary.rename(self._folder / id)
        except OSError:
            shutil.rmtree(temporary, ignore_errors=True)
            return
        with self._lock:
            self._known[id] = marks
            self._sizes[id] = size
            over = sum(self._sizes.values()) - self._limit
            old = []
            for name, held in self._sizes.items():
                if over <= 0:
                    break
                old.append(name)
                over -= held
        for name in old:
            self.forget(name)

    def trust(self, id: str) -> None:
        """The store has checked this image."""
        with contextlib.suppress(OSError):
            marks = _marks(self._folder / id)
            with self._lock:
                self._known[id] = marks

    def trusted(self, id: str) -> Path | None:
        """The folder of an image that is known to be right; one that somebody changed is removed."""
        folder, known = self._folder / id, self._known.get(id)
        if known is None:
            return None
        with contextlib.suppress(OSError):
            if _marks(folder) == known:
                return folder
        self.forget(id)
        return None

    def untrusted(self, id: str) -> Path | None:
        """The folder of an image that was found here and not checked yet."""
        folder = self._folder / id
        return folder if id not in self._known and folder.is_dir() else None

    def forget(self, id: str) -> None:
        with self._lock:
            self._known.pop(id, None)
            self._sizes.pop(id, None)
        shutil.rmtree(self._folder / id, ignore_errors=True)

    def forget_all_but(self, ids: set[str]) -> None:
        for path in list(self._folder.iterdir()):
            if path.name not in ids and not path.name.endswith(PART):
                self.forget(path.name)

    def give(self, id: str, into: Path) -> bool:
        """Link the files of an image into ``into``; False, with nothing left, when it is not to be had."""
        folder = self.trusted(id)
        if folder is None:
            return False
        names = sorted(self._known.get(id, ()))
        try:
            for name in names:
                os.link(folder / name, into / name)
        except OSError:
            for name in names:
                with contextlib.suppress(FileNotFoundError):
                    (into / name).unlink()
            return False
        return True


def _marks(folder: Path) -> Marks:
    marks: Marks = {}
    with os.scandir(folder) as entries:
        for entry in entries:
            found = entry.stat(follow_symlinks=False)
            marks[entry.name] = (found.st_size, found.st_mtime_ns)
    return marks
