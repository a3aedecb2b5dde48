"""What both kinds of pool do alike: folders, checked names, drafts, mount points, imports, and what nobody
refers to.

A draft is whole before it gets its name. Live roots become visible at mount points of their own.
"""

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

from windtunnel.agents.sandbox.errors import PoolError
from windtunnel.agents.sandbox.live.files.source import look_at
from windtunnel.linux import mounts
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


FLAGS = mounts.MS_NOATIME | mounts.MS_NODEV
"""No device files: an image may bring some, and they would reach this machine's devices. No access times:
reading must not count as a change."""


def visible(at: Layout, box: str, same: Callable[[Path], bool], attach: Callable[[Path], None]) -> Path:
    """The mount point of ``box``; ``attach`` mounts there unless ``same`` says that the right thing is."""
    point = at.mounts / box
    if _is_mounted(point) and same(point):
        return point
    with locked(at.mounts):
        if _is_mounted(point):
            if same(point):
                return point
            while mounts.unmount(point):
                pass
        if not mounts.at(at.mounts):
            # what is mounted below must not spread to other mount namespaces, and pivot_root(2) asks for it
            mounts.bind(at.mounts, at.mounts)
        point.mkdir(exist_ok=True)
        attach(point)
    return point


def hidden(at: Layout, box: str) -> None:
    point = at.mounts / box
    while mounts.unmount(point):
        pass
    try:
        point.rmdir()
    except FileNotFoundError:
        return


def _is_mounted(point: Path) -> bool:
    """Whether ``point`` is a mount of its own: cheaper than reading all mounts, and right for binds too."""
    try:
        return mounts.mount_id(point) != mounts.mount_id(point.parent)
    except FileNotFoundError:
        return False


def view(at: Layout, attach: Callable[[Path], None]) -> Path:
    """A mount point for a moment, named after this process; to be given to ``hidden`` by name."""
    name = f"view-{os.getpid()}-{time.monotonic_ns()}"
    return visible(at, name, lambda point: False, attach)


def stale(at: Layout, boxes: set[str]) -> list[Path]:
    """Mount points, mounted or not, of sandboxes that are not among ``boxes``, and of views of dead
    processes."""
    found = []
    for entry in sorted(os.scandir(at.mounts), key=lambda entry: entry.name):
        if entry.name.startswith("view-"):
            if not os.path.exists(f"/proc/{entry.name.split('-')[1]}"):
                found.append(Path(entry.path))
        elif entry.name not in boxes:
            found.append(Path(entry.path))
    return found


def hide_all(at: Layout) -> None:
    for name in os.listdir(at.mounts):
        hidden(at, name)
    while mounts.unmount(at.mounts):
        pass


def imported(
    at: Layout,
    source: str,
    progress: Callable[[str], None] | None,
    make: Callable[[Path], None],
    publish: Callable[[Path, Path], None],
    remove: Callable[[Path], None],
) -> str:
    """Import ``source`` under its own name, whole or not at all; ``make`` makes the draft."""
    if source in names(at.images):
        return source
    found = look_at(source)
    with locked(at.images):
        if found.name in names(at.images):
            return found.name
        with faults(f"image {source!r} cannot be imported"), draft(at, found.name, make, remove) as made:
            made.chmod(0o755)
            found.fill(made, progress or (lambda text: None))
            publish(made, at.images / found.name)
    return found.name


def usage(at: Layout) -> tuple[int, int]:
    """Bytes of the pool's file system that are used, and all of them."""
    about = os.statvfs(at.folder)
    return (about.f_blocks - about.f_bfree) * about.f_frsize, about.f_blocks * about.f_frsize


def leftovers(at: Layout, boxes: set[str], snapshots: set[str] | None) -> list[str]:
    """In words, what nobody refers to."""
    with faults("leftovers of the pool cannot be listed"):
        return [words for _, words, _ in unclaimed(at, boxes, snapshots)]


def unclaimed(at: Layout, boxes: set[str], snapshots: set[str] | None) -> list[tuple[str, str, Path]]:
    """What nobody refers to: (kind, words, path). Kinds: mount, live, snapshot, draft."""
    found = []
    for point in stale(at, boxes):
        found.append(("mount", f"mount {point}", point))
    for name in names(at.live):
        if name not in boxes:
            found.append(("live", f"root of sandbox {name}", at.live / name))
    for name in names(at.snaps):
        if snapshots is not None and name not in snapshots:
            found.append(("snapshot", f"snapshot {name}", at.snaps / name))
    for path in abandoned(at):
        found.append(("draft", f"half-made or discarded {path.name}", path))
    return found


def collect(
    at: Layout,
    boxes: set[str],
    snapshots: set[str] | None,
    drop_box: Callable[[str], None],
    drop_snapshot: Callable[[str], None],
    remove: Callable[[Path], None],
) -> list[str]:
    """Remove what ``unclaimed`` finds; returns it in words."""
    removed = []
    with faults("leftovers of the pool cannot be removed"):
        for kind, words, path in unclaimed(at, boxes, snapshots):
            if kind == "mount":
                hidden(at, path.name)
            elif kind == "live":
                drop_box(path.name)
            elif kind == "snapshot":
                drop_snapshot(path.name)
            else:
                remove(path)
            removed.append(words)
    return removed
