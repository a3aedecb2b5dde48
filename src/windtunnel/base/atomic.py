"""Files written so that a crash, a full disk or another writer leaves the old state or the new, never a part.

What is being written has a temporary name beside its final one that ends in `PART`: whoever finds such a file
without its writer may remove it. ``durable`` asks that the data and the name are on the disk when a function
returns; without it a crash of the system may lose the new state, but a crash of the process cannot tear it.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import secrets
from collections.abc import Iterator
from pathlib import Path

PART = ".part"


def temporary(path: Path) -> Path:
    """A name beside ``path`` that no other writer uses."""
    return path.with_name(f"{path.name}.{secrets.token_hex(4)}{PART}")


def write_all(file: int, data: bytes | bytearray | memoryview) -> None:
    """Write every byte; ``os.write`` may stop short, on a disk that is nearly full for one."""
    view = memoryview(data).cast("B")
    while view:
        view = view[os.write(file, view) :]


def sync_folder(folder: Path) -> None:
    """New names in ``folder`` are on the disk."""
    file = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(file)
    finally:
        os.close(file)


def write_new(path: Path, data: bytes | memoryview, *, durable: bool = True, mode: int = 0o666) -> None:
    """Create ``path`` with ``data``. Its folder exists. ``mode`` is less the umask.

    Raises:
        FileExistsError: it is there already, and is left as it is.
        OSError: it cannot be written, and is not there.
    """
    part = temporary(path)
    try:
        _fill(part, data, durable, mode)
        # a link, unlike a rename, never replaces what another process has put there meanwhile
        os.link(part, path)
    finally:
        with contextlib.suppress(OSError):
            os.unlink(part)
    if durable:
        sync_folder(path.parent)


def replace(path: Path, data: bytes | memoryview | str, *, durable: bool = False, mode: int = 0o666) -> None:
    """Make ``data`` (text as UTF-8) the content of ``path``, new or not. Its folder exists.

    Raises:
        OSError: it cannot be written; the old file, if any, is as it was.
    """
    part = temporary(path)
    try:
        _fill(part, data.encode() if isinstance(data, str) else data, durable, mode)
        os.replace(part, path)
    except BaseException:
        with contextlib.suppress(OSError):
            os.unlink(part)
        raise
    if durable:
        sync_folder(path.parent)


@contextlib.contextmanager
def replacing(path: Path) -> Iterator[Path]:
    """A temporary name for whoever writes the file himself (a compiler, a long copy). At the end of the block
    it becomes ``path``; if the block raises, it is removed."""
    part = temporary(path)
    try:
        yield part
        os.replace(part, path)
    except BaseException:
        with contextlib.suppress(OSError):
            os.unlink(part)
        raise


def append_line(file: int, line: bytes, *, durable: bool = False) -> None:
    """Add ``line``, which ends in a newline, to a log that is open for reading and appending.

    Writers take turns by a lock on the file. So a tail without a newline is one whose writer died: it is cut
    off first. A reader may meet such a tail at the end of a log, and nowhere else.

    Raises:
        OSError: it cannot be written whole, and no part of it is left.
    """
    fcntl.flock(file, fcntl.LOCK_EX)
    try:
        end = _end_of_lines(file)
        try:
            write_all(file, line)
        except BaseException:
            with contextlib.suppress(OSError):
                os.ftruncate(file, end)
            raise
        if durable:
            os.fsync(file)
    finally:
        fcntl.flock(file, fcntl.LOCK_UN)


def _fill(part: Path, data: bytes | memoryview, durable: bool, mode: int) -> None:
    file = os.open(part, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, mode)
    try:
        write_all(file, data)
        if durable:
            os.fsync(file)
    finally:
        os.close(file)


def _end_of_lines(file: int) -> int:
    """Bytes of the lines that are finished; what follows them is cut off."""
    size = end = os.fstat(file).st_size
    while end:
        start = max(0, end - 65536) if end < size else end - 1  # almost always the last byte is enough
        newline = os.pread(file, end - start, start).rfind(b"\n")
        if newline >= 0:
            end = start + newline + 1
            break
        end = start
    if end < size:
        os.ftruncate(file, end)
    return end
