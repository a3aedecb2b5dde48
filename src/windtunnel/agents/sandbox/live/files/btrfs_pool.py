"""Roots of sandboxes on btrfs: every image, live root and snapshot is a subvolume.

A snapshot shares every block with its origin, so that it costs a transaction whatever the tree's size; a
rollback renames one subvolume away and makes a writable snapshot in its place.
"""

from __future__ import annotations

import errno
import os
from collections.abc import Callable
from pathlib import Path
from typing import IO

from windtunnel.agents.sandbox.errors import PoolError
from windtunnel.agents.sandbox.live.files import btrfs, lineage, shared, stream
from windtunnel.agents.sandbox.live.files.compare import Comparison
from windtunnel.agents.sandbox.live.files.shared import Layout, checked, draft, faults, names
from windtunnel.agents.sandbox.live.place import CHANNEL
from windtunnel.agents.sandbox.model import FileChange
from windtunnel.linux import mounts
from windtunnel.linux.system import opened


class BtrfsPool:
    """See ``Pool``. ``own``: the file system is a loop file of the pool, unmounted by
    ``close(unmount=True)``."""

    kind = "btrfs"

    def __init__(self, folder: Path, *, own: bool) -> None:
        self._at = Layout(folder)
        self._own = own
        with faults(f"the pool {folder} cannot be used"):
            self._at.make()

    def import_image(self, source: str, progress: Callable[[str], None] | None = None) -> str:
        # published as a read-only snapshot, in one step: a read-only subvolume could not be renamed
        return shared.imported(
            self._at,
            source,
            progress,
            btrfs.create,
            lambda made, name: btrfs.snapshot(made, name, read_only=True),
            btrfs.destroy,
        )

    def images(self) -> list[str]:
        return names(self._at.images)

    def create(self, box: str, image: str) -> None:
        self._begin(box, "images", self._at.found(self._at.images, image, "image"))

    def clone(self, box: str, snapshot: str) -> None:
        origin = self._at.found(self._at.snaps, snapshot, "snapshot")
        try:
            self._begin(box, "snaps", origin)
        except PoolError as error:
            cause = error.__cause__
            full = isinstance(cause, OSError) and cause.errno == errno.ENOSPC
            if not full or not (self._at.live / box).exists():
                raise
            # the root that is given up anyway may hold the room that is missing
            self._drop_root(box)
            btrfs.waited_for_room(self._at.folder)
            self._begin(box, "snaps", origin)

    def _drop_root(self, box: str) -> None:
        """Give the live root up, but remember the sandbox's limit."""
        self.unmount(box)
        with faults(f"the root of sandbox {box!r} cannot be removed"):
            self._discard_live(box)

    def _begin(self, box: str, kind: str, origin: Path) -> None:
        """The live root of ``box`` is a writable snapshot of ``origin``, in place of what it was."""
        live = self._at.live / checked(box)
        with (
            faults(f"sandbox {box!r} cannot get a root"),
            draft(
                self._at, box, lambda path: btrfs.snapshot(origin, path, read_only=False), btrfs.destroy
            ) as made,
        ):
            lineage.note_if_room(
                self._at.notes, made, "live", box, lineage.chain(self._at.notes, origin, kind, origin.name)
            )
            limit = self._at.notes / f"limit-{box}"
            if limit.exists():
                btrfs.limit(made, int(limit.read_text(encoding="ascii")))
            self.unmount(box)
            self._discard_live(box)
            os.rename(made, live)

    def _discard_live(self, box: str) -> None:
        live = self._at.live / box
        try:
            old = self._at.discarded(live)
        except OSError as error:
            # on a full disk nothing can be renamed, but the kernel keeps room for what frees room
            if error.errno != errno.ENOSPC:
                raise
            old = live
        if old is not None:
            btrfs.destroy(old)

    def _live(self, box: str) -> Path:
        return self._at.found(self._at.live, box, "root of sandbox")

    def _snap(self, snapshot: str) -> Path:
        return self._at.found(self._at.snaps, snapshot, "snapshot")

    def mount(self, box: str) -> Path:
        live = self._live(box)
        with faults(f"the root of sandbox {box!r} cannot be mounted"):
            return shared.visible(
                self._at,
                box,
                lambda point: os.path.samefile(point, live),
                lambda point: mounts.bind(live, point, shared.FLAGS),
            )

    def unmount(self, box: str) -> None:
        with faults(f"the root of sandbox {box!r} cannot be unmounted"):
            shared.hidden(self._at, checked(box))

    def snapshot(self, box: str, snapshot: str) -> int:
        live, made = self._live(box), self._at.snaps / checked(snapshot)
        if made.exists():
            raise PoolError(f"there is a snapshot {snapshot!r} in the pool already")
        with faults(f"no snapshot of sandbox {box!r}"):
            if btrfs.has_nested(live):
                raise PoolError(
                    f"no snapshot of sandbox {box!r}: it holds a btrfs subvolume of its own, which a "
                    "snapshot would leave out; delete that folder inside the sandbox"
                )
            chain = lineage.chain(self._at.notes, live, "live", box)
            btrfs.snapshot(live, made, read_only=True)
            lineage.note_if_room(self._at.notes, made, "snaps", snapshot, chain)
        return 0

    def bytes_new(self, snapshot: str, older: str = "") -> int:
        """Bytes of file data in ``snapshot`` that ``older``, or else its nearest origin but the live root,
        did not have."""
        path = self._snap(snapshot)
        with faults(f"the size of snapshot {snapshot!r} cannot be read"):
            since = None
            if older:
                since = lineage.parted(
                    lineage.chain(self._at.notes, self._snap(older), "snaps", older),
                    lineage.chain(self._at.notes, path, "snaps", snapshot),
                )
            if since is None:
                since = lineage.previous(self._at.notes, path, snapshot)
            with opened(path) as given:
                return btrfs.bytes_written(given, since + 1)

    def drop_box(self, box: str) -> None:
        self._drop_root(box)
        with faults(f"the root of sandbox {box!r} cannot be removed"):
            lineage.forget(self._at.notes, "live", box)
            (self._at.notes / f"limit-{box}").unlink(missing_ok=True)

    def drop_snapshot(self, snapshot: str) -> None:
        path = self._at.snaps / checked(snapshot)
        with faults(f"snapshot {snapshot!r} cannot be removed"):
            if path.exists():
                btrfs.destroy(path)
            lineage.forget(self._at.notes, "snaps", snapshot)

    def snapshots(self) -> list[str]:
        return names(self._at.snaps)

    def changed(self, older: str, newer: str | None, box: str | None = None) -> list[FileChange]:
        first = self._snap(older)
        if newer is not None:
            second, kind, name = self._snap(newer), "snaps", newer
        elif box is not None:
            second, kind, name = self._live(box), "live", box
        else:
            raise PoolError("to say what changed, name a newer snapshot or the sandbox")
        with faults(f"what changed since {older!r} cannot be read"):
            if kind == "live":
                btrfs.sync(second)
            parted = lineage.parted(
                lineage.chain(self._at.notes, first, "snaps", older),
                lineage.chain(self._at.notes, second, kind, name),
            )
            if parted is None:
                compared = Comparison(first, second, lambda path, old, new: False)
                compared.trees()
                return compared.result()
            return _changed_since(first, second, parted + 1)

    def generation(self, box: str) -> int:
        live = self._live(box)
        with faults(f"the generation of sandbox {box!r} cannot be read"):
            # what lies in memory only has no generation yet
            btrfs.sync(live)
            return btrfs.subvolume(live).generation

    def find_new(self, box: str, generation: int) -> list[str] | None:
        live = self._live(box)
        with faults(f"what sandbox {box!r} wrote cannot be read"):
            btrfs.sync(live)
            found = {f"/{path}" for path in _paths(live, btrfs.written_in(live, generation + 1))}
        return sorted(path for path in found if path != f"/{CHANNEL}" and not path.startswith(f"/{CHANNEL}/"))

    def set_limit(self, box: str, bytes: int | None) -> str:
        live, file = self._live(box), self._at.notes / f"limit-{checked(box)}"
        if bytes is None and not file.exists():
            return ""
        try:
            btrfs.enable_simple_quotas(live)
            btrfs.limit(live, bytes)
        except OSError as error:
            reason = "this kernel has no simple quotas" if error.errno == errno.EINVAL else error.strerror
            return f"the size of the root is not bounded: {reason}"
        if bytes is None:
            file.unlink()
        else:
            file.write_text(str(bytes), encoding="ascii")
        return ""

    def send(self, snapshot: str, out: IO[bytes], parent: str | None = None) -> None:
        tree = self._snap(snapshot)
        with faults(f"snapshot {snapshot!r} cannot be sent"):
            changes = self.changed(parent, snapshot) if parent is not None else None
            stream.send(tree, out, parent or "", changes)

    def receive(self, snapshot: str, source: IO[bytes], parent: str | None = None) -> None:
        made = self._at.snaps / checked(snapshot)
        if made.exists():
            raise PoolError(f"there is a snapshot {snapshot!r} in the pool already")
        origin = self._snap(parent) if parent is not None else None

        def make(path: Path) -> None:
            if origin is None:
                btrfs.create(path)
            else:
                btrfs.snapshot(origin, path, read_only=False)

        with (
            faults(f"snapshot {snapshot!r} cannot be received"),
            draft(self._at, snapshot, make, btrfs.destroy) as path,
        ):
            stream.receive(path, source, parent or "")
            btrfs.snapshot(path, made, read_only=True)

    def usage(self) -> tuple[int, int]:
        return shared.usage(self._at)

    def sync(self, snapshot: str) -> None:
        with faults(f"snapshot {snapshot!r} cannot be brought to the disk"):
            btrfs.sync(self._snap(snapshot))

    def leftovers(self, boxes: set[str], snapshots: set[str]) -> list[str]:
        return shared.leftovers(self._at, boxes, snapshots)

    def collect(self, boxes: set[str], snapshots: set[str] | None) -> list[str]:
        return shared.collect(self._at, boxes, snapshots, self.drop_box, self.drop_snapshot, btrfs.destroy)

    def close(self, *, unmount: bool = False) -> None:
        if unmount:
            with faults(f"the pool {self._at.folder} cannot be unmounted"):
                shared.hide_all(self._at)
                if self._own:
                    # the loop device clears itself with its last user
                    mounts.unmount(self._at.folder)


def _changed_since(first: Path, second: Path, newer: int) -> list[FileChange]:
    """What differs between two subvolumes that were the same before generation ``newer``."""
    before, after = btrfs.written_in(first, newer), btrfs.written_in(second, newer)
    touched = before | after
    compared = Comparison(
        first, second, lambda path, old, new: old.st_ino == new.st_ino and old.st_ino not in touched
    )
    for path in sorted({*_paths(first, touched), *_paths(second, touched)}):
        inside = f"/{path}" if path else ""
        compared.folder(inside)
        if inside:
            compared.entry(inside, deep=False)
    return compared.result()


def _paths(subvolume: Path, inodes: set[int]) -> set[str]:
    """All paths of ``inodes`` in ``subvolume``; an inode that is not in it has none."""
    with opened(subvolume) as given:
        return {path for inode in inodes for path in btrfs.paths(given, inode)}
