"""Cells and inspectors for the tests of this folder; whatever they make is removed."""

from __future__ import annotations

import itertools
import os
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from agents.sandbox.inspect.inspect_cell import Cell, unified
from windtunnel.agents.sandbox.inspect import Inspector, kernel

_NAMES = itertools.count(1)


@pytest.fixture
def cells(tmp_path: Path) -> Iterator[Callable[[], Cell]]:
    if os.geteuid() != 0:
        pytest.skip("needs root")
    if unified() is None:
        pytest.skip("needs cgroup v2")
    opened: list[Cell] = []

    def make() -> Cell:
        number = next(_NAMES)
        opened.append(Cell(f"c{number}", tmp_path / f"c{number}"))
        return opened[-1]

    yield make
    for cell in opened:
        cell.close()


@pytest.fixture
def cell(cells: Callable[[], Cell]) -> Cell:
    return cells()


@pytest.fixture
def inspector() -> Iterator[Inspector]:
    """By eBPF."""
    if reason := kernel.missing():
        pytest.skip(reason)
    ebpf_inspector = Inspector()
    yield ebpf_inspector
    ebpf_inspector.close()
