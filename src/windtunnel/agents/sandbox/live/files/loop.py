"""A btrfs in a sparse file, mounted through a loop device that frees itself.

The device is set to clear itself at its last close, so neither a failed mount nor an unmount can leave one
behind. One file must never back two devices at once (two file systems would write the same blocks): before
attaching, the devices of the whole machine are searched for the file, also those mounted in a mount namespace
that this process does not see. Source: loop(4), linux/loop.h.
"""

from __future__ import annotations

import ctypes
import errno
import os
import shutil
import struct
import subprocess
from pathlib import Path

from windtunnel.agents.sandbox.live.files.fault import PoolError
from windtunnel.agents.sandbox.live.files.kernel import (
    MS_NOATIME,
    MS_PRIVATE,
    ioctl,
    locked,
    mount,
    mounts_at,
)

SMALLEST = 128 << 20
LARGEST_DEFAULT = 64 << 30

_GET_FREE = 0x4C82
_CONFIGURE = 0x4C0A
_GET_STATUS = 0x4C05
_AUTOCLEAR = 4


def image_of(folder: Path) -> Path:
    return folder.with_name(folder.name + ".img")


def mount_pool(folder: Path, size: int | None) -> None:
    """Mount the btrfs of ``folder``'s image file at ``folder``, making it when it is absent. Idempotent."""
    folder.mkdir(parents=True, exist_ok=True)
    with locked(folder.with_name(folder.name + ".lock")):
        if any(each.kind == "btrfs" for each in mounts_at(folder)):
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
    device, name = _attached(image) or _attach(image)
    try:
        mount(name, folder, "btrfs", MS_NOATIME, "discard=async,commit=30")
        mount("none", folder, flags=MS_PRIVATE)
    except OSError as error:
        raise PoolError(f"the btrfs in {image} cannot be mounted: {error.strerror}") from error
    finally:
        os.close(device)


def _attached(image: Path) -> tuple[int, str] | None:
    """The open loop device that ``image`` backs already, and its name."""
    wanted = os.stat(image)
    for entry in Path("/sys/block").glob("loop*/loop/backing_file"):
        name = f"/dev/{entry.parent.parent.name}"
        try:
            device = os.open(name, os.O_RDWR | os.O_CLOEXEC)
        except OSError:
            continue
        status = ctypes.create_string_buffer(232)
        try:
            ioctl(device, _GET_STATUS, status)
            if struct.unpack_from("=QQ", status) == (wanted.st_dev, wanted.st_ino):
                return device, name
        except OSError:
            pass
        os.close(device)
    return None


def _attach(image: Path) -> tuple[int, str]:
    """A free loop device over ``image``, open: it clears itself when the last holder closes it."""
    backing = os.open(image, os.O_RDWR | os.O_CLOEXEC)
    try:
        control = os.open("/dev/loop-control", os.O_RDWR | os.O_CLOEXEC)
        try:
            for _ in range(64):
                free = ctypes.CDLL(None, use_errno=True).ioctl(control, _GET_FREE)
                if free < 0:
                    raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))
                name = f"/dev/loop{free}"
                device = os.open(name, os.O_RDWR | os.O_CLOEXEC)
                # fd, block size, then loop_info64 whose flags lie at its byte 52
                request = struct.pack("=II", backing, 4096) + struct.pack("=52xI", _AUTOCLEAR).ljust(
                    232, b"\0"
                )
                try:
                    ioctl(device, _CONFIGURE, ctypes.create_string_buffer(request.ljust(304, b"\0"), 304))
                except OSError as error:
                    os.close(device)
                    if error.errno != errno.EBUSY:
                        raise
                    continue
                return device, name
        finally:
            os.close(control)
    except OSError as error:
        raise PoolError(f"no loop device for {image}: {error.strerror}") from error
    finally:
        os.close(backing)
    raise PoolError(f"no loop device for {image}: other programs took every one that was free")


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
