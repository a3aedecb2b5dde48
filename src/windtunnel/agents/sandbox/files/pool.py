"""A pool: images, the live roots of sandboxes, and snapshots of these, as whole trees that are copied.

Blocks are shared where the file system can. What differs is found by comparing two trees, bytes included,
since no time of a file says that it was not changed. A draft is whole before it gets its name. Live roots
become visible at mount points of their own; without root nothing is mounted: ``mount`` gives the folder
itself, owners are the user's, and devices are absent.

`BtrfsPool` does the same by snapshots.
"""

from __future__ import annotations

import os
import re
import stat
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path
from typing import IO

from windtunnel.agents.sandbox.errors import PoolError, disk_full
from windtunnel.agents.sandbox.files import archive
from windtunnel.agents.sandbox.files.source import look_at
from windtunnel.agents.sandbox.files.tree import Comparison, Copier, remove
from windtunnel.agents.sandbox.model import FileChange
from windtunnel.agents.sandbox.place import Unclaimed
from windtunnel.base.errors import UserError
from windtunnel.linux import mounts
from windtunnel.linux.system import sync_file_system

_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9._+@:-]{0,199}")
FLAGS = mounts.MS_NOATIME | mounts.MS_NODEV
"""No device files: an image may bring some, and they would reach this machine's devices. No access times:
reading must not count as a change."""


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
        if disk_full(error):
            raise PoolError(f"{what}: the pool is full; remove checkpoints or give it more room") from error
        where = f" ({error.filename})" if error.filename else ""
        raise PoolError(f"{what}: {error.strerror or error}{where}") from error


