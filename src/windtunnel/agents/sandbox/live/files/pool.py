"""What a pool of roots offers, and how one is opened."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import IO, Literal, Protocol

from windtunnel.agents.sandbox.errors import PoolError
from windtunnel.agents.sandbox.live.files import btrfs, loop
from windtunnel.agents.sandbox.live.files.btrfs_pool import BtrfsPool
from windtunnel.agents.sandbox.live.files.copy_pool import CopyPool
from windtunnel.agents.sandbox.live.files.shared import faults
from windtunnel.agents.sandbox.model import FileChange


class Pool(Protocol):
    """Images, the live roots of sandboxes, and snapshots of these. Every method raises ``PoolError`` for a
    fault of the machine, ``import_image`` also ``UserError`` for a source that is no image."""

    kind: str
    """``btrfs`` or ``copy``."""

    def import_image(self, source: str, progress: Callable[[str], None] | None = None) -> str:
        """Bring an image in (``host``, a folder, a tarball, an OCI layout, an imported name); its name
        here."""

    def images(self) -> list[str]: ...

    def create(self, box: str, image: str) -> None:
        """A live root like the image; a root that the sandbox has already is replaced."""

    def clone(self, box: str, snapshot: str) -> None:
        """The live root becomes what the snapshot is. It has to be mounted (again) afterwards."""

    def mount(self, box: str) -> Path:
        """Where the live root is visible: a mount point of its own with private propagation. Idempotent."""

    def unmount(self, box: str) -> None:
        """Idempotent; what is busy goes away with its last user."""

    def snapshot(self, box: str, snapshot: str) -> int:
        """Keep the live root as it is now, all or nothing; the sandbox is frozen. Bytes copied for it."""

    def bytes_new(self, snapshot: str, older: str = "") -> int:
        """Bytes of file data that came with this snapshot, after snapshot ``older`` where one is named;
        not while a sandbox is frozen, it may take a while."""

    def drop_box(self, box: str) -> None: ...

    def drop_snapshot(self, snapshot: str) -> None: ...

    def snapshots(self) -> list[str]: ...

    def changed(self, older: str, newer: str | None, box: str | None = None) -> list[FileChange]:
        """What differs between two snapshots, or a snapshot and the live root of ``box``; the channel
        apart."""

    def generation(self, box: str) -> int:
        """A number that moves when anything in the live root was written; -1: cannot tell."""

    def find_new(self, box: str, generation: int) -> list[str] | None:
        """Paths written since (folders: an entry came or went); None: cannot tell."""

    def set_limit(self, box: str, bytes: int | None) -> str:
        """Bound the live root; empty when that is enforced, else why not."""

    def send(self, snapshot: str, out: IO[bytes], parent: str | None = None) -> None:
        """Write the snapshot as a tar stream, or what differs from ``parent``."""

    def receive(self, snapshot: str, source: IO[bytes], parent: str | None = None) -> None:
        """Make a snapshot from what ``send`` of any kind of pool wrote."""

    def usage(self) -> tuple[int, int]:
        """Bytes used, and bytes in all."""

    def sync(self, snapshot: str) -> None:
        """The snapshot is on the disk when this returns."""

    def leftovers(self, boxes: set[str], snapshots: set[str]) -> list[str]:
        """In words: what none of these sandboxes and snapshots, and no process that runs, refers to."""

    def collect(self, boxes: set[str], snapshots: set[str] | None) -> list[str]:
        """Remove the leftovers; what was removed, in words. Without ``snapshots`` all of them stay."""

    def close(self, *, unmount: bool = False) -> None:
        """With ``unmount`` nothing of the pool stays mounted; else sandboxes run on."""


def open_pool(
    folder: Path, *, kind: Literal["auto", "btrfs", "copy"] = "auto", size: int | None = None
) -> Pool:
    """The pool in ``folder``, made when it is absent; several processes may open one.

    ``auto``: btrfs where ``folder`` lies on one or a loop file beside it (``folder.img``) can be mounted,
    else copies. What a pool is at first it stays: its kind is not changed behind its snapshots. ``size``:
    bytes that a new loop file may grow to.
    """
    folder = Path(os.path.realpath(folder))
    with faults(f"the pool {folder} cannot be used"):
        folder.mkdir(parents=True, exist_ok=True)
        copies = (folder / "images").is_dir() and not btrfs.is_btrfs(folder)
        if kind == "copy" or (kind == "auto" and copies and not loop.image_of(folder).exists()):
            if loop.image_of(folder).exists():
                raise PoolError(f"the pool {folder} is a btrfs ({loop.image_of(folder)}), not of kind 'copy'")
            return CopyPool(folder)
        if btrfs.is_btrfs(folder) and os.geteuid() == 0:
            return BtrfsPool(folder, own=loop.image_of(folder).exists())
        missing = loop.usable(folder)
        if missing and kind == "btrfs":
            raise PoolError(f"the pool {folder} cannot be a btrfs: {missing}")
        if missing:
            return CopyPool(folder)
        loop.mount_pool(folder, size)
        return BtrfsPool(folder, own=True)
