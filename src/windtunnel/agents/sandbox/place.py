"""Where the sandboxes of one host lie: folders, names, and what CRIU has to be told about one of them."""

from __future__ import annotations

import fcntl
import os
import re
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import IO

from windtunnel.base import paths
from windtunnel.base.errors import UserError

CHANNEL = ".windtunnel"
"""Mount point in every sandbox of the folder through which host and sandbox talk."""

UNVERIFIED = ".unverified"
"""How the name of such a note ends (``Home.unverified``)."""
LOCK = "lock"
"""In a home: the file that its process holds locked."""
NAME = re.compile(r"[a-z0-9][a-z0-9._-]{0,47}")
Unclaimed = list[tuple[str, Callable[[], object]]]
"""What a crash has left and nobody refers to: in words, and how it is removed."""


def default_home() -> Path:
    """``$WINDTUNNEL_SANDBOX_HOME``, else /var/lib/windtunnel/sandbox for root, else a folder of the user."""
    path = os.environ.get("WINDTUNNEL_SANDBOX_HOME")
    if path:
        return Path(path).absolute()
    return paths.of_host() / "sandbox"


def checked_name(name: str) -> str:
    """``name``, or UserError: it becomes a folder, a host name and a cgroup."""
    if not NAME.fullmatch(name):
        raise UserError(
            f"sandbox: name {name!r} is not accepted; use a lower-case letter or digit, then up to 47 "
            "letters, digits, '.', '_' or '-'"
        )
    return name


@dataclass(frozen=True)
class Home:
    """The folder of one host's sandboxes. ``tag`` keeps the cgroups of several homes apart."""

    path: Path

    @property
    def tag(self) -> str:
        import hashlib  # with OpenSSL behind it: clients need names and homes alone

        return hashlib.blake2s(str(self.path).encode(), digest_size=4).hexdigest()

    @property
    def pool(self) -> Path:
        return self.path / "pool"

    def channel(self, box: str) -> Path:
        """What a sandbox has at its mount point CHANNEL: beside its root, so that a root that is full does
        not keep host and sandbox from talking."""
        return self.pool / "channels" / box

    @property
    def boxes(self) -> Path:
        return self.path / "boxes"

    @property
    def pages(self) -> Path:
        return self.path / "pages"

    def box(self, name: str) -> Path:
        return self.boxes / name

    def dump(self, checkpoint: str) -> Path:
        """Where a process image lies between CRIU and the page store."""
        return self.path / "dumps" / checkpoint

    def lock(self) -> IO[str]:
        """The lock of this home, held until it is closed; UserError where another process has it."""
        file = (self.path / LOCK).open("a+")
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            file.seek(0)
            holder = file.read().strip() or "another process"
            file.close()
            raise UserError(
                f"sandbox: home {self.path} is held by process {holder}; use its daemon, which "
                "'windtunnel sandbox down' ends, or another home (WINDTUNNEL_SANDBOX_HOME)"
            ) from None
        file.truncate(0)
        file.write(str(os.getpid()))
        file.flush()
        return file

    def clear_dumps(self) -> None:
        """Drop images that a crash left on the way to the page store."""
        shutil.rmtree(self.path / "dumps", ignore_errors=True)

    def unverified(self, box: str) -> Path:
        """A file that is there while processes of a sandbox come back, until they were looked at: should
        their host end before that, they must not run."""
        return self.dump(f"{box}{UNVERIFIED}")


@dataclass(frozen=True)
class Externals:
    """What lies outside the sandbox but belongs to it: CRIU must neither dump nor restore it.

    ``root``: mount point of the root on the host. ``mounts``: (mount point inside, key, path on the host).
    ``netns``: file of the host-owned network namespace. ``freezer``: the sandbox's cgroup v2 folder.
    ``procs``: every ``cgroup.procs`` file that a restore enters before it makes a process.
    """

    root: Path
    mounts: tuple[tuple[str, str, Path], ...]
    netns: Path
    freezer: Path
    procs: tuple[Path, ...]

    def of(self, key: str) -> Path:
        """The host's folder behind the mount ``key``."""
        return next(path for _, name, path in self.mounts if name == key)
