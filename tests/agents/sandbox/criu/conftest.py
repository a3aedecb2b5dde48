from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest
from tiny_box import TinyBox, cgroup2

from windtunnel.agents.sandbox.criu import Criu
from windtunnel.agents.sandbox.criu.program import find_criu


@pytest.fixture
def criu() -> Criu:
    if os.geteuid() != 0:
        pytest.skip("needs root")
    found = find_criu()
    if found is None or found.version < (4, 2):
        pytest.skip("needs CRIU 4.2 or newer: windtunnel sandbox setup")
    return found


@pytest.fixture
def box(tmp_path: Path, criu: Criu) -> Iterator[TinyBox]:
    if cgroup2() is None:
        pytest.skip("needs a mounted cgroup2")
    made = TinyBox(tmp_path / "box")
    try:
        yield made
    finally:
        made.close()
