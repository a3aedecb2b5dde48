"""The roots of sandboxes: images, live trees and snapshots."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Literal

from windtunnel.agents.sandbox.errors import PoolError
from windtunnel.agents.sandbox.files import btrfs
from windtunnel.agents.sandbox.files.btrfs_pool import BtrfsPool
from windtunnel.agents.sandbox.files.pool import Pool, faults
from windtunnel.agents.sandbox.files.tree import LeftOut

__all__ = ["LeftOut", "Pool", "open_pool"]


def open_pool(
    folder: Path, *, kind: Literal["auto", "btrfs", "copy"] = "auto", size: int | None = None
) -> Pool:
    """The pool in ``folder``, made when it is absent.

    ``auto``: btrfs where ``folder`` lies on one or a loop file beside it (``folder.img``) can be mounted,
    else copies. What a pool is at first it stays: its kind is not changed behind its snapshots. ``size``:
    bytes of a new loop file, which are taken from the disk at once; None: `btrfs.DEFAULT_SIZE`, or a quarter
    of what the disk has free.
    """
    folder = Path(os.path.realpath(folder))
    with faults(f"the pool {folder} cannot be used"):
        folder.mkdir(parents=True, exist_ok=True)
        image = btrfs.image_of(folder)
        copies = (folder / "images").is_dir() and not btrfs.is_btrfs(folder)
        if kind == "copy" or (kind == "auto" and copies and not image.exists()):
            if image.exists():
                raise PoolError(f"the pool {folder} is a btrfs ({image}), not of kind 'copy'")
            return Pool(folder)
        if btrfs.is_btrfs(folder) and os.geteuid() == 0:
            return BtrfsPool(folder, own=image.exists())
        missing = btrfs.usable(folder)
        if missing and kind == "btrfs":
            raise PoolError(f"the pool {folder} cannot be a btrfs: {missing}")
        if missing:
            return Pool(folder)
        btrfs.mount_pool(folder, size)
        return BtrfsPool(folder, own=True)
