"""The newest images as CRIU wrote them, beside the store that has them page by page."""

from __future__ import annotations

import contextlib
import os
import shutil
import threading
from pathlib import Path

LIMIT = 2 * 2**30


class RawImages:
    """The newest images as CRIU wrote them, so that a restore or a fork soon after costs links, not reads.

    An image is taken in, and given out, by hard links, as long as size and time of change of every file stay
    the same; the store hashes what is given out while CRIU already reads it. What an earlier process has left
    is dropped: after a crash of the host, files that were never synced may hold anything. The oldest images
    go when all hold more than `LIMIT` bytes.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._lock = threading.Lock()
        self._marks: dict[str, dict[str, tuple[int, int]]] = {}
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir(parents=True)

    def put(self, id: str, images: Path) -> None:
        """Take the files of ``images`` in; silently not, when links cannot be made there."""
        try:
            marks = _marks(images)
            if _size(marks) > LIMIT:
                return
            (self._folder / id).mkdir(mode=0o700)
            for name in marks:
                os.link(images / name, self._folder / id / name)
        except OSError:
            shutil.rmtree(self._folder / id, ignore_errors=True)
            return
        with self._lock:
            self._marks[id] = marks
            over = sum(map(_size, self._marks.values())) - LIMIT
            old = []
            for name, held in self._marks.items():
                if over <= 0:
                    break
                old.append(name)
                over -= _size(held)
        for name in old:
            self.forget(name)

    def folder(self, id: str) -> Path | None:
        """The files of an image, not to be written to; one that somebody changed is removed."""
        folder, marks = self._folder / id, self._marks.get(id)
        if marks is None:
            return None
        with contextlib.suppress(OSError):
            if _marks(folder) == marks:
                return folder
        self.forget(id)
        return None

    def give(self, id: str, into: Path) -> bool:
        """Link the files of an image into ``into``; False, with nothing left, when it is not to be had."""
        folder = self.folder(id)
        if folder is None:
            return False
        names = sorted(self._marks.get(id, ()))
        try:
            for name in names:
                os.link(folder / name, into / name)
        except OSError:
            for name in names:
                (into / name).unlink(missing_ok=True)
            return False
        return True

    def forget(self, id: str) -> None:
        with self._lock:
            self._marks.pop(id, None)
        shutil.rmtree(self._folder / id, ignore_errors=True)


def _size(marks: dict[str, tuple[int, int]]) -> int:
    return sum(size for size, _ in marks.values())


def _marks(folder: Path) -> dict[str, tuple[int, int]]:
    """Size and time of change (ns) of each file."""
    with os.scandir(folder) as entries:
        about = {entry.name: entry.stat(follow_symlinks=False) for entry in entries}
    return {name: (each.st_size, each.st_mtime_ns) for name, each in about.items()}
