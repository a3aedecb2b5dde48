"""What a script moves and removes of checkpoints: none that was there before, none that was never written.

Checkpoints are not written under emulation (see `saving`). So a script's rotation must not remove the real
ones, which nothing takes the place of, and later ranks must find what earlier ones found. And what was saved
and not written is no file: removing or renaming it is answered, so that rotation and saving by way of a
temporary name come through. Python's own functions are answered, not other programs that a script starts.
"""

from __future__ import annotations

import functools
import os
import shutil
from collections.abc import Callable
from typing import Any

SUFFIXES = (".bin", ".ckpt", ".distcp", ".pt", ".pth", ".safetensors")
"""What the names of files of weights end with."""


class Keeping:
    """``began``: seconds since the epoch at which the emulation began, before any rank. ``note`` takes a
    sentence for the report."""

    def __init__(self, note: Callable[[str], None], began: float) -> None:
        self.note, self.began = note, began
        self._unwritten: set[str] = set()

    def saved(self, path: Any) -> None:
        """Note that a script has saved there, and nothing was written. What is no path is left out."""
        if isinstance(path, str | os.PathLike):
            self._unwritten.add(_name(path))

    def install(self) -> None:
        """Replace the functions that remove and rename. Call once."""
        system: Any = os
        tools: Any = shutil
        for name in ("remove", "unlink"):
            setattr(system, name, self._removing(getattr(os, name)))
        for name in ("rename", "replace"):
            setattr(system, name, self._renaming(getattr(os, name)))
        tools.rmtree = self._removing(shutil.rmtree)

    def _removing(self, original: Callable[..., None]) -> Callable[..., None]:
        @functools.wraps(original)
        def remove(path: Any, *args: Any, **options: Any) -> None:
            if options.get("dir_fd") is not None or not self._answered(path):
                original(path, *args, **options)
            elif not os.path.lexists(path):
                self._unwritten.discard(_name(path))

        return remove

    def _renaming(self, original: Callable[..., None]) -> Callable[..., None]:
        @functools.wraps(original)
        def rename(src: Any, dst: Any, **options: Any) -> None:
            if any(place is not None for place in options.values()) or not self._answered(src):
                original(src, dst, **options)
            elif not os.path.lexists(src):
                self._unwritten.discard(_name(src))
                self.saved(dst)

        return rename

    def _answered(self, path: Any) -> bool:
        """Whether a file or folder is left as it is."""
        if not isinstance(path, str | os.PathLike):
            return False
        if not os.path.lexists(path):
            return _name(path) in self._unwritten
        if not self._was_there(path):
            return False
        self.note("a checkpoint was there before the emulation: the script neither removes nor renames it")
        return True

    def _was_there(self, path: str | os.PathLike[str]) -> bool:
        inside = [os.path.join(folder, name) for folder, _, names in os.walk(path) for name in names]
        files = [one for one in [os.fspath(path), *inside] if str(one).endswith(SUFFIXES)]
        return any(os.path.isfile(file) and os.stat(file).st_ctime < self.began for file in files)


def _name(path: str | os.PathLike[str]) -> str:
    return os.path.abspath(os.fspath(path))
