"""What the tests of pools share: kinds, what they need, and what a tree holds as plain data."""

from __future__ import annotations

import io
import os
import shutil
import tarfile
from collections.abc import Callable
from pathlib import Path

import pytest

from windtunnel.agents.sandbox.files import Pool, btrfs
from windtunnel.agents.sandbox.files.source import look_at

KINDS = ("btrfs", "copy")
Opener = Callable[..., Pool]


def need_root() -> None:
    if os.geteuid() != 0:
        pytest.skip("needs root")


def need_btrfs(folder: Path) -> None:
    need_root()
    missing = btrfs.usable(folder)
    if missing:
        pytest.skip(f"needs btrfs: {missing}")


def state(root: Path) -> dict[str, tuple[object, ...]]:
    """All that a copy of a tree must keep. Names of one file share a mark; times are those of files."""
    entries: dict[str, tuple[object, ...]] = {}
    first: dict[int, str] = {}
    for folder, names, files in os.walk(root):
        for name in sorted([*names, *files]):
            path = os.path.join(folder, name)
            inside = path[len(str(root)) :]
            about = os.lstat(path)
            body: object = None
            if os.path.islink(path):
                body = os.readlink(path)
            elif os.path.isfile(path):
                body = (Path(path).read_bytes(), about.st_mtime_ns)
            if not os.path.isdir(path) or os.path.islink(path):
                first.setdefault(about.st_ino, inside)
            extended = {
                key: os.getxattr(path, key, follow_symlinks=False)
                for key in os.listxattr(path, follow_symlinks=False)
                if key.startswith("user.")
            }
            entries[inside] = (
                about.st_mode, about.st_uid, about.st_gid, about.st_rdev, body, extended,
                first.get(about.st_ino, ""),
            )  # fmt: skip
    return entries


def emptied(folder: Path) -> None:
    for entry in os.scandir(folder):
        if entry.is_dir(follow_symlinks=False):
            shutil.rmtree(entry.path)
        else:
            os.unlink(entry.path)


def tarball(*members: tuple[str, str, bytes | str]) -> bytes:
    """Members as (kind, name, body or target)."""
    out = io.BytesIO()
    with tarfile.open(fileobj=out, mode="w") as tar:
        for kind, name, body in members:
            member = tarfile.TarInfo(name)
            member.uid, member.gid = os.getuid(), os.getgid()
            if kind == "file":
                assert isinstance(body, bytes)
                member.size = len(body)
                tar.addfile(member, io.BytesIO(body))
                continue
            member.type = {
                "folder": tarfile.DIRTYPE, "link": tarfile.SYMTYPE, "hardlink": tarfile.LNKTYPE,
                "fifo": tarfile.FIFOTYPE, "device": tarfile.CHRTYPE, "odd": b"Z",
            }[kind]  # fmt: skip
            member.mode = 0o755
            member.linkname = str(body)
            member.devmajor, member.devminor = 1, 3
            tar.addfile(member)
    return out.getvalue()


def filled(tmp_path: Path, raw: bytes, name: str = "image.tar") -> Path:
    (tmp_path / name).write_bytes(raw)
    target = tmp_path / "target"
    target.mkdir()
    fill(tmp_path / name, target)
    return target


def fill(source: Path, target: Path) -> None:
    look_at(str(source)).fill(target, 0, lambda count: None)
