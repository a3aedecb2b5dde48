"""Walk, copy, remove and compare folder trees so that nothing of them is lost.

Kept by a copy: kind, mode, owner, times, extended attributes, hard links within the tree, holes, device
numbers, FIFOs and sockets. The kernel moves the bytes, and shares them where the file system can
(copy_file_range(2)). Symbolic links are copied, never followed.

Two trees are compared by metadata first, by bytes only where metadata cannot tell. A renamed path is one that
is gone and another that is new: what a process refers to by the old name is lost either way.
"""

from __future__ import annotations

import errno
import os
import stat
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path

from windtunnel.agents.sandbox.model import Change, FileChange
from windtunnel.linux.system import IN_ROOT, NO_XDEV, held, open_inside

_FOLDER = os.O_PATH | os.O_DIRECTORY
ORIGINS = "trusted.windtunnel.origins"
"""Attribute of a root on btrfs: see `btrfs_pool`."""
OWN = frozenset(("btrfs.compression", "security.selinux", ORIGINS))
"""Attributes that belong to the file system or the host, not to the tree."""
_NO_SHARING = (errno.EOPNOTSUPP, errno.EXDEV, errno.EINVAL, errno.ENOTTY, errno.ENOSYS, errno.EPERM)


def walk(folder: str) -> Iterator[os.DirEntry[str]]:
    """Everything below a folder in the order of names, each folder before what is in it."""
    with _entered(folder):
        with os.scandir(folder) as entries:
            ordered = sorted(entries, key=lambda entry: entry.name)
        for entry in ordered:
            yield entry
            if entry.is_dir(follow_symlinks=False):
                yield from walk(entry.path)


@dataclass
class Copier:
    """One copy: ``links`` maps files that have several names to where the first of them went."""

    links: dict[tuple[int, int], str] = field(default_factory=dict)
    skipped: list[str] = field(default_factory=list)
    """Paths that this user may not make (devices without root), or not read."""

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
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
        with _reading(source) as original, held(os.open(target, flags, 0o600)) as copy:
            for start, end in extents(original, size):
                _copy_range(original, copy, start, end)
            os.ftruncate(copy, size)


@contextmanager
def _reading(path: str) -> Iterator[int]:
    """A file open to read. Without root, one that this user owns and may not read becomes readable for the
    moment of opening: who is 0 in a sandbox of this user may well have made such files."""
    flags = os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC
    try:
        descriptor = os.open(path, flags)
    except PermissionError:
        with _readable(path):
            descriptor = os.open(path, flags)
    with held(descriptor):
        yield descriptor


@contextmanager
def _entered(path: str) -> Iterator[None]:
    """The same for a folder, within the block."""
    if os.geteuid() == 0 or os.access(path, os.R_OK | os.X_OK) or not os.path.isdir(path):
        yield
    else:
        with _readable(path):
            yield


@contextmanager
def _readable(path: str) -> Iterator[None]:
    with held(os.open(path, os.O_PATH | os.O_NOFOLLOW | os.O_CLOEXEC)) as descriptor:
        about = os.fstat(descriptor)
        if os.geteuid() == 0 or about.st_uid != os.geteuid():
            raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), path)
        itself = f"/proc/self/fd/{descriptor}"
        os.chmod(itself, stat.S_IMODE(about.st_mode) | 0o500)
        try:
            yield
        finally:
            os.chmod(itself, stat.S_IMODE(about.st_mode))


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


def _copy_range(original: int, copy: int, start: int, end: int) -> None:
    place = start
    while place < end:
        try:
            done = os.copy_file_range(original, copy, min(end - place, 1 << 30), place, place)
        except OSError as error:
            if error.errno not in _NO_SHARING:
                raise
            done = os.pwrite(copy, os.pread(original, min(end - place, 1 << 20), place), place)
        if done == 0:
            break
        place += done


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
    return {name: _attribute(path, name) for name in names if name not in OWN}


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


def make_folders(root: int, path: str) -> int:
    """The folder ``path`` of the tree ``root``, open. What is absent of it is made, also where a link leads;
    the kernel follows links as if ``root`` were ``/``, so nothing outside of it is reached. Raises OSError.
    """
    try:
        return open_inside(root, path, _FOLDER, resolve=IN_ROOT | NO_XDEV)
    except FileNotFoundError:
        above, name = os.path.split(path.rstrip("/"))
        with held(make_folders(root, above or "/")) as folder:
            try:
                os.mkdir(name, 0o755, dir_fd=folder)
            except FileExistsError:
                with suppress(OSError):  # else somebody made it meanwhile
                    link = os.readlink(name, dir_fd=folder)
                    os.close(make_folders(root, os.path.join(above, link)))
    return open_inside(root, path, _FOLDER, resolve=IN_ROOT | NO_XDEV)


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


