"""From the kernel's names to paths inside a sandbox, and which of its mounts a path lies on."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Literal, NamedTuple

from windtunnel.agents.sandbox.errors import InspectError
from windtunnel.agents.sandbox.place import CHANNEL
from windtunnel.linux.mounts import table
from windtunnel.linux.system import open_inside

Place = Literal["root", "elsewhere", "ignored"]
"""root: in what a snapshot of files holds. elsewhere: kept only by a process image (tmpfs). ignored: no
state."""

_IGNORED = frozenset((
    "proc", "sysfs", "devpts", "devtmpfs", "cgroup", "cgroup2", "debugfs", "tracefs", "securityfs", "bpf",
    "binfmt_misc", "configfs",
))  # fmt: skip
_CHANNEL = b"/" + CHANNEL.encode()


class Mount(NamedTuple):
    device: int
    top: bytes
    """What of its file system is mounted."""
    point: bytes
    kind: str


def mounts(pid: int | str) -> list[Mount]:
    """The mounts that a process sees, at the paths at which it sees them; empty when it is gone."""
    try:
        rows = table(Path(f"/proc/{pid}/mountinfo"))
    except OSError:
        return []
    return [Mount(each.device, os.fsencode(each.root), os.fsencode(each.point), each.kind) for each in rows]


def below(path: bytes, folder: bytes) -> bytes | None:
    """What of ``path`` follows ``folder``: empty for itself, None when it lies elsewhere."""
    if folder == b"/":
        return b"" if path == b"/" else path
    if path.startswith(folder) and path[len(folder) : len(folder) + 1] in (b"", b"/"):
        return path[len(folder) :]
    return None


class Root:
    """The root of one sandbox: a folder of the host, and the mounts that its init has on it."""

    def __init__(self, folder: Path, init: int) -> None:
        self.folder = os.path.realpath(folder).encode()
        self._init = init
        above = [mount for mount in mounts("self") if below(self.folder, mount.point) is not None]
        if not above:
            raise InspectError(f"the mount of {folder} cannot be found")
        # of several mounts at one point the last one is on top
        own = max(reversed(above), key=lambda mount: len(mount.point))
        self.device = own.device
        self._top = (own.top.rstrip(b"/") + (below(self.folder, own.point) or b"")) or b"/"
        self._fd = os.open(self.folder, os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
        self._mounts: list[Mount] = []
        self._cache: dict[tuple[bytes, bytes], bytes] = {}
        self.refresh()

    def refresh(self) -> None:
        """Read the mounts inside again."""
        inside = [mount for mount in mounts(self._init) if mount.point != b"/"]
        self._mounts = sorted(inside, key=lambda mount: -len(mount.top))
        self._points = sorted(inside, key=lambda mount: -len(mount.point))

    def close(self) -> None:
        os.close(self._fd)

    def inside(self, device: int, names: bytes) -> bytes | None:
        """The path inside of what the kernel calls ``names`` on a device; None: on none of its mounts."""
        if device == self.device:
            rest = below(names, self._top)
            if rest is not None:
                return rest or b"/"
        for mount in self._mounts:
            if mount.device == device:
                rest = below(names, mount.top)
                if rest is not None:
                    return mount.point + rest
        return None

    def place(self, path: bytes) -> Place:
        """Which part of the state a path inside belongs to."""
        if self.is_channel(path):
            return "ignored"
        for mount in self._points:
            if below(path, mount.point) is not None:
                return "ignored" if mount.kind in _IGNORED else "elsewhere"
        return "root"

    def is_channel(self, path: bytes) -> bool:
        return below(path, _CHANNEL) is not None

    def forget(self) -> None:
        """Directories may have moved: what was resolved before no longer counts."""
        self._cache.clear()

    def resolved(self, base: bytes, path: bytes) -> bytes:
        """``path`` from the directory ``base``, symbolic links in its directories followed as they are now.
        The last name is not followed."""
        path = path.rstrip(b"/")
        folder, _, name = path.rpartition(b"/")
        if name in (b"", b".", b".."):
            return self.followed(os.path.normpath(base + b"/" + path)) if path else base
        folder = folder.strip(b"/")
        if not folder:
            return base.rstrip(b"/") + b"/" + name
        key = (base, folder)
        real = self._cache.get(key)
        if real is None:
            real = self._cache[key] = self.followed(base + b"/" + folder)
        return real.rstrip(b"/") + b"/" + name

    def followed(self, path: bytes) -> bytes:
        """``path`` inside with every symbolic link followed; the plain path where that leads nowhere."""
        plain: bytes = os.path.normpath(b"/" + path.lstrip(b"/"))
        if self.place(plain) != "root":
            return plain
        try:
            fd = open_inside(self._fd, path, os.O_PATH)
        except OSError:
            return plain
        try:
            rest = below(os.readlink(f"/proc/self/fd/{fd}".encode()), self.folder)
        except OSError:
            rest = None
        finally:
            os.close(fd)
        return plain if rest is None else rest or b"/"

    def lstat(self, path: bytes) -> os.stat_result | None:
        """Of a path inside that ``resolved`` gave; None: nothing is there."""
        return _lstat(self.folder + path)

    def lstat_elsewhere(self, path: bytes) -> os.stat_result | None:
        """Of a path on another mount of the sandbox."""
        return _lstat(self.outside(path))

    def outside(self, path: bytes) -> bytes:
        """The host's path of one on another mount of the sandbox."""
        return b"/proc/%d/root" % self._init + path

    def elsewhere(self) -> set[bytes]:
        """Where the file systems are mounted that only process images keep."""
        points = {mount.point for mount in self._points if mount.kind == "tmpfs"}
        return {point for point in points if self.place(point) == "elsewhere"}

    def seen(self, path: str) -> str:
        """A path that /proc tells of a process of the sandbox, as a path inside."""
        rest = below(os.fsencode(path), self.folder)
        return path if rest is None else os.fsdecode(rest) or "/"


def _lstat(path: bytes) -> os.stat_result | None:
    try:
        return os.lstat(path)
    except OSError:
        return None
