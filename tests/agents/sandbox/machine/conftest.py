"""A small root with bash, Python and a few tools, and sandboxes on it that are gone after each test."""

from __future__ import annotations

import ctypes
import os
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from windtunnel.agents.sandbox.machine import Machine, launch
from windtunnel.agents.sandbox.machine.launch import unclaimed
from windtunnel.agents.sandbox.model import SandboxSpec
from windtunnel.agents.sandbox.place import Home

_libc = ctypes.CDLL(None, use_errno=True)


@pytest.fixture
def home(tmp_path: Path) -> Home:
    return Home(tmp_path / "home")


@pytest.fixture
def make_root(small_root: Path, tmp_path: Path) -> Iterator[Callable[[str], Path]]:
    """Roots on an overlay of the small one, unmounted after the test."""
    if os.geteuid() != 0:
        pytest.skip("needs root")
    mounted: list[Path] = []

    def make(name: str, layers: Path | None = None) -> Path:
        folder = tmp_path / "roots" / name
        for part in ("upper", "work", "root"):
            (folder / part).mkdir(parents=True, exist_ok=True)
        options = f"lowerdir={layers or small_root},upperdir={folder}/upper,workdir={folder}/work"
        done = _libc.mount(b"overlay", os.fsencode(folder / "root"), b"overlay", 4, options.encode())  # nodev
        if done != 0:
            pytest.skip(f"needs overlayfs: {os.strerror(ctypes.get_errno())}")
        mounted.append(folder / "root")
        return folder / "root"

    yield make
    for root in mounted:
        _libc.umount2(os.fsencode(root), 2)


@pytest.fixture
def start(home: Home, make_root: Callable[[str], Path]) -> Iterator[Callable[..., Machine]]:
    """Starts sandboxes that are stopped after the test, whatever happened; nothing of them may be left."""
    names: list[str] = []
    machines: list[Machine] = []

    def begin(name: str = "box", root: Path | None = None, **spec: object) -> Machine:
        names.append(name)
        machine = Machine.start(home, SandboxSpec(name, **spec), root or make_root(name))  # type: ignore[arg-type]
        machines.append(machine)
        return machine

    yield begin
    for machine in machines:
        machine.close()
    for name in names:
        launch.clear(home, name)
    assert unclaimed(home, set()) == []


@pytest.fixture
def box(start: Callable[..., Machine]) -> Machine:
    return start()
