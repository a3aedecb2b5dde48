"""Tells stories as a user who is not root: as this one, or where this is root, as nobody."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import sysconfig
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

import windtunnel

NOBODY = 65534
STORIES = Path(__file__).with_name("rootless_stories.py")
SOURCE = Path(windtunnel.__file__).parents[1]

Tell = Callable[..., None]


def _user() -> dict[str, object]:
    """How a process of the other user is started; nothing where this one will do."""
    return {"user": NOBODY, "group": NOBODY, "extra_groups": []} if os.geteuid() == 0 else {}


def _python() -> tuple[list[str], dict[str, str]]:
    """A Python that the user can read, of the version that the packages are for; empty when there is none."""
    if os.geteuid() != 0:
        return [sys.executable], {}
    python = shutil.which(f"python{sys.version_info.major}.{sys.version_info.minor}", path="/usr/bin")
    packages = os.pathsep.join((str(SOURCE), sysconfig.get_paths()["purelib"]))
    return ([python] if python else []), {"PYTHONPATH": packages, "PYTHONDONTWRITEBYTECODE": "1"}


def _run(command: list[str], home: Path, more: dict[str, str]) -> subprocess.CompletedProcess[str]:
    environment = {"PATH": "/usr/bin:/bin:/usr/sbin:/sbin", "HOME": str(home), "LANG": "C.UTF-8", **more}
    return subprocess.run(
        command, env=environment, cwd="/", capture_output=True, text=True, timeout=360, **_user()
    )  # type: ignore[call-overload, no-any-return]


def _missing(home: Path) -> str:
    python, more = _python()
    if not python:
        return "needs a Python in /usr/bin of this version, which another user can read"
    if _run([*python, "-c", "import windtunnel.agents.sandbox.host"], home, more).returncode:
        return "needs packages that another user can read"
    said = _run(
        [*python, "-c", "from windtunnel.agents.sandbox.machine import launch; launch.demand()"],
        home,
        more,
    )
    return f"needs user namespaces: {said.stderr.strip().splitlines()[-1]}" if said.returncode else ""


@pytest.fixture(scope="session")
def reason() -> str:
    """Why no story can be told here; empty when they can."""
    folder = Path(tempfile.mkdtemp(prefix="windtunnel-rootless-"))
    folder.chmod(0o755)
    try:
        return _missing(folder)
    finally:
        shutil.rmtree(folder)


@pytest.fixture
def home(reason: str) -> Iterator[Path]:
    """An empty folder of the user, removed afterwards."""
    if reason:
        pytest.skip(reason)
    folder = Path(tempfile.mkdtemp(prefix="windtunnel-rootless-"))
    if os.geteuid() == 0:
        os.chown(folder, NOBODY, NOBODY)
    yield folder
    shutil.rmtree(folder)


@pytest.fixture
def tell(home: Path, small_root: Path) -> Iterator[Tell]:
    """Tell a story; whatever came of it, all is removed afterwards, and nothing may be left."""
    python, more = _python()
    tidied = False

    def run(story: str, *before: str) -> None:
        nonlocal tidied
        # what stands before it may take from it what tidying needs
        stories = story if before else f"{story},tidy"
        done = _run([*before, *python, str(STORIES), stories, str(home), str(small_root)], home, more)
        assert done.returncode == 0, done.stderr[-3000:] + done.stdout[-1000:]
        tidied = not before

    yield run
    if not tidied:
        run("tidy")  # twice does no harm
