"""A folder, by FUSE, whose disk forgets at a power cut what nobody has synced.

``python -m support.lossy FOLDER MOUNTPOINT`` serves it: ``FOLDER/seen`` is what programs see, ``FOLDER/disk``
what a cut leaves. A file's content comes to the disk by its fsync, a name by the fsync of its folder; closing
a file brings nothing. A name that is removed is gone from the disk at once."""

from __future__ import annotations

import contextlib
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import mfusepy


class Lossy(mfusepy.Operations):  # type: ignore[misc]
    use_ns = True

    def __init__(self, folder: str) -> None:
        self.seen, self.disk = f"{folder}/seen", f"{folder}/disk"
        for place in (self.seen, self.disk):
            os.makedirs(place, exist_ok=True)
        self.named = {path.removeprefix(self.seen) for path in _walk(self.seen)}  # names that are on the disk
        self.synced = set(self.named)

    def getattr(self, path: str, fh: int | None = None) -> dict[str, Any]:
        status = os.lstat(self.seen + path)
        keys = ("st_mode", "st_nlink", "st_size", "st_uid", "st_gid", "st_ino")
        times = {f"st_{letter}time": getattr(status, f"st_{letter}time_ns") for letter in "amc"}
        return {key: getattr(status, key) for key in keys} | times

    def readdir(self, path: str, fh: int) -> list[str]:
        return [".", "..", *os.listdir(self.seen + path)]

    def create(self, path: str, mode: int, fi: Any = None) -> int:
        return os.open(self.seen + path, os.O_RDWR | os.O_CREAT | os.O_EXCL, mode)

    def open(self, path: str, flags: int) -> int:
        return os.open(self.seen + path, os.O_RDWR)

    def read(self, path: str, size: int, offset: int, fh: int) -> bytes:
        return os.pread(fh, size, offset)

    def write(self, path: str, data: bytes, offset: int, fh: int) -> int:
        return os.pwrite(fh, data, offset)

    def truncate(self, path: str, length: int, fh: int | None = None) -> int:
        os.truncate(self.seen + path, length)
        return 0

    def fsync(self, path: str, datasync: int, fh: int) -> int:
        self.synced.add(path)
        self._keep(path)
        return 0

    def fsyncdir(self, path: str, datasync: int, fh: int) -> int:
        for name in os.listdir(self.seen + path):
            place = path.rstrip("/") + "/" + name
            self.named.add(place)
            self._keep(place)
        return 0

    def _keep(self, path: str) -> None:
        """What has a name on the disk and was synced is there; with a name alone it is an empty file."""
        if path in self.named:
            target = self.disk + path
            os.makedirs(os.path.dirname(target), exist_ok=True)
            if os.path.isdir(self.seen + path):
                os.makedirs(target, exist_ok=True)
            elif path in self.synced:
                shutil.copyfile(self.seen + path, f"{target}.new")
                os.replace(f"{target}.new", target)
            elif not os.path.exists(target):
                open(target, "w").close()

    def rename(self, old: str, new: str) -> int:
        os.replace(self.seen + old, self.seen + new)
        self.named.discard(new)  # until the folder is synced, the disk has what it had under both names
        if old in self.synced:
            self.synced.add(new)
        return 0

    def unlink(self, path: str) -> int:
        os.unlink(self.seen + path)
        with contextlib.suppress(FileNotFoundError):
            os.unlink(self.disk + path)
        self.named.discard(path)
        self.synced.discard(path)
        return 0

    def mkdir(self, path: str, mode: int) -> int:
        os.mkdir(self.seen + path, mode)
        return 0

    def rmdir(self, path: str) -> int:
        os.rmdir(self.seen + path)
        return 0

    def chmod(self, path: str, mode: int) -> int:
        os.chmod(self.seen + path, mode)
        return 0

    def release(self, path: str, fh: int) -> int:
        os.close(fh)
        return 0


def _walk(folder: str) -> Iterator[str]:
    for above, folders, files in os.walk(folder):
        yield from (os.path.join(above, name) for name in (*folders, *files))


class Disk:
    """The mount of `Lossy` at ``mountpoint``, served by a process of its own."""

    def __init__(self, folder: Path, mountpoint: Path) -> None:
        self.folder, self.mountpoint = folder, mountpoint
        mountpoint.mkdir(parents=True, exist_ok=True)
        command = [sys.executable, "-m", "support.lossy", str(folder), str(mountpoint)]
        paths = os.pathsep.join(
            filter(None, (str(Path(__file__).parent.parent), os.environ.get("PYTHONPATH")))
        )
        self.process = subprocess.Popen(command, env={**os.environ, "PYTHONPATH": paths})
        end = time.monotonic() + 60
        while not os.path.ismount(mountpoint):
            if self.process.poll() is not None or time.monotonic() > end:
                raise RuntimeError("the lossy folder does not come")
            time.sleep(0.02)

    def cut(self) -> None:
        """The power goes: the mount ends, and what was not synced is forgotten. Whoever used it was
        killed."""
        self.close()
        shutil.rmtree(self.folder / "seen")
        shutil.copytree(self.folder / "disk", self.folder / "seen")

    def close(self) -> None:
        self.process.kill()  # before the kernel can bring what it has of files to us
        self.process.wait()
        subprocess.run(["fusermount3", "-u", "-z", str(self.mountpoint)], check=False)


if __name__ == "__main__":
    mfusepy.FUSE(Lossy(sys.argv[1]), sys.argv[2], foreground=True)
