"""Paths inside a sandbox, opened from the host without ever leaving the sandbox's root.

What lies in the root belongs to whoever runs inside: any component may become a symbolic link to a file of
the host, a FIFO that never answers, a device or a huge file, also between a check and its use. So every
path is resolved by the kernel with openat2 relative to the root (``RESOLVE_IN_ROOT``: absolute links and
``..`` stay inside; magic links of /proc are refused), opened without blocking, and only then is what was
opened looked at.
"""

from __future__ import annotations

import contextlib
import errno
import os
import stat
from collections.abc import Iterator

from windtunnel.agents.sandbox.live.machine.fault import MachineError
from windtunnel.base.atomic import write_all
from windtunnel.linux.system import BENEATH, IN_ROOT, NO_SYMLINKS, NO_XDEV, open_inside


@contextlib.contextmanager
def opened(root: int, path: str, flags: int, mode: int = 0, *, resolve: int = IN_ROOT) -> Iterator[int]:
    """`open_inside`, closed at the end."""
    descriptor = open_inside(root, path, flags, mode, resolve=resolve)
    try:
        yield descriptor
    finally:
        os.close(descriptor)


class Folder:
    """A folder of the channel, held open. Names in it are single components and never followed."""

    def __init__(self, descriptor: int) -> None:
        self.descriptor = descriptor

    @classmethod
    def of_root(cls, root: int, name: str, *, create: bool) -> Folder:
        """The folder ``name`` of the root, which must be a true folder owned by root. Raises MachineError."""
        if create:
            with contextlib.suppress(FileExistsError):
                os.mkdir(name, 0o700, dir_fd=root)
        try:
            flags = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW
            found = open_inside(root, name, flags, resolve=BENEATH | NO_SYMLINKS | NO_XDEV)
        except OSError as error:
            raise MachineError(f"the sandbox's folder /{name} is not usable: {error.strerror}") from error
        return cls(found)

    def close(self) -> None:
        if self.descriptor >= 0:
            os.close(self.descriptor)
            self.descriptor = -1

    def folder(self, name: str, *, create: bool) -> Folder:
        return Folder.of_root(self.descriptor, name, create=create)

    def open(self, name: str, flags: int, mode: int = 0) -> int:
        safe = os.O_NOFOLLOW | os.O_NONBLOCK
        return open_inside(self.descriptor, name, flags | safe, mode, resolve=BENEATH | NO_SYMLINKS | NO_XDEV)

    def fresh(self, name: str, mode: int = 0o600) -> int:
        """A new, empty file for reading and writing; what had the name is gone."""
        self.remove(name)
        return self.open(name, os.O_RDWR | os.O_CREAT | os.O_EXCL, mode)

    def write(self, name: str, data: bytes, mode: int = 0o600) -> None:
        """Put ``data`` under ``name`` in one step."""
        part = f".{name}.part"
        descriptor = self.fresh(part, mode)
        try:
            write_all(descriptor, data)
        finally:
            os.close(descriptor)
        if self.is_folder(name):
            self.remove(name)
        os.rename(part, name, src_dir_fd=self.descriptor, dst_dir_fd=self.descriptor)

    def read(self, name: str, limit: int) -> bytes:
        """At most ``limit`` bytes of the regular file ``name``; nothing when it is none or is absent."""
        try:
            descriptor = self.open(name, os.O_RDONLY)
        except OSError:
            return b""
        try:
            if not stat.S_ISREG(os.fstat(descriptor).st_mode):
                return b""
            with os.fdopen(os.dup(descriptor), "rb", buffering=0) as file:
                return read_up_to(file.fileno(), limit)
        finally:
            os.close(descriptor)

    def fifo(self, name: str) -> int:
        """Make the FIFO ``name`` anew and open it for both directions."""
        self.remove(name)
        os.mkfifo(name, 0o600, dir_fd=self.descriptor)
        return self.existing_fifo(name)

    def existing_fifo(self, name: str) -> int:
        """The FIFO ``name``, open for both directions; OSError when it is anything else."""
        descriptor = self.open(name, os.O_RDWR)
        if not stat.S_ISFIFO(os.fstat(descriptor).st_mode):
            os.close(descriptor)
            raise OSError(errno.EINVAL, "not a FIFO", name)
        return descriptor

    def remove(self, name: str) -> None:
        """Remove a file, or an empty or planted folder by moving it aside under a name that nobody uses."""
        try:
            os.unlink(name, dir_fd=self.descriptor)
        except FileNotFoundError:
            return
        except IsADirectoryError:
            aside = f".aside.{os.urandom(6).hex()}"
            os.rename(name, aside, src_dir_fd=self.descriptor, dst_dir_fd=self.descriptor)

    def is_folder(self, name: str) -> bool:
        try:
            return stat.S_ISDIR(os.stat(name, dir_fd=self.descriptor, follow_symlinks=False).st_mode)
        except OSError:
            return False

    def identity(self, name: str) -> tuple[int, int] | None:
        """Device and inode of what has the name now."""
        try:
            found = os.stat(name, dir_fd=self.descriptor, follow_symlinks=False)
        except OSError:
            return None
        return found.st_dev, found.st_ino

    def names(self) -> list[str]:
        return os.listdir(self.descriptor)


def read_up_to(descriptor: int, limit: int) -> bytes:
    pieces: list[bytes] = []
    left = limit
    while left > 0:
        piece = os.read(descriptor, min(left, 1 << 20))
        if not piece:
            break
        pieces.append(piece)
        left -= len(piece)
    return b"".join(pieces)
