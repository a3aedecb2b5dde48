"""The files as a folder of this computer, by FUSE: for programs that know nothing of windtunnel.

``fsync`` and ``fdatasync`` return when all hosts have the files on their disks; ``close`` does not wait for
it. Owners, modes, links and times other than the last change are not kept. A file that is removed is gone for
who has it open."""

from __future__ import annotations

import contextlib
import errno
import os
import stat
import subprocess
from pathlib import Path
from typing import Any

from windtunnel.base.errors import HostError
from windtunnel.data.files.live.client import FileClient
from windtunnel.data.files.model import FilesError, OperationKind

try:
    import mfusepy
except OSError as error:  # it loads the library when it is imported
    raise HostError(
        "files mount: FUSE's library is not here; on Debian `apt install fuse3` brings it"
    ) from error


class WithErrno:
    """The client's methods, of which every error has a number for the kernel."""

    def __init__(self, files: FileClient) -> None:
        self._files = files

    def __getattr__(self, name: str) -> Any:
        method = getattr(self._files, name)

        def call(*args: Any, **kwargs: Any) -> Any:
            try:
                return method(*args, **kwargs)
            except FilesError as error:
                raise OSError(errno.EIO, str(error)) from error

        return call


class FilesMount(mfusepy.Operations):  # type: ignore[misc]
    """What the kernel asks; each call is one of the client's."""

    use_ns = True

    def __init__(self, files: FileClient) -> None:
        self.files: Any = WithErrno(files)

    def getattr(self, path: str, fh: int | None = None) -> dict[str, Any]:
        node = self.files.stat(path)
        mode = stat.S_IFDIR | 0o755 if node.folder else stat.S_IFREG | 0o644
        time = int(node.modified * 1e9)
        return {
            "st_ino": node.inode, "st_mode": mode, "st_nlink": 1, "st_size": node.size, "st_uid": os.getuid(),
            "st_gid": os.getgid(), "st_mtime": time, "st_ctime": time, "st_atime": time,
            "st_blocks": -(-node.size // 512),
        }  # fmt: skip

    def readdir(self, path: str, fh: int) -> list[str]:
        return [".", "..", *self.files.names(path)]

    def create(self, path: str, mode: int, fi: Any = None) -> int:
        self.files.perform(OperationKind.CREATE, path)
        return 0

    def open(self, path: str, flags: int) -> int:
        self.files.stat(path)
        return 0

    def read(self, path: str, size: int, offset: int, fh: int) -> bytes:
        data: bytes = self.files.read(path, offset, size)
        return data

    def write(self, path: str, data: bytes, offset: int, fh: int) -> int:
        self.files.write(path, offset, data)
        return len(data)

    def truncate(self, path: str, length: int, fh: int | None = None) -> int:
        self.files.perform(OperationKind.TRUNCATE, path, offset=length)
        return 0

    def rename(self, old: str, new: str) -> int:
        self.files.perform(OperationKind.RENAME, old, target=new)
        return 0

    def unlink(self, path: str) -> int:
        self.files.perform(OperationKind.UNLINK, path)
        return 0

    def mkdir(self, path: str, mode: int) -> int:
        self.files.perform(OperationKind.MKDIR, path)
        return 0

    def rmdir(self, path: str) -> int:
        self.files.perform(OperationKind.RMDIR, path)
        return 0

    def fsync(self, path: str, datasync: int, fh: int) -> int:
        self.files.sync()
        return 0

    def fsyncdir(self, path: str, datasync: int, fh: int) -> int:
        self.files.sync()
        return 0

    def utimens(self, path: str, times: Any = None) -> int:
        return 0

    def chmod(self, path: str, mode: int) -> int:
        return 0

    def chown(self, path: str, uid: int, gid: int) -> int:
        return 0


def mount(files: FileClient, folder: Path) -> None:
    """Mount at ``folder`` until it is unmounted. What a killed process left mounted there is taken away.

    Raises:
        HostError: FUSE cannot be used here.
    """
    with contextlib.suppress(OSError):
        folder.mkdir(parents=True, exist_ok=True)
    try:
        os.listdir(folder)
    except OSError as error:
        if error.errno != errno.ENOTCONN:
            raise HostError(f"{folder}: {error.strerror}") from error
        subprocess.run(["fusermount3", "-u", "-z", str(folder)], check=False)
    try:
        mfusepy.FUSE(FilesMount(files), str(folder), foreground=True, fsname="windtunnel")
    except RuntimeError as error:
        raise HostError(f"{folder} cannot be mounted: FUSE returned {error}") from error
