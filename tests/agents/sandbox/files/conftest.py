"""Pools of every kind in a folder of their own, and what a tree holds as plain data."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Literal

import pytest

from agents.sandbox.files.pool_support import KINDS, Opener, need_btrfs
from windtunnel.agents.sandbox.files import Pool, open_pool
from windtunnel.linux import mounts


@pytest.fixture
def opened(tmp_path: Path) -> Iterator[Opener]:
    """Opens the pool of a kind in ``tmp_path``, and leaves nothing mounted."""
    pools: list[Pool] = []

    def open_kind(kind: Literal["btrfs", "copy"], name: str = "pool", size: int = 256 << 20) -> Pool:
        folder = tmp_path / name
        if kind == "btrfs":
            need_btrfs(folder)
        pools.append(Pool(folder) if kind == "copy" else open_pool(folder, size=size))
        return pools[-1]

    yield open_kind
    for pool in pools:
        pool.close(unmount=True)
    assert not [each for each in mounts.table() if each.point.startswith(str(tmp_path))]


@pytest.fixture(params=KINDS)
def pool(request: pytest.FixtureRequest, opened: Opener) -> Pool:
    return opened(request.param)


@pytest.fixture
def image(tmp_path: Path) -> Path:
    """A small root with one of each kind of thing that this user can make."""
    root = tmp_path / "image"
    for folder in ("etc", "usr/bin", "workspace/inner", "tmp"):
        (root / folder).mkdir(parents=True)
    (root / "tmp").chmod(0o1777)
    (root / "etc/hosts").write_text("127.0.0.1 localhost\n")
    (root / "usr/bin/tool").write_bytes(b"#!/bin/sh\n")
    (root / "usr/bin/tool").chmod(0o4755)
    (root / "bin").symlink_to("usr/bin")
    (root / "workspace/one").write_bytes(b"1" * 5000)
    os.link(root / "workspace/one", root / "workspace/two")
    (root / "workspace/inner/deep").write_text("deep")
    os.mkfifo(root / "workspace/pipe")
    return root
