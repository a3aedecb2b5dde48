"""What the tests of pools share: kinds, what they need, and what a tree holds as plain data."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from windtunnel.agents.sandbox.files import Pool, btrfs

KINDS = ("btrfs", "copy")
Opener = Callable[..., Pool]


def need_root() -> None:
    if os.geteuid() != 0:
        pytest.skip("needs root")


def need_btrfs(folder: Path) -> None:
    need_root()
    missing = btrfs.usable(folder)
    if missing:
        pytest.skip(f"needs btrfs: {missing}")


def state(root: Path) -> dict[str, tuple[object, ...]]:
    """All that a copy of a tree must keep. Names of one file share a mark; times are those of files."""
    found: dict[str, tuple[object, ...]] = {}
    first: dict[int, str] = {}
    for folder, names, files in os.walk(root):
        for name in sorted([*names, *files]):
            path = os.path.join(folder, name)
            inside = path[len(str(root)) :]
            about = os.lstat(path)
            body: object = None
            if os.path.islink(path):
                body = os.readlink(path)
            elif os.path.isfile(path):
                body = (Path(path).read_bytes(), about.st_mtime_ns)
            if not os.path.isdir(path) or os.path.islink(path):
                first.setdefault(about.st_ino, inside)
            extended = {
                key: os.getxattr(path, key, follow_symlinks=False)
                for key in os.listxattr(path, follow_symlinks=False)
                if key.startswith("user.")
            }
            found[inside] = (
                about.st_mode, about.st_uid, about.st_gid, about.st_rdev, body, extended,
                first.get(about.st_ino, ""),
            )  # fmt: skip
    return found


def emptied(folder: Path) -> None:
    for entry in os.scandir(folder):
        if entry.is_dir(follow_symlinks=False):
            shutil.rmtree(entry.path)
        else:
            os.unlink(entry.path)