class Pool:
    """One process at a time uses a pool; any of its threads may.

    Every method raises ``PoolError`` for a fault of the machine, ``import_image`` also ``UserError`` for a
    source that is no image.

    Folders: ``images``, ``live`` and ``snaps`` by name; ``channels``: what each sandbox has beside its root,
    empty whenever that is new; ``mounts``: where live roots become visible;
    ``layers``: what images begin with; ``trash``: what is being made or being removed.
    """

    kind = "copy"

    def __init__(self, folder: Path) -> None:
        self._folder, self._may_mount = folder, os.geteuid() == 0
        names = ("images", "live", "channels", "snaps", "mounts", "trash", "layers")
        folders = [folder / name for name in names]
        self._images, self._lives, self._channels, self._snaps = folders[:4]
        self._points, self._trash, self._layers = folders[4:]
        self._importing, self._mounting = threading.Lock(), threading.Lock()
        self._drafts: set[Path] = set()
        with faults(f"the pool {folder} cannot be used"):
            for each in folders:
                each.mkdir(mode=0o700, parents=True, exist_ok=True)
            folder.chmod(0o700)

    def import_image(self, source: str, left_out: list[str] | None = None) -> str:
        """Bring an image in (``host``, a folder, a tarball, an OCI layout, an imported name), whole or not at
        all; its name here. ``left_out``: gets, in words, what is not in it: this user may not read it."""
        if source in self.images():
            return source
        image = look_at(source)
        with self._importing:
            if image.name in self.images():
                return image.name
            chain = image.chain()
            there = max(
                (count for count, name in enumerate(chain, 1) if (self._layers / name).is_dir()), default=0
            )
            origin = self._layers / chain[there - 1] if there else None
            with (
                faults(f"image {source!r} cannot be imported"),
                self._draft(image.name, partial(self._go_on, origin) if origin else None) as path,
            ):
                if origin is None:
                    path.chmod(0o755)
                keep = lambda count: self._share(path, self._layers / chain[count - 1])  # noqa: E731
                lacking = image.fill(path, there, keep)
                if look_at(source).name != image.name:
                    raise UserError(f"image {source!r}: it was changed while it was read; import it again")
                self._publish(path, self._images / image.name)
        if left_out is not None:
            left_out += lacking
        return image.name

    def images(self) -> list[str]:
        return sorted(os.listdir(self._images))

    def create(self, box: str, image: str, limit: int | None = None) -> None:
        """A live root like the image; a root that the sandbox has already is replaced. ``limit``: bytes that
        it may write, where `unbounded` has no objection."""
        self._begin(box, self._image(image), limit)

    def clone(self, box: str, snapshot: str, limit: int | None = None) -> None:
        """The live root becomes what the snapshot is. It has to be mounted (again) afterwards. What the
        snapshot has beyond its image counts against the ``limit``."""
        self._begin(box, self._tree(self._snap(snapshot)), limit)

    def _begin(self, box: str, origin: Path, limit: int | None) -> None:
        """The live root of ``box`` is a copy of ``origin``, in place of what it was, with a new channel."""
        live, channel = self._lives / checked(box), self._channels / box
        with (
            faults(f"sandbox {box!r} cannot get a root"),
            self._draft(box, partial(self._copy, origin, limit)) as draft,
        ):
            self.unmount(box)
            self._discard(live)
            os.rename(draft, live)
            self._discard(channel)
            self._make_channel(channel)

    def mount(self, box: str) -> Path:
        """Where the live root is visible: a mount point of its own with private propagation. Idempotent."""
        tree, point = self._tree(self._live(box)), self._points / box
        if not self._may_mount:
            return tree
        with faults(f"the root of sandbox {box!r} cannot be mounted"), self._mounting:
            if mounts.is_point(point):
                if os.path.samefile(point, tree):
                    return point
                while mounts.unmount(point):
                    pass
            if not mounts.at(self._points):
                # what is mounted below must not spread to other mount namespaces: pivot_root(2) asks for it
                mounts.bind(self._points, self._points)
            point.mkdir(exist_ok=True)
            mounts.bind(tree, point, FLAGS)
        return point

    def unmount(self, box: str) -> None:
        """Idempotent; what is busy goes away with its last user."""
        checked(box)
        if self._may_mount:
            with faults(f"the root of sandbox {box!r} cannot be unmounted"):
                self._hide(box)

    def snapshot(self, box: str, snapshot: str) -> None:
        """Keep the live root as it is now, all or nothing; the sandbox is frozen."""
        live, there = self._tree(self._live(box)), self._unused(snapshot)
        with (
            faults(f"no snapshot of sandbox {box!r}"),
            self._draft(snapshot, partial(self._copy, live, None)) as draft,
        ):
            os.rename(draft, there)

    def bytes_new(self, snapshot: str, older: str = "") -> int:
        """Bytes of file data that came with this snapshot, after snapshot ``older`` where one is named; of
        copies, all. Not while a sandbox is frozen, it may take a while."""
        with faults(f"the size of snapshot {snapshot!r} cannot be read"):
            walked = os.walk(self._tree(self._snap(snapshot)))
            files = (os.lstat(os.path.join(folder, name)) for folder, _, names in walked for name in names)
            return sum(about.st_blocks * 512 for about in files if stat.S_ISREG(about.st_mode))

    def drop_box(self, box: str) -> None:
        self.unmount(box)
        with faults(f"the root of sandbox {box!r} cannot be removed"):
            self._discard(self._lives / box)
            self._discard(self._channels / box)

    def drop_snapshot(self, snapshot: str) -> None:
        with faults(f"snapshot {snapshot!r} cannot be removed"):
            self._discard(self._snaps / checked(snapshot))

    def snapshots(self) -> list[str]:
        return sorted(os.listdir(self._snaps))

    def changed(self, older: str, newer: str | None, box: str = "") -> list[FileChange]:
        """What differs between two snapshots, or a snapshot and the live root of ``box``."""
        first, second = self._snap(older), self._live(box) if newer is None else self._snap(newer)
        with faults(f"what changed since {older!r} cannot be read"):
            return self._compared(first, second)

    def flush(self, box: str) -> None:
        """Write to the disk what of the live root lies in memory only, where a snapshot needs that."""
        self._live(box)

    def unbounded(self, *, limited: bool) -> str:
        """Why the live roots of this pool cannot be bounded; empty when they can. ``limited``: somebody wants
        it by name."""
        return "that needs a btrfs pool"

    def send(self, snapshot: str, out: IO[bytes]) -> None:
        """Write the snapshot as a tar stream."""
        with faults(f"snapshot {snapshot!r} cannot be sent"):
            archive.send(self._tree(self._snap(snapshot)), out)

    def receive(self, snapshot: str, source: IO[bytes]) -> None:
        """Make a snapshot from what ``send`` of any kind of pool wrote."""
        there = self._unused(snapshot)
        with faults(f"snapshot {snapshot!r} cannot be received"), self._draft(snapshot) as draft:
            self._tree(draft).mkdir(mode=0o755, exist_ok=True)
            archive.receive(self._tree(draft), source)
            self._publish(draft, there)

    def usage(self) -> tuple[int, int]:
        """Bytes of the pool's file system that are used, and all of them."""
        about = os.statvfs(self._folder)
        return (about.f_blocks - about.f_bfree) * about.f_frsize, about.f_blocks * about.f_frsize

    def sync(self, snapshot: str) -> None:
        """The snapshot is on the disk when this returns."""
        with faults(f"snapshot {snapshot!r} cannot be brought to the disk"):
            sync_file_system(self._snap(snapshot))

    def unclaimed(self, boxes: set[str], snapshots: set[str] | None) -> Unclaimed:
        """What none of these sandboxes and snapshots, and no process that runs, refers to. Without
        ``snapshots`` all of them stay."""
        with faults("leftovers of the pool cannot be listed"):
            points = [path for path in sorted(self._points.iterdir()) if path.name not in boxes]
            roots = {*os.listdir(self._lives), *os.listdir(self._channels)} - boxes
            stray = set() if snapshots is None else set(os.listdir(self._snaps)) - snapshots
            drafts = set(self._trash.iterdir()) - self._drafts
        return [
            *((f"mount {point}", partial(self._hide, point.name)) for point in points),
            *((f"root of sandbox {name}", partial(self.drop_box, name)) for name in sorted(roots)),
            *((f"snapshot {name}", partial(self.drop_snapshot, name)) for name in sorted(stray)),
            *(
                (f"half-made or discarded {path.name}", partial(self._remove, path))
                for path in sorted(drafts)
            ),
        ]

    def close(self, *, unmount: bool = False) -> None:
        """With ``unmount`` nothing of the pool stays mounted; else sandboxes run on."""
        if unmount and self._may_mount:
            with faults(f"the pool {self._folder} cannot be unmounted"):
                for name in os.listdir(self._points):
                    self._hide(name)
                while mounts.unmount(self._points):
                    pass

    def _make(self, path: Path) -> None:
        """A new, empty draft."""
        path.mkdir(mode=0o700)

    def _copy(self, origin: Path, limit: int | None, path: Path) -> None:
        """A draft of a live root or a snapshot, with all that is in ``origin``."""
        path.mkdir(mode=0o700)
        self._tree(path).mkdir()
        Copier().tree(str(origin), str(self._tree(path)))

    def _make_channel(self, path: Path) -> None:
        path.mkdir(mode=0o700)

    def _go_on(self, layer: Path, path: Path) -> None:
        """A new tree that begins as a layer that `_share` keeps."""
        raise NotImplementedError

    def _share(self, path: Path, layer: Path) -> None:
        """Keep the layers in ``path`` for images that begin with the same ones, where that costs nothing."""
        return

    def _publish(self, path: Path, name: Path) -> None:
        """A draft that is whole gets its name, in one step."""
        os.rename(path, name)

    def _remove(self, path: Path) -> None:
        """A tree that nothing refers to goes."""
        remove(path)

    def _compared(self, first: Path, second: Path) -> list[FileChange]:
        """What differs between a snapshot, and another one or a live root."""
        compared = Comparison(self._tree(first), self._tree(second), lambda path, old, new: False)
        compared.trees()
        return compared.result()

    def _tree(self, path: Path) -> Path:
        """The files of a live root or a snapshot, whose own mode may be any."""
        return path / "tree"

    def _image(self, image: str) -> Path:
        return self._entry(self._images, image, "image")

    def _live(self, box: str) -> Path:
        return self._entry(self._lives, box, "root of sandbox")

    def _snap(self, snapshot: str) -> Path:
        return self._entry(self._snaps, snapshot, "snapshot")

    def _entry(self, folder: Path, name: str, what: str) -> Path:
        path = folder / checked(name)
        if not path.is_dir():
            raise PoolError(f"there is no {what} {name!r} in the pool {self._folder}")
        return path

    def _unused(self, snapshot: str) -> Path:
        """Where a new snapshot will be."""
        there = self._snaps / checked(snapshot)
        if there.exists():
            raise PoolError(f"there is a snapshot {snapshot!r} in the pool already")
        return there

    def _discard(self, path: Path) -> None:
        """Take ``path`` out of use in one step, and remove it; absent is fine."""
        there = self._trash / f"old-{path.name}-{time.monotonic_ns()}"
        with suppress(FileNotFoundError):
            os.rename(path, there)
            self._remove(there)

    @contextmanager
    def _draft(self, name: str, make: Callable[[Path], None] | None = None) -> Iterator[Path]:
        """A new entry of the trash, to be filled and renamed; what is still there afterwards is removed."""
        path = self._trash / f"new-{name}-{time.monotonic_ns()}"
        self._drafts.add(path)
        try:
            (make or self._make)(path)
            yield path
        finally:
            if path.exists():
                self._remove(path)
            self._drafts.discard(path)

    def _hide(self, box: str) -> None:
        point = self._points / box
        while mounts.unmount(point):
            pass
        with suppress(FileNotFoundError):
            point.rmdir()
