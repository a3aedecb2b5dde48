"""btrfs: in a file of fixed size, mounted through a loop device that frees itself; and by ioctl: subvolumes,
snapshots, what was written since a generation, and limits.

The loop device is set to clear itself at its last close, so neither a failed mount nor an unmount can leave
one behind. One file must never back two devices at once (two file systems would write the same blocks):
before attaching, the devices of the whole machine are searched for the file, also those mounted in a mount
namespace that this process does not see.

A *generation* is the number of a transaction. Every inode carries the number of the transaction that wrote it
last, and every block of the tree that of the one that wrote the block, so a search "newer than g" skips all
older subtrees: its cost follows what changed, not what is there.

Source: linux/btrfs.h and linux/btrfs_tree.h (the layouts below), fs/btrfs/ioctl.c; loop(4), linux/loop.h.
"""

from __future__ import annotations

import ctypes
import errno
import os
import shutil
import struct
import subprocess
import time
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from windtunnel.agents.sandbox.errors import PoolError
from windtunnel.linux import mounts
from windtunnel.linux.system import BTRFS, file_system, has_file_system, in_sbin, ioctl, locked, opened

SMALLEST = 128 << 20
DEFAULT_SIZE = 32 << 30
DEFAULT_SHARE = 4
"""A pool takes this part of what its disk has free, and no more than `DEFAULT_SIZE`, where nobody says."""
ROOT_INODE = 256
INODE_ITEM, EXTENT_DATA, ROOT_ITEM = 1, 108, 132
_QUOTA_TREE, _QGROUP_INFO = 8, 242
LAST = 2**64 - 1

_READ_ONLY = 1 << 1
_MAX_REFERENCED = 1 << 0
_SEARCH_KEY = struct.Struct("=7Q4I4Q")
_HEADER = struct.Struct("=3Q2I")
_ROOT_TREE = 1
_BUFFER = 256 << 10


def _request(direction: int, number: int, size: int) -> int:
    return direction << 30 | size << 16 | 0x94 << 8 | number


_W, _R, _WR = 1, 2, 3
_SYNC = _request(0, 8, 0)
_SUBVOL_CREATE = _request(_W, 14, 4096)
_SNAP_DESTROY = _request(_W, 15, 4096)
_TREE_SEARCH_V2 = _request(_WR, 17, 112)
_SNAP_CREATE_V2 = _request(_W, 23, 4096)
_INO_PATHS = _request(_WR, 35, 56)
_QUOTA_CTL = _request(_WR, 40, 16)
_QGROUP_CREATE = _request(_W, 42, 16)
_QGROUP_LIMIT = _request(_R, 43, 48)
_SUBVOL_INFO = _request(_R, 60, 504)


@dataclass(frozen=True)
class Subvolume:
    """What tells one subvolume from all others, and where it comes from."""

    id: int
    born: int
    """Transaction in which it was made."""
    uuid: bytes
    parent: bytes
    """``uuid`` of the subvolume of which it is a snapshot; zeros for none."""


def is_btrfs(folder: Path) -> bool:
    """Whether ``folder`` lies on a btrfs."""
    return file_system(folder) == BTRFS


def image_of(folder: Path) -> Path:
    return folder.with_name(folder.name + ".img")


def mount_pool(folder: Path, size: int | None) -> None:
    """Mount the btrfs of ``folder``'s image file at ``folder``, making it when it is absent. Idempotent."""
    make_pool(folder, size)
    with locked(folder.with_name(folder.name + ".lock")):
        if not any(each.kind == "btrfs" for each in mounts.at(folder)):
            _mount(image_of(folder), folder)


def make_pool(folder: Path, size: int | None) -> int:
    """Make the image file of ``folder`` when it is absent; bytes of it."""
    folder.mkdir(parents=True, exist_ok=True)
    with locked(folder.with_name(folder.name + ".lock")):
        if not image_of(folder).exists():
            _make(image_of(folder), size)
    return image_of(folder).stat().st_size


