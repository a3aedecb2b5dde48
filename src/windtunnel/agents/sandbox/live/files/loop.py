"""A btrfs in a sparse file, mounted through a loop device that frees itself.

The device is set to clear itself at its last close, so neither a failed mount nor an unmount can leave one
behind. One file must never back two devices at once (two file systems would write the same blocks): before
attaching, the devices of the whole machine are searched for the file, also those mounted in a mount namespace
that this process does not see. Source: loop(4), linux/loop.h.
"""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path

from windtunnel.agents.sandbox.errors import PoolError
from windtunnel.linux import mounts
from windtunnel.linux.mounts import MS_NOATIME, MS_PRIVATE, attach_loop, loop_of, mount
from windtunnel.linux.system import locked

SMALLEST = 128 << 20
LARGEST_DEFAULT = 64 << 30


def image_of(folder: Path) -> Path:
    return folder.with_name(folder.name + ".img")


def mount_pool(folder: Path, size: int | None) -> None:
    """Mount the btrfs of ``folder``'s image file at ``folder``, making it when it is absent. Idempotent."""
    folder.mkdir(parents=True, exist_ok=True)
    with locked(folder.with_name(folder.name + ".lock")):
        if any(each.kind == "btrfs" for each in mounts.at(folder)):
            return
        image = image_of(folder)
        if not image.exists():
            _make(image, size)
        _mount(image, folder)


def _make(image: Path, size: int | None) -> None:
    """The file system is made beside its name and renamed when it is whole."""
    program = shutil.which("mkfs.btrfs") or shutil.which("mkfs.btrfs", path="/usr/sbin:/sbin")
    if program is None:
        raise PoolError("mkfs.btrfs is missing; install btrfs-progs, or use a pool of kind 'copy'")
    if size is None:
        # the file is sparse: were it larger than the disk beneath, a full disk would look like a broken one
        size = min(LARGEST_DEFAULT, shutil.disk_usage(image.parent).free * 9 // 10)
    if size < SMALLEST:
        raise PoolError(
            f"a btrfs pool needs at least {SMALLEST >> 20} MiB; {size >> 20} MiB are given or free"
        )
    draft = image.with_name(image.name + ".draft")
    try:
        with open(draft, "wb") as file:
            file.truncate(size >> 20 << 20)
        # a small one keeps data and trees in one place: else data may take all, and no tree can ever grow
        mixed = ["--mixed"] if size < 1 << 30 else []
        done = subprocess.run(
            [program, "-q", "-f", "-K", *mixed, "-m", "single", "-d", "single", str(draft)],
            capture_output=True,
            text=True,
            check=False,
        )
        if done.returncode:
            raise PoolError(f"mkfs.btrfs failed: {' '.join(done.stderr.split())[-300:]}")
        os.rename(draft, image)
    finally:
        draft.unlink(missing_ok=True)


def _mount(image: Path, folder: Path) -> None:
    try:
        device, name = loop_of(image) or attach_loop(image)
    except OSError as error:
        raise PoolError(f"no loop device for {image}: {error.strerror}") from error
    try:
        mount(name, folder, "btrfs", MS_NOATIME, "discard=async,commit=30")
        mount("none", folder, flags=MS_PRIVATE)
    except OSError as error:
        raise PoolError(f"the btrfs in {image} cannot be mounted: {error.strerror}") from error
    finally:
        os.close(device)


def usable(folder: Path) -> str:
    """Why this process cannot have a btrfs at ``folder``; empty when it can."""
    if os.geteuid() != 0:
        return "mounting needs root"
    with open("/proc/filesystems", encoding="ascii") as kinds:
        known = any(line.split()[-1] == "btrfs" for line in kinds)
    if not known and subprocess.run(["modprobe", "-q", "btrfs"], capture_output=True, check=False).returncode:
        return "this kernel has no btrfs"
    if not os.path.exists("/dev/loop-control"):
        return "there are no loop devices"
    if not (
        image_of(folder).exists()
        or shutil.which("mkfs.btrfs", path=os.environ.get("PATH", "") + ":/usr/sbin:/sbin")
    ):
        return "mkfs.btrfs is missing; install btrfs-progs"
    return ""
