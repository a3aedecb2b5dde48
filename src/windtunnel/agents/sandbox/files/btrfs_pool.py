"""Roots of sandboxes on btrfs: every image, live root and snapshot is a subvolume.

A snapshot shares every block with its origin, so that it costs a transaction whatever the tree's size; a
rollback renames one subvolume away and makes a writable snapshot in its place.

Two subvolumes are compared by what each wrote since they parted. btrfs itself knows only the direct parent,
and forgets it when the parent is removed. So each live root has an attribute, which its snapshots take over,
with the chain of its origins: (identity, generation up to which both are the same). Nobody inside may set it.

With simple quotas the kernel counts for each subvolume what that wrote, for as long as anything refers to it,
and holds a limit. A root that begins as a snapshot has nothing counted, so its limit is less by what the
snapshot has that its image had not.

Source: Documentation of btrfs, "Quota groups", simple quotas; fs/btrfs/qgroup.c.
"""

from __future__ import annotations

import errno
import json
import os
from contextlib import suppress
from pathlib import Path

from windtunnel.agents.sandbox.errors import PoolError, disk_full
from windtunnel.agents.sandbox.files import btrfs
from windtunnel.agents.sandbox.files.pool import Pool, faults
from windtunnel.agents.sandbox.files.tree import ORIGINS, Comparison
from windtunnel.agents.sandbox.model import FileChange
from windtunnel.linux import mounts
from windtunnel.linux.system import opened

LONGEST = 64
CHANNEL_MOST = 1 << 30
"""Bytes of a channel: the outputs that the host has not read yet."""
FORGOTTEN = 64
"""Roots that are dropped from one time to the next that their quota groups are."""
FOREIGN = "the quotas of a btrfs of the host's own are left as they are"
FRESHENED = 512 << 10
"""Bytes that a root may write in any case: a fork gets a host name and an identity of its own."""

Chain = list[tuple[str, int]]
"""A subvolume's own identity, then its origins, nearest first."""


