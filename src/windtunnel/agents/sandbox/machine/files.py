"""Files in and out of a sandbox while it runs, without trusting anything that lies in it."""

from __future__ import annotations

import contextlib
import os
import secrets
import shutil
import stat
from collections.abc import Iterator
from pathlib import PurePosixPath
from typing import IO, Literal

from windtunnel.agents.sandbox.machine.channel import open_beneath
from windtunnel.agents.sandbox.model import Entry
from windtunnel.base.atomic import write_all
from windtunnel.base.errors import UserError
from windtunnel.linux.system import IN_ROOT, NO_XDEV, open_inside

MOST = 2**30
"""Bytes that ``get`` returns at most; larger files go to a file by ``get_to``."""
Kind = Literal["file", "folder", "link", "other"]


def put(root: int, path: str, data: bytes | IO[bytes], mode: int) -> None:
    """Write a file in one step; missing folders above it are made. UserError names what is in the way."""
    folder_path, name = _split(path)
    with _told(path):
        folder = make_folders(root, folder_path)
        try:
            with contextlib.suppress(FileNotFoundError):
                if stat.S_ISDIR(os.stat(name, dir_fd=folder, follow_symlinks=False).st_mode):
                    raise UserError(f"sandbox path {path!r} is a folder; give the name of a file")
            part = f".windtunnel.{secrets.token_hex(8)}"
            file = open_inside(folder, part, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW, 0o600)
            try:
                with os.fdopen(file, "wb", closefd=True) as out:
                    if isinstance(data, bytes):
                        write_all(out.fileno(), data)
                    else:
                        shutil.copyfileobj(data, out, 1 << 20)
                    out.flush()
                    os.fchmod(out.fileno(), mode)
                os.rename(part, name, src_dir_fd=folder, dst_dir_fd=folder)
            except BaseException:
                with contextlib.suppress(OSError):
                    os.unlink(part, dir_fd=folder)
                raise
        finally:
            os.close(folder)


def get_to(root: int, path: str, out: IO[bytes], limit: int | None = None) -> int:
    """Copy a file's bytes to ``out``; returns how many. Links are followed inside the sandbox."""
    _split(path)
    with (
        _told(path),
        open_beneath(root, path, os.O_RDONLY | os.O_NONBLOCK, resolve=IN_ROOT | NO_XDEV) as file,
    ):
        status = os.fstat(file)
        if not stat.S_ISREG(status.st_mode):
            raise UserError(f"sandbox path {path!r} is no regular file")
        if limit is not None and status.st_size > limit:
            raise UserError(
                f"sandbox file {path!r} has {status.st_size} bytes, more than {limit}; "
                "copy it to a file instead"
            )
        copied = 0
        # a file that grows while it is read ends where it ended when it was opened
        while copied < status.st_size:
            piece = os.read(file, min(1 << 20, status.st_size - copied))
            if not piece:
                break
            out.write(piece)
            copied += len(piece)
        return copied


def listdir(root: int, path: str) -> list[Entry]:
    """What a folder holds, by name."""
    flags = os.O_RDONLY | os.O_DIRECTORY | os.O_NONBLOCK
    with _told(path), open_beneath(root, path, flags, resolve=IN_ROOT | NO_XDEV) as folder:
        entries = []
        for name in sorted(os.listdir(folder)):
            with contextlib.suppress(FileNotFoundError):
                status = os.stat(name, dir_fd=folder, follow_symlinks=False)
                target = os.readlink(name, dir_fd=folder) if stat.S_ISLNK(status.st_mode) else ""
                entries.append(_entry(name, status, target))
        return entries


def _entry(name: str, status: os.stat_result, target: str) -> Entry:
    kinds: dict[int, Kind] = {stat.S_IFREG: "file", stat.S_IFDIR: "folder", stat.S_IFLNK: "link"}
    kind = kinds.get(stat.S_IFMT(status.st_mode), "other")
    return Entry(name, kind, status.st_size, stat.S_IMODE(status.st_mode), status.st_mtime, target)


def _split(path: str) -> tuple[str, str]:
    pure = PurePosixPath(path)
    if not pure.is_absolute() or "\0" in path or pure.name in ("", "..") or path.endswith("/"):
        raise UserError(f"sandbox path {path!r} is not accepted; give an absolute path of a file")
    return str(pure.parent), pure.name


def make_folders(root: int, path: str) -> int:
    """The folder, open; every component that is absent is made inside the root."""
    at = open_inside(root, "/", os.O_RDONLY | os.O_DIRECTORY)
    done = "/"
    for part in PurePosixPath(path).parts[1:]:
        done = os.path.join(done, part)
        try:
            with contextlib.suppress(FileExistsError):
                os.mkdir(part, 0o755, dir_fd=at)
            following = open_inside(root, done, os.O_RDONLY | os.O_DIRECTORY, resolve=IN_ROOT | NO_XDEV)
        finally:
            os.close(at)
        at = following
    return at


@contextlib.contextmanager
def _told(path: str) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise UserError(f"sandbox path {path!r}: {error.strerror}") from error
