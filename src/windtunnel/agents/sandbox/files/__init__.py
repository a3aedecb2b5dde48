"""The roots of sandboxes: images, live trees and snapshots."""

from __future__ import annotations

import os
from pathlib import Path

from windtunnel.agents.sandbox.files import btrfs
from windtunnel.agents.sandbox.files.btrfs_pool import BtrfsPool
from windtunnel.agents.sandbox.files.pool import Pool, faults

__all__ = ["Pool", "open_pool"]


def open_pool(folder: Path, *, size: int | None = None) -> Pool:
    """The pool in ``folder``, made when it is absent.

    It is a btrfs where ``folder`` lies on one or a loop file beside it (``folder.img``) can be mounted, else
    copies. What a pool is at first it stays: its kind is not changed behind its snapshots. ``size``: bytes of
    a new loop file, which are taken from the disk at once; None: `btrfs.DEFAULT_SIZE`, or a quarter of what
    the disk has free.
    """
    folder = Path(os.path.realpath(folder))
    with faults(f"the pool {folder} cannot be used"):
        folder.mkdir(parents=True, exist_ok=True)
        own = btrfs.image_of(folder).exists()
        if btrfs.is_btrfs(folder) and os.geteuid() == 0:
            return BtrfsPool(folder, own=own)
        copies = (folder / "images").is_dir() and not own
        if copies or btrfs.usable(folder):
            return Pool(folder)
        btrfs.mount_pool(folder, size)
        return BtrfsPool(folder, own=True)
