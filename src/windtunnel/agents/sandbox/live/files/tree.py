"""Copy and remove folder trees so that nothing of them is lost.

Kept: kind, mode, owner, times, extended attributes, hard links within the tree, holes, device numbers, FIFOs
and sockets. Bytes are shared where the file system can (``FICLONE``), else moved inside the kernel.
Symbolic links are copied, never followed.
"""

from __future__ import annotations

import errno
import fcntl
import os
import stat
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

_FICLONE = 0x40049409
_OWN = frozenset(("btrfs.compression", "security.selinux"))
"""Attributes that belong to the file system or the host, not to the tree."""
_NO_SHARING = (errno.EOPNOTSUPP, errno.EXDEV, errno.EINVAL, errno.ENOTTY, errno.ENOSYS, errno.EPERM)


class LeftOut(str):
    """Said of an image that is being made: something that it lacks."""

    __slots__ = ()


@dataclass
class Copier:
    """One copy: ``links`` maps files that have several names to where the first of them went."""

    links: dict[tuple[int, int], str] = field(default_factory=dict)
    share: bool = True
    """Whether blocks may still turn out to be shareable; cleared at the first refusal."""
    bytes: int = 0
    """Bytes written that are not shared with the source."""
    skipped: list[str] = field(default_factory=list)
    """Paths that this user may not make (devices without root)."""
    reuse: Callable[[str, os.stat_result], str | None] = lambda path, about: None
    """A file, never changed again, that equals the regular file at a path and may be linked in its place."""

    def tree(self, source: str, target: str, leave_out: Callable[[str], bool] = lambda path: False) -> None:
        """Copy what is in ``source`` into the existing folder ``target``, and then its own attributes."""
        with _entered(source), os.scandir(source) as entries:
            for entry in entries:
                if leave_out(entry.path):
                    continue
                there = f"{target}/{entry.name}"
                if entry.is_dir(follow_symlinks=False):
                    os.mkdir(there, 0o700)
                    self.tree(entry.path, there, leave_out)
                else:
                    self.entry(entry.path, there)
        attributes(source, target, os.lstat(source))

    def entry(self, source: str, target: str) -> None:
        """Copy one thing that is no folder."""
        about = os.lstat(source)
        kind = stat.S_IFMT(about.st_mode)
        key = (about.st_dev, about.st_ino)
        if about.st_nlink > 1 and key in self.links:
            os.link(self.links[key], target, follow_symlinks=False)
            return
        if kind == stat.S_IFREG:
            same = self.reuse(source, about)
            if same is not None and _linked(same, target):
                return
            self._file(source, target, about.st_size)
        elif kind == stat.S_IFLNK:
            os.symlink(os.readlink(source), target)
        else:
            try:
                os.mknod(target, kind | 0o600, about.st_rdev)
            except PermissionError:
                self.skipped.append(source)
                return
        attributes(source, target, about)
        if about.st_nlink > 1:
            self.links[key] = target

    def _file(self, source: str, target: str, size: int) -> None:
        given = _open_own(source)
        try:
            made = os.open(target, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
            try:
                if self.share and size:
                    try:
                        fcntl.ioctl(made, _FICLONE, given)
                        return
                    except OSError as error:
                        if error.errno not in _NO_SHARING:
                            raise
                        self.share = False
                for start, end in extents(given, size):
                    self.bytes += _copy_range(given, made, start, end)
                os.ftruncate(made, size)
            finally:
                os.close(made)
        finally:
            os.close(given)


def _open_own(path: str) -> int:
    """Open a file to read. Without root, one that this user owns and may not read becomes readable for the
    moment of opening: who is 0 in a sandbox of this user may well have made such files."""
    flags = os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC
    try:
        return os.open(path, flags)
    except PermissionError:
        with _readable(path):
            return os.open(path, flags)


@contextmanager
def _entered(path: str) -> Iterator[None]:
    """The same for a folder, within the block."""
    if os.geteuid() == 0 or os.access(path, os.R_OK | os.X_OK):
        yield
    else:
        with _readable(path):
            yield


@contextmanager
def _readable(path: str) -> Iterator[None]:
    held = os.open(path, os.O_PATH | os.O_NOFOLLOW | os.O_CLOEXEC)
    try:
        about = os.fstat(held)
        if os.geteuid() == 0 or about.st_uid != os.geteuid():
            raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), path)
        itself = f"/proc/self/fd/{held}"
        os.chmod(itself, stat.S_IMODE(about.st_mode) | 0o500)
        try:
            yield
        finally:
            os.chmod(itself, stat.S_IMODE(about.st_mode))
    finally:
        os.close(held)


