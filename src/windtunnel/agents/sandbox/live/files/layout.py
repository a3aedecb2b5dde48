"""The folders of a pool, checked names, drafts that are whole before they get their name, and faults in
words."""

from __future__ import annotations

import errno
import fcntl
import os
import re
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from windtunnel.agents.sandbox.live.files.fault import PoolError
from windtunnel.linux.system import locked, opened

_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9._+@:-]{0,199}")


def checked(name: str) -> str:
    """``name``, or PoolError where it could lead out of the pool's folders."""
    if not _NAME.fullmatch(name):
        raise PoolError(
            f"{name!r} is no name that a pool can keep: letters, digits and '._+@:-' are accepted"
        )
    return name


@contextmanager
def faults(what: str) -> Iterator[None]:
    """Faults of the system as ``PoolError``, in a sentence."""
    try:
        yield
    except OSError as error:
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            raise PoolError(f"{what}: the pool is full; remove checkpoints or give it more room") from error
        where = f" ({error.filename})" if error.filename else ""
        raise PoolError(f"{what}: {error.strerror or error}{where}") from error


@dataclass(frozen=True)
class Layout:
    """``images``, ``live`` and ``snaps`` by name; ``mounts``: where live roots become visible; ``trash``:
    what is being made or being removed; ``notes``: one small file for each box that has something to
    remember."""

    folder: Path

    @property
    def images(self) -> Path:
        return self.folder / "images"

    @property
    def live(self) -> Path:
        return self.folder / "live"

    @property
    def snaps(self) -> Path:
        return self.folder / "snaps"

    @property
    def mounts(self) -> Path:
        return self.folder / "mounts"

    @property
    def trash(self) -> Path:
        return self.folder / "trash"

    @property
    def notes(self) -> Path:
        return self.folder / "notes"

    def make(self) -> None:
        for folder in (self.images, self.live, self.snaps, self.mounts, self.trash, self.notes):
            folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        self.folder.chmod(0o700)

    def found(self, folder: Path, name: str, what: str) -> Path:
        """The entry of that name, or PoolError."""
        path = folder / checked(name)
        if not path.is_dir():
            raise PoolError(f"there is no {what} {name!r} in the pool {self.folder}")
        return path

    def discarded(self, path: Path) -> Path | None:
        """Take ``path`` out of use in one step; None when it is not there."""
        there = self.trash / f"old-{path.name}-{os.getpid()}-{time.monotonic_ns()}"
        try:
            os.rename(path, there)
        except FileNotFoundError:
            return None
        return there


def names(folder: Path) -> list[str]:
    return sorted(entry.name for entry in os.scandir(folder))


@contextmanager
def draft(
    at: Layout, name: str, make: Callable[[Path], None], remove: Callable[[Path], None]
) -> Iterator[Path]:
    """A new entry of the trash, to be filled and renamed; whatever is still there afterwards is removed.

    It is locked while its maker lives, so that a collector can tell it from what a killed one left.
    """
    path = at.trash / f"new-{name}-{os.getpid()}-{time.monotonic_ns()}"
    with locked(at.trash):
        make(path)
        held = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        fcntl.flock(held, fcntl.LOCK_EX)
    try:
        yield path
    finally:
        os.close(held)
        if path.exists():
            remove(path)


def abandoned(at: Layout) -> list[Path]:
    """Entries of the trash at which nobody works any more."""
    found = []
    with locked(at.trash):
        for name in names(at.trash):
            path = at.trash / name
            try:
                with opened(path) as held:
                    fcntl.flock(held, fcntl.LOCK_EX | fcntl.LOCK_NB)
                    found.append(path)
            except BlockingIOError:
                continue
            except FileNotFoundError:
                continue
    return found
