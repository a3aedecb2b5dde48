"""A small file system of its own: a file by way of a loop device, mounted at a folder."""

from __future__ import annotations

import contextlib
import os
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from windtunnel.linux import mounts
from windtunnel.linux.system import in_sbin


@contextlib.contextmanager
def small_disk(folder: Path, size: int, *options: str) -> Iterator[tuple[Path, Path]]:
    """The file and the folder at which its ext4 of ``size`` bytes is mounted, both in ``folder``; ``options``
    of mkfs. Skips the test where there is no mkfs.ext4."""
    make = in_sbin("mkfs.ext4")
    if make is None:
        pytest.skip("needs mkfs.ext4")
    disk, point = folder / "disk", folder / "at"
    with disk.open("wb") as file:
        file.truncate(size)
    subprocess.run([make, "-q", "-F", *options, disk], check=True)
    point.mkdir()
    device, name = mounts.attach_loop(disk)
    try:
        mounts.mount(name, point, "ext4")
    finally:
        os.close(device)
    try:
        yield disk, point
    finally:
        mounts.unmount(point)
