"""A small root with bash, Python and a few tools, and sandboxes on it that are gone after each test."""

from __future__ import annotations

import ctypes
import os
import shutil
import subprocess
import sysconfig
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from windtunnel.agents.sandbox.machine import Machine, leftovers
from windtunnel.agents.sandbox.model import SandboxSpec
from windtunnel.agents.sandbox.place import Home

TOOLS = (
    "bash", "dash", "cat", "chmod", "dd", "env", "head", "id", "ln", "ls", "mkdir", "mkfifo", "mv", "nohup",
    "rm",    "rmdir", "seq", "setsid", "sleep", "touch", "truncate", "true", "wc", "yes",
)  # fmt: skip
PYTHON = "/usr/bin/python3"
_libc = ctypes.CDLL(None, use_errno=True)


def _libraries(program: Path) -> set[str]:
    said = subprocess.run(["ldd", str(program)], capture_output=True, text=True).stdout
    return {word for word in said.split() if word.startswith("/")}


def _copy_tools(root: Path) -> None:
    for name in ("usr/bin", "usr/lib64", "usr/lib", "etc", "tmp", "root", "workspace", "proc", "dev", "var"):
        (root / name).mkdir(parents=True)
    for name in ("bin", "lib", "lib64"):
        (root / name).symlink_to(f"usr/{name}")
    needed: set[str] = set()
    for name in TOOLS:
        found = shutil.which(name, path="/usr/bin:/bin")
        assert found, f"this host has no {name}"
        shutil.copy(os.path.realpath(found), root / "usr/bin" / name)
        needed |= _libraries(Path(found))
    (root / "usr/bin/sh").symlink_to("dash")
    if Path(PYTHON).exists():
        real = Path(os.path.realpath(PYTHON))
        shutil.copy(real, root / "usr/bin/python3")
        needed |= _libraries(real)
        library = Path("/usr/lib") / real.name
        for module in (library / "lib-dynload").glob("*.so"):
            needed |= _libraries(module)
        heavy = ("dist-packages", "site-packages", "test", "idlelib", "config-*", "lib2to3", "pydoc_data")
        shutil.copytree(
            library, root / "usr/lib" / real.name, ignore=shutil.ignore_patterns(*heavy), symlinks=True
        )
    for path in needed:
        target = root / (path[1:] if path.startswith("/usr") else f"usr{path}")
        target.parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(os.path.realpath(path), target)


@pytest.fixture(scope="session")
def base_root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    if os.geteuid() != 0:
        pytest.skip("needs root")
    root = tmp_path_factory.mktemp("base")
    _copy_tools(root)
    assert sysconfig.get_platform().startswith("linux")
    return root


@pytest.fixture
def home(tmp_path: Path) -> Home:
    return Home(tmp_path / "home")


@pytest.fixture
def make_root(base_root: Path, tmp_path: Path) -> Iterator[Callable[[str], Path]]:
    """Roots on an overlay of the base, unmounted after the test."""
    mounted: list[Path] = []

    def make(name: str, layers: Path | None = None) -> Path:
        folder = tmp_path / "roots" / name
        for part in ("upper", "work", "root"):
            (folder / part).mkdir(parents=True, exist_ok=True)
        options = f"lowerdir={layers or base_root},upperdir={folder}/upper,workdir={folder}/work"
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
        Machine.clear(home, name)
    assert leftovers(home, []) == []


@pytest.fixture
def box(start: Callable[..., Machine]) -> Machine:
    return start()