def _linked(origin: str, target: str) -> bool:
    try:
        os.link(origin, target, follow_symlinks=False)
    except OSError as error:
        if error.errno not in (errno.EACCES, errno.EMLINK, errno.ENOENT, errno.EPERM, errno.EXDEV):
            raise
        return False
    return True


def extents(descriptor: int, size: int) -> Iterator[tuple[int, int]]:
    """The parts of a file that hold data, in order; the rest are holes."""
    place = 0
    while place < size:
        try:
            start = os.lseek(descriptor, place, os.SEEK_DATA)
        except OSError as error:
            if error.errno == errno.ENXIO:
                return
            yield place, size
            return
        place = min(os.lseek(descriptor, start, os.SEEK_HOLE), size)
        yield start, place


def _copy_range(given: int, made: int, start: int, end: int) -> int:
    place = start
    while place < end:
        try:
            done = os.copy_file_range(given, made, min(end - place, 1 << 30), place, place)
        except OSError as error:
            if error.errno not in _NO_SHARING:
                raise
            done = os.pwrite(made, os.pread(given, min(end - place, 1 << 20), place), place)
        if done == 0:
            break
        place += done
    return place - start


def attributes(source: str, target: str, about: os.stat_result) -> None:
    """Owner, extended attributes, mode and times, in the order in which none undoes another."""
    set_owner(target, about.st_uid, about.st_gid)
    for name, value in extended(source).items():
        set_extended(target, name, value)
    if not stat.S_ISLNK(about.st_mode):
        os.chmod(target, stat.S_IMODE(about.st_mode))
    os.utime(target, ns=(about.st_atime_ns, about.st_mtime_ns), follow_symlinks=False)


def extended(path: str) -> dict[str, bytes]:
    """Extended attributes by name; none where the file system keeps none."""
    try:
        names = os.listxattr(path, follow_symlinks=False)
    except OSError as error:
        if error.errno == errno.EOPNOTSUPP:
            return {}
        raise
    return {name: _attribute(path, name) for name in names if name not in _OWN}


def _attribute(path: str, name: str) -> bytes:
    try:
        return os.getxattr(path, name, follow_symlinks=False)
    except PermissionError:
        with _readable(path):
            return os.getxattr(path, name, follow_symlinks=False)


def set_extended(path: str, name: str, value: bytes) -> None:
    """Set an extended attribute; one that this user or file system cannot have is left out."""
    try:
        os.setxattr(path, name, value, follow_symlinks=False)
    except OSError as error:
        if error.errno not in (errno.EOPNOTSUPP, errno.EPERM, errno.EACCES):
            raise


def set_owner(target: str, uid: int, gid: int) -> None:
    """Give ``target`` away, which only root can; others keep what they make."""
    try:
        os.chown(target, uid, gid, follow_symlinks=False)
    except PermissionError:
        if os.geteuid() == 0:
            raise


def remove(path: Path) -> None:
    """Remove a tree whatever its modes; missing is fine. Does not follow links."""
    try:
        about = os.lstat(path)
    except FileNotFoundError:
        return
    if not stat.S_ISDIR(about.st_mode):
        os.unlink(path)
        return
    if about.st_mode & 0o700 != 0o700:
        os.chmod(path, 0o700)
    with os.scandir(path) as entries:
        inner = list(entries)
    for entry in inner:
        if entry.is_dir(follow_symlinks=False):
            remove(Path(entry.path))
        else:
            os.unlink(entry.path)
    os.rmdir(path)