def _make(image: Path, size: int | None) -> None:
    """The file system is made beside its name and renamed when it is whole. Its bytes are taken from the disk
    at once: were the file sparse and the disk beneath it full, that would look like a broken one."""
    program = in_sbin("mkfs.btrfs")
    if program is None:
        raise PoolError("mkfs.btrfs is missing; install btrfs-progs")
    free = shutil.disk_usage(image.parent).free
    if size is None:
        size = min(DEFAULT_SIZE, max(free // DEFAULT_SHARE, SMALLEST))
    if not SMALLEST <= size <= free:
        raise PoolError(
            f"a btrfs pool of {size >> 20} MiB cannot be made: at least {SMALLEST >> 20} MiB are needed, and "
            f"{free >> 20} are free; name another size ('setup --pool-size')"
        )
    draft = image.with_name(image.name + ".draft")
    try:
        with open(draft, "wb") as file:
            os.posix_fallocate(file.fileno(), 0, size >> 20 << 20)
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
        device, name = mounts.loop_of(image) or mounts.attach_loop(image)
    except OSError as error:
        raise PoolError(f"no loop device for {image}: {error.strerror}") from error
    try:
        mounts.mount(name, folder, "btrfs", mounts.MS_NOATIME, "nodiscard,commit=30")
        mounts.mount("none", folder, flags=mounts.MS_PRIVATE)
    except OSError as error:
        raise PoolError(f"the btrfs in {image} cannot be mounted: {error.strerror}") from error
    finally:
        os.close(device)


def usable(folder: Path) -> str:
    """Why this process cannot have a btrfs at ``folder``; empty when it can."""
    return "mounting needs root" if os.geteuid() != 0 else lacking(exists=image_of(folder).exists())


def lacking(*, exists: bool = False) -> str:
    """What this host lacks for a btrfs in a file, ``exists`` already or not; empty for nothing."""
    if not has_file_system("btrfs"):
        return "this kernel has no btrfs"
    if not os.path.exists("/dev/loop-control"):
        return "there are no loop devices"
    return "" if exists or in_sbin("mkfs.btrfs") else "mkfs.btrfs is missing; install btrfs-progs"


def _block(raw: bytes) -> ctypes.Array[ctypes.c_char]:
    return ctypes.create_string_buffer(raw, len(raw))


def create(path: Path) -> None:
    """A new, empty subvolume."""
    with opened(path.parent) as folder:
        ioctl(folder, _SUBVOL_CREATE, _block(struct.pack("=q4088s", 0, os.fsencode(path.name))))


def snapshot(source: Path, path: Path, *, read_only: bool) -> None:
    """All of ``source`` as it is now, at ``path``; it is there whole or not at all."""
    with opened(path.parent) as folder, opened(source) as descriptor:
        flags = _READ_ONLY if read_only else 0
        raw = struct.pack("=qQQ32s4040s", descriptor, 0, flags, b"", os.fsencode(path.name))
        try:
            ioctl(folder, _SNAP_CREATE_V2, _block(raw))
        except OSError as error:
            # what was removed a moment ago is given back in the background
            if error.errno != errno.ENOSPC or not waited_for_room(path.parent):
                raise
            ioctl(folder, _SNAP_CREATE_V2, _block(raw))


def destroy(path: Path) -> None:
    """Forget a subvolume; the kernel frees the space in the background."""
    with opened(path.parent) as folder:
        ioctl(folder, _SNAP_DESTROY, _block(struct.pack("=q4088s", 0, os.fsencode(path.name))))


def waited_for_room(path: Path, deadline: float = 3.0) -> bool:
    """Wait while the kernel still frees removed subvolumes; False when there were none to wait for."""
    waited = False
    end = time.monotonic() + deadline
    while _being_freed(path) and time.monotonic() < end:
        waited = True
        sync(path)
        time.sleep(0.02)
    sync(path)
    return waited


def _being_freed(path: Path) -> bool:
    """Whether the tree of roots has one to which nothing refers any more (``refs`` is at byte 216)."""
    with opened(path) as descriptor:
        return any(struct.unpack_from("=I", body, 216)[0] == 0 for _, body in _roots(descriptor))


def _roots(descriptor: int) -> Iterator[tuple[int, bytes]]:
    """Every subvolume that is there, or is being freed: its number, and its item in the tree of roots."""
    low, high = (ROOT_INODE, ROOT_ITEM), (LAST - 256, ROOT_ITEM)
    for number, item, _, body in search(descriptor, _ROOT_TREE, low, high, 0):
        if item == ROOT_ITEM:
            yield number, body


def subvolume(path: Path) -> Subvolume:
    block = ctypes.create_string_buffer(504)
    with opened(path) as descriptor:
        ioctl(descriptor, _SUBVOL_INFO, block)
    number = struct.unpack_from("=Q", block)[0]
    uuid, parent = struct.unpack_from("=16s16s", block, 8 + 256 + 32)
    born = struct.unpack_from("=Q", block, 8 + 256 + 32 + 48 + 8)[0]
    return Subvolume(number, born, uuid, parent)


def sync(path: Path) -> None:
    """All written data of the file system, and the trees that name it, are on the disk."""
    with opened(path) as descriptor:
        ioctl(descriptor, _SYNC, 0)


def search(
    descriptor: int,
    tree: int,
    low: tuple[int, int],
    high: tuple[int, int],
    newer: int,
) -> Iterator[tuple[int, int, int, bytes]]:
    """Items between two keys (object, type) that lie in blocks written in generation ``newer`` or later.

    Yields object, type, offset and body. The block's generation is no bound on that of the item.
    """
    object_id, item, offset = *low, 0
    block = ctypes.create_string_buffer(112 + _BUFFER)
    while True:
        _SEARCH_KEY.pack_into(
            block, 0,
            tree, object_id, high[0], offset, LAST, newer, LAST, item, high[1], 2**32 - 1, *(0,) * 5,
        )  # fmt: skip
        struct.pack_into("=Q", block, 104, _BUFFER)
        ioctl(descriptor, _TREE_SEARCH_V2, block)
        count = struct.unpack_from("=I", block, 64)[0]
        if not count:
            return
        place = 112
        for _ in range(count):
            _, object_id, offset, item, size = _HEADER.unpack_from(block, place)
            place += _HEADER.size
            yield object_id, item, offset, ctypes.string_at(ctypes.addressof(block) + place, size)
            place += size
        # the next key in the order of (object, type, offset)
        if offset < LAST:
            offset += 1
        else:
            object_id, item, offset = (object_id, item + 1, 0) if item < 255 else (object_id + 1, 0, 0)


def written_in(path: Path, newer: int) -> set[int]:
    """Inodes of the subvolume that were written in generation ``newer`` or later."""
    with opened(path) as descriptor:
        return {
            inode
            for inode, item, _, body in search(
                descriptor, 0, (ROOT_INODE, INODE_ITEM), (LAST - 256, INODE_ITEM), newer
            )
            if item == INODE_ITEM and struct.unpack_from("=Q", body, 8)[0] >= newer
        }


def newer(descriptor: int, since: int) -> int:
    """Bytes on disk of the extents of the subvolume that is open, in its tree or not, that came in generation
    ``since`` or later."""
    extents: dict[int, int] = {}
    inline = 0
    for _, item, _, body in search(descriptor, 0, (0, 0), (LAST, 255), since):
        if item != EXTENT_DATA or struct.unpack_from("=Q", body)[0] < since:
            continue
        if body[20] == 0:
            inline += len(body) - 21
        else:
            start, size = struct.unpack_from("=QQ", body, 21)
            if start:
                extents[start] = size
    return sum(extents.values()) + inline


def counts(path: Path) -> dict[int, int]:
    """Bytes that are counted for the quota groups of all subvolumes that are there or were; none where quotas
    are off."""
    key = (0, _QGROUP_INFO)
    with opened(path) as descriptor, suppress(FileNotFoundError):
        return {
            number: int(struct.unpack_from("=Q", body, 8)[0])
            for _, item, number, body in search(descriptor, _QUOTA_TREE, key, key, 0)
            if item == _QGROUP_INFO and ROOT_INODE <= number < 1 << 48
        }
    return {}


def paths(descriptor: int, inode: int) -> list[str]:
    """All paths, below the root of the subvolume, of an inode; none when it has no name any more."""
    if inode == ROOT_INODE:
        return [""]
    size = 4096
    while True:
        result = ctypes.create_string_buffer(size)
        address = ctypes.addressof(result)
        try:
            ioctl(descriptor, _INO_PATHS, _block(struct.pack("=7Q", inode, size, 0, 0, 0, 0, address)))
        except OSError as error:
            if error.errno == errno.ENOENT:
                return []
            raise
        _, missing, count, missed = struct.unpack_from("=4I", result)
        if not missing and not missed:
            # the kernel fills in offsets from the end of the four counters
            offsets = struct.unpack_from(f"={count}Q", result, 16)
            return [os.fsdecode(ctypes.string_at(address + 16 + offset)) for offset in offsets]
        size = min(max(size * 4, size + missing), 1 << 16)
        if len(result) == 1 << 16:
            raise OSError(errno.EOVERFLOW, "an inode has too many names", str(inode))


def enable_simple_quotas(path: Path) -> None:
    with opened(path) as descriptor:
        ioctl(descriptor, _QUOTA_CTL, _block(struct.pack("=QQ", 4, 0)))


def limit(path: Path, most: int | None) -> None:
    """Bound what the subvolume may own; None: no bound. Quotas must be on."""
    number, most = subvolume(path).id, LAST if most is None else most
    # not through the subvolume itself: one that is full has no room for the change
    with opened(path.parent) as descriptor:
        ioctl(descriptor, _QGROUP_LIMIT, _block(struct.pack("=6Q", number, _MAX_REFERENCED, most, 0, 0, 0)))


def forget_groups(path: Path) -> None:
    """Remove the quota groups of subvolumes that are gone with all they wrote, as the kernel does not."""
    with opened(path) as descriptor:
        roots = {number for number, _ in _roots(descriptor)}
        for number, used in counts(path).items():
            if number not in roots and not used:
                with suppress(OSError):  # something is still written off it
                    ioctl(descriptor, _QGROUP_CREATE, _block(struct.pack("=2Q", 0, number)))