class BtrfsPool(Pool):
    """``own``: the file system is a loop file of the pool, unmounted by ``close(unmount=True)``."""

    kind = "btrfs"

    def __init__(self, folder: Path, *, own: bool) -> None:
        super().__init__(folder)
        self._own = own
        self._unbounded = self._quotas() if own else FOREIGN
        self._dropped = 0
        if own and not self._unbounded:
            with faults(f"the pool {folder} cannot be used"):
                btrfs.forget_groups(folder)

    def _tree(self, path: Path) -> Path:
        return path

    def _make(self, path: Path) -> None:
        btrfs.create(path)

    def _publish(self, path: Path, name: Path) -> None:
        # as a read-only snapshot, in one step: a read-only subvolume could not be renamed
        btrfs.snapshot(path, name, read_only=True)

    def _go_on(self, layer: Path, path: Path) -> None:
        btrfs.snapshot(layer, path, read_only=False)

    def _share(self, path: Path, layer: Path) -> None:
        if not layer.exists():
            btrfs.snapshot(path, layer, read_only=True)

    def _remove(self, path: Path) -> None:
        btrfs.destroy(path)

    def clone(self, box: str, snapshot: str, limit: int | None = None) -> None:
        origin = self._snap(snapshot)
        if limit is not None:
            limit = max(limit - self._used(origin), FRESHENED)
        try:
            self._begin(box, origin, limit)
        except PoolError as error:
            if not disk_full(error) or not (self._lives / box).exists():
                raise
            # the root that is given up anyway may hold the room that is missing
            super().drop_box(box)
            btrfs.waited_for_room(self._folder)
            self._begin(box, origin, limit)

    def _used(self, snapshot: Path) -> int:
        """Bytes that a snapshot has and its image had not."""
        with faults(f"what snapshot {snapshot.name!r} uses cannot be read"), opened(snapshot) as descriptor:
            return btrfs.newer(descriptor, self._chain(snapshot)[-1][1] + 1)

    def _copy(self, origin: Path, limit: int | None, path: Path) -> None:
        btrfs.snapshot(origin, path, read_only=False)
        born = btrfs.subvolume(path).born
        chain = [(identity, min(generation, born)) for identity, generation in self._chain(origin)]
        # the last one is the image: what came after it counts against a limit
        del chain[LONGEST - 1 : -1]
        os.setxattr(path, ORIGINS, json.dumps(chain).encode())
        if limit is not None:
            btrfs.limit(path, limit)

    def _make_channel(self, path: Path) -> None:
        btrfs.create(path)
        if not self._unbounded:
            btrfs.limit(path, CHANNEL_MOST)

    def _discard(self, path: Path) -> None:
        # in one step; and the kernel keeps room for what frees room, where nothing else could be done
        with suppress(FileNotFoundError):
            btrfs.destroy(path)

    def snapshot(self, box: str, snapshot: str) -> None:
        live, path = self._live(box), self._unused(snapshot)
        with faults(f"no snapshot of sandbox {box!r}"):
            btrfs.snapshot(live, path, read_only=True)

    def bytes_new(self, snapshot: str, older: str = "") -> int:
        """Bytes of file data in ``snapshot`` that ``older``, or else its nearest origin but the live root,
        did not have."""
        path = self._snap(snapshot)
        with faults(f"the size of snapshot {snapshot!r} cannot be read"):
            chain = self._chain(path)
            since = _parted(self._chain(self._snap(older)), chain) if older else None
            if since is None:
                # the first origin of a snapshot is the live root, which has all that the snapshot has
                since = chain[2][1] if len(chain) > 2 else 0
            with opened(path) as descriptor:
                return btrfs.newer(descriptor, since + 1)

    def drop_box(self, box: str) -> None:
        super().drop_box(box)
        with faults(f"the root of sandbox {box!r} cannot be removed"):
            self._dropped += 1
            if self._own and not self._unbounded and self._dropped % FORGOTTEN == 0:
                btrfs.forget_groups(self._folder)

    def _compared(self, first: Path, second: Path) -> list[FileChange]:
        if second.parent == self._lives:
            btrfs.sync(second)
        parted = _parted(self._chain(first), self._chain(second))
        if parted is not None:
            return _changed_since(first, second, parted + 1)
        return super()._compared(first, second)

    def flush(self, box: str) -> None:
        with faults(f"what sandbox {box!r} wrote cannot be flushed"):
            btrfs.sync(self._live(box))

    def unbounded(self, *, limited: bool) -> str:
        if limited and self._unbounded == FOREIGN:
            self._unbounded = self._quotas()
        return self._unbounded

    def _quotas(self) -> str:
        """Turn simple quotas on; why that cannot be, or nothing."""
        try:
            btrfs.enable_simple_quotas(self._folder)
        except OSError as error:
            return "this kernel has no simple quotas" if error.errno == errno.EINVAL else str(error.strerror)
        return ""

    def sync(self, snapshot: str) -> None:
        with faults(f"snapshot {snapshot!r} cannot be brought to the disk"):
            btrfs.sync(self._snap(snapshot))

    def close(self, *, unmount: bool = False) -> None:
        super().close(unmount=unmount)
        if unmount and self._own:
            with faults(f"the pool {self._folder} cannot be unmounted"):
                # the loop device clears itself with its last user
                mounts.unmount(self._folder)

    def _chain(self, path: Path) -> Chain:
        own = btrfs.subvolume(path)
        origins: Chain = []
        with suppress(OSError):  # an image, or what came from elsewhere, has none
            origins = [(str(name), int(at)) for name, at in json.loads(os.getxattr(path, ORIGINS))]
        if any(own.parent) and own.parent.hex() not in dict(origins):
            origins.insert(0, (own.parent.hex(), own.born))
        return [(own.uuid.hex(), 2**63), *origins]


def _parted(first: Chain, second: Chain) -> int | None:
    """The generation up to which both subvolumes are the same; None where they share no origin."""
    others = dict(reversed(second))
    for identity, generation in first:
        if identity in others:
            return min(generation, others[identity])
    return None


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
    with opened(subvolume) as descriptor:
        return {path for inode in inodes for path in btrfs.paths(descriptor, inode)}
