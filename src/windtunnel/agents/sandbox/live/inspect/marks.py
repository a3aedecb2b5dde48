"""Changes of files by fanotify: one mark on the file system of the roots, for kernels without BPF.

The events name the directory by its file handle and the entry by its name, so no process is asked. Where the
directory is gone meanwhile, its own removal is an event too and says enough. Events of one entry may arrive
merged, without their order; then the entry counts as one that was there before. Stores through shared
mappings send no event (fanotify(7), limitations): a file that was open for writing counts as written when it
is closed, and one that a process still has mapped when that process ran.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import os
import struct
import threading
from dataclasses import dataclass

from windtunnel.agents.sandbox.errors import InspectError
from windtunnel.agents.sandbox.live.inspect.files import Window
from windtunnel.agents.sandbox.live.inspect.paths import Root, below, mounts
from windtunnel.agents.sandbox.live.inspect.syscalls import CREATED, DELETED, METADATA, MODIFIED, RENAMED
from windtunnel.linux.system import checked, libc

_CLOEXEC, _NONBLOCK, _DIRECTORY_AND_NAME = 0x1, 0x2, 0xC00
_MODIFY, _ATTRIB, _CLOSED, _FROM, _TO, _CREATE, _DELETE = 0x2, 0x4, 0x8, 0x40, 0x80, 0x100, 0x200
_OVERFLOW, _ONDIR = 0x4000, 0x40000000
_MASK = _MODIFY | _ATTRIB | _CLOSED | _FROM | _TO | _CREATE | _DELETE | _ONDIR
_ADD, _FILESYSTEM = 0x1, 0x100
_EMPTY_PATH = 0x1000
_AT_FDCWD = -100
_METADATA = struct.Struct("<IBBHQii")
_INFO = 12
_BTRFS = (0x4D, 0x4E, 0x4F)
"""Types of handle that name the subvolume in their second word."""


@dataclass
class _Box:
    root: Root
    window: Window
    fd: int
    subvolume: bytes


class Marks:
    """One group for all sandboxes, there as long as one is watched."""

    def __init__(self) -> None:
        self._fd = -1
        self._boxes: dict[str, _Box] = {}
        self._lock = threading.RLock()

    @staticmethod
    def missing() -> str:
        """Why fanotify cannot be used here, in words; empty when it can."""
        if os.geteuid() != 0:
            return "needs root"
        try:
            os.close(group())
        except InspectError as error:
            return str(error)
        return ""

    def add(self, name: str, root: Root, window: Window) -> None:
        """Raises InspectError where the file system does not take the mark."""
        with self._lock:
            if self._fd < 0:
                self._fd = group()
            fd = os.open(root.folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
            try:
                self._mark(root)
                self._boxes[name] = _Box(root, window, fd, _subvolume(_handle(fd)))
            except BaseException:
                os.close(fd)
                raise

    def _mark(self, root: Root) -> None:
        """Mark the whole file system of a root; btrfs takes the mark at its top only, not at a subvolume."""
        same = [mount for mount in mounts("self") if mount.device == root.device]
        point = min(same, key=lambda mount: len(mount.top)).point
        try:
            mark(self._fd, point)
        except OSError as error:
            raise InspectError(f"fanotify cannot watch {os.fsdecode(point)}: {error.strerror}") from None

    def remove(self, name: str) -> None:
        with self._lock:
            box = self._boxes.pop(name, None)
            if box is not None:
                os.close(box.fd)
            if not self._boxes:
                self.close()

    def close(self) -> None:
        with self._lock:
            if self._fd >= 0:
                os.close(self._fd)
            self._fd = -1

    def drain(self) -> None:
        """Hand on everything that happened before this call."""
        with self._lock, contextlib.suppress(BlockingIOError):
            folders: dict[bytes, tuple[_Box, bytes] | None] = {}
            while self._fd >= 0:
                data = os.read(self._fd, 1 << 18)
                at = 0
                while at < len(data):
                    length, _, _, header, mask, _, _ = _METADATA.unpack_from(data, at)
                    if mask & _OVERFLOW:
                        self._doubt("the queue of changes ran over")
                    elif header < length:
                        self._event(mask, data[at + header : at + length], folders)
                    at += length

    def _doubt(self, words: str) -> None:
        for box in self._boxes.values():
            box.window.doubt(words)

    def _event(self, mask: int, info: bytes, folders: dict[bytes, tuple[_Box, bytes] | None]) -> None:
        (size,) = struct.unpack_from("<I", info, _INFO)
        handle, name = info[_INFO : _INFO + 8 + size], info[_INFO + 8 + size :].split(b"\0", 1)[0]
        if handle not in folders:
            folders[handle] = self._found(handle)
        found = folders[handle]
        if found is None:
            return
        box, folder = found
        path = folder if name in (b"", b".") else folder.rstrip(b"/") + b"/" + name
        if mask & (_DELETE | _FROM):
            box.window.seen(DELETED, path)
        if mask & _TO:
            box.window.seen(RENAMED, path)
        if mask & _CREATE:
            box.window.seen(CREATED, path)
        if mask & (_MODIFY | _CLOSED):
            box.window.seen(MODIFIED, path)
        if mask & _ATTRIB and not mask & (_DELETE | _FROM):
            box.window.seen(METADATA, path)

    def _found(self, handle: bytes) -> tuple[_Box, bytes] | None:
        """The sandbox and the path inside of a directory; None when it is in none, or gone."""
        buffer = ctypes.create_string_buffer(handle, len(handle))
        subvolume = _subvolume(handle)
        for box in self._boxes.values():
            if subvolume != box.subvolume:
                continue
            fd: int = libc.open_by_handle_at(box.fd, buffer, os.O_PATH | os.O_CLOEXEC)
            if fd < 0:
                if ctypes.get_errno() != errno.ESTALE:
                    box.window.doubt("a directory cannot be told by its handle")
                continue
            try:
                rest = below(os.readlink(f"/proc/self/fd/{fd}".encode()), box.root.folder)
            finally:
                os.close(fd)
            if rest is not None:
                return box, rest or b"/"
        return None


def mark(fd: int, point: bytes) -> None:
    """Have a group told of all changes on the file system at ``point``. Raises OSError."""
    flags, mask = _ADD | _FILESYSTEM, ctypes.c_uint64(_MASK)
    checked(libc.fanotify_mark(fd, flags, mask, _AT_FDCWD, ctypes.c_char_p(point)), "fanotify_mark")


def group() -> int:
    """A new group that is told names. Raises InspectError in words."""
    fd: int = libc.fanotify_init(_CLOEXEC | _NONBLOCK | _DIRECTORY_AND_NAME, os.O_RDONLY)
    if fd < 0:
        raise InspectError(f"fanotify that tells names (Linux 5.9): {os.strerror(ctypes.get_errno())}")
    return fd


def _handle(fd: int) -> bytes:
    """The file handle of an open directory: size, type, bytes."""
    buffer = ctypes.create_string_buffer(struct.pack("<Ii", 128, 0), 136)
    mount = ctypes.c_int()
    if libc.name_to_handle_at(fd, b"", buffer, ctypes.byref(mount), _EMPTY_PATH):
        raise InspectError(f"file handles on this file system: {os.strerror(ctypes.get_errno())}")
    (size,) = struct.unpack_from("<I", buffer)
    return buffer.raw[: 8 + size]


def _subvolume(handle: bytes) -> bytes:
    """What of a btrfs handle tells the subvolume; empty on other file systems."""
    return handle[16:24] if struct.unpack_from("<i", handle, 4)[0] in _BTRFS else b""
