"""Cells and inspectors for the tests of this folder; whatever they make is removed."""

from __future__ import annotations

import itertools
import os
import shutil
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from inspect_cell import Cell, unified

from windtunnel.agents.sandbox.inspect import Inspector, kernel

_NAMES = itertools.count(1)


@pytest.fixture
def cells(tmp_path: Path) -> Iterator[Callable[[], Cell]]:
    if os.geteuid() != 0:
        pytest.skip("needs root")
    if unified() is None:
        pytest.skip("needs cgroup v2")
    made: list[Cell] = []

    def make() -> Cell:
        number = next(_NAMES)
        made.append(Cell(f"c{number}", tmp_path / f"c{number}"))
        return made[-1]

    yield make
    for cell in made:
        cell.close()


@pytest.fixture
def cell(cells: Callable[[], Cell]) -> Cell:
    return cells()


@pytest.fixture
def btrfs(tmp_path: Path) -> Iterator[Path]:
    """A folder in a fresh btrfs file system in which ``root`` is a subvolume."""
    if os.geteuid() != 0:
        pytest.skip("needs root")
    if shutil.which("mkfs.btrfs") is None:
        pytest.skip("needs btrfs-progs")
    file, folder = tmp_path / "file", tmp_path / "btrfs"
    with file.open("wb") as empty:
        empty.truncate(256 << 20)
    folder.mkdir()
    for command in (["mkfs.btrfs", "-q", str(file)], ["mount", "-o", "loop", str(file), str(folder)]):
        done = subprocess.run(command, capture_output=True, text=True)
        if done.returncode:
            pytest.skip(f"{command[0]}: {done.stderr.strip()}")
    (folder / "live").mkdir()
    subprocess.run(["btrfs", "-q", "subvolume", "create", str(folder / "live" / "root")], check=True)
    yield folder / "live"
    subprocess.run(["umount", str(folder)], check=True)


@pytest.fixture
def btrfs_cell(btrfs: Path) -> Iterator[Cell]:
    if unified() is None:
        pytest.skip("needs cgroup v2")
    cell = Cell(f"c{next(_NAMES)}", btrfs)
    yield cell
    cell.close()


@pytest.fixture
def inspector() -> Iterator[Inspector]:
    """By eBPF."""
    if reason := kernel.missing():
        pytest.skip(reason)
    one = Inspector()
    yield one
    one.close()