Same = Callable[[str, os.stat_result, os.stat_result], bool]
"""Whether a path (as seen inside) is surely the same in both trees; in doubt False: then contents tell."""


class Comparison:
    """Collects the differences between the trees ``older`` and ``newer``."""

    def __init__(self, older: Path, newer: Path, same: Same) -> None:
        self._older, self._newer, self._same = str(older), str(newer), same
        self.changes: dict[str, FileChange] = {}

    def result(self) -> list[FileChange]:
        return [self.changes[path] for path in sorted(self.changes)]

    def trees(self, path: str = "") -> None:
        """Compare the whole of a folder that is in both trees (``path`` as seen inside, "" for the root)."""
        older, newer = self._older + path, self._newer + path
        with _entered(older), _entered(newer):
            for name in _inodes(older).keys() | _inodes(newer).keys():
                self.entry(f"{path}/{name}")

    def folder(self, path: str) -> None:
        """Compare the entries of a folder, but not what is inside of those that are the same inode in
        both."""
        before, after = _inodes(self._older + path), _inodes(self._newer + path)
        for name in before.keys() | after.keys():
            if before.get(name) != after.get(name):
                self.entry(f"{path}/{name}")

    def entry(self, path: str, *, deep: bool = True) -> None:
        """Compare one path, and with ``deep`` what lies below it."""
        if path in self.changes:
            return
        before, after = _lstat(self._older + path), _lstat(self._newer + path)
        if before is None and after is None:
            return
        kinds = {stat.S_IFMT(about.st_mode) if about is not None else 0 for about in (before, after)}
        if before is None or after is None or len(kinds) > 1:
            change: Change = "created" if before is None else "deleted" if after is None else "modified"
            self.changes[path] = FileChange(path, change, _size(after))
            if stat.S_IFDIR in kinds:
                self.trees(path)
        elif stat.S_ISDIR(before.st_mode):
            if not self._same(path, before, after) and self._metadata(path, before, after):
                self.changes[path] = FileChange(path, "metadata")
            if deep:
                self.trees(path)
        elif not self._same(path, before, after):
            self._files(path, before, after)

    def _files(self, path: str, before: os.stat_result, after: os.stat_result) -> None:
        old, new = self._older + path, self._newer + path
        if stat.S_ISREG(before.st_mode):
            differ = before.st_size != after.st_size or not _equal_bytes(old, new, after.st_size)
        elif stat.S_ISLNK(before.st_mode):
            differ = os.readlink(old) != os.readlink(new)
        else:
            differ = before.st_rdev != after.st_rdev
        if differ:
            self.changes[path] = FileChange(path, "modified", _size(after))
        elif self._metadata(path, before, after):
            self.changes[path] = FileChange(path, "metadata", after.st_size)

    def _metadata(self, path: str, before: os.stat_result, after: os.stat_result) -> bool:
        """Mode, owner or extended attributes differ, or the time of a file, by which ``make`` decides."""
        if stat.S_ISREG(before.st_mode) and before.st_mtime_ns != after.st_mtime_ns:
            return True
        if (before.st_mode, before.st_uid, before.st_gid) != (after.st_mode, after.st_uid, after.st_gid):
            return True
        return extended(self._older + path) != extended(self._newer + path)


def _size(about: os.stat_result | None) -> int:
    return about.st_size if about is not None and stat.S_ISREG(about.st_mode) else 0


def _inodes(path: str) -> dict[str, int]:
    try:
        with os.scandir(path) as entries:
            return {entry.name: entry.inode() for entry in entries}
    except (FileNotFoundError, NotADirectoryError):
        return {}


def _lstat(path: str) -> os.stat_result | None:
    try:
        return os.lstat(path)
    except (FileNotFoundError, NotADirectoryError):
        return None


def _equal_bytes(older: str, newer: str, size: int) -> bool:
    """Whether two files of one size hold the same bytes; parts that are holes in both are not read."""
    with _reading(older) as first, _reading(newer) as second:
        for start, end in sorted({*extents(first, size), *extents(second, size)}):
            for place in range(start, end, 1 << 20):
                length = min(end - place, 1 << 20)
                if os.pread(first, length, place) != os.pread(second, length, place):
                    return False
    return True
