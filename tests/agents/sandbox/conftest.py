"""What the tests of real sandboxes share: one host for each test process, and what lets them run at all."""

from __future__ import annotations

import contextlib
import os
import shutil
import tempfile
from collections.abc import Callable, Iterator
from itertools import count
from pathlib import Path
from typing import Any

import pytest

import support.small_image  # noqa: F401 - the image of the hosts of this process
from agents.sandbox import tiny_root
from agents.sandbox.daemon.daemons import client, daemon_home, shared_daemon
from windtunnel.agents.sandbox.files import btrfs

__all__ = ["client", "daemon_home", "shared_daemon"]


def missing() -> str:
    """Why real sandboxes cannot run here, in words; empty when they can."""
    if os.geteuid() != 0:
        return "needs root"
    if not shutil.which("mkfs.btrfs"):
        return "needs btrfs-progs"
    from windtunnel.agents.sandbox.criu.program import find_criu

    return "needs CRIU: windtunnel sandbox setup" if find_criu() is None else ""


@contextlib.contextmanager
def fresh_home() -> Iterator[Path]:
    """A home folder that is removed with all that ran in it; skips where real sandboxes cannot run."""
    reason = missing()
    if reason:
        pytest.skip(reason)
    folder = Path(tempfile.mkdtemp(prefix="windtunnel-test-"))
    yield folder
    emptied(folder)
    shutil.rmtree(folder)


@pytest.fixture(scope="session")
def small_root() -> Iterator[Path]:
    """A root that is much smaller than the image of this machine; everybody can read it."""
    with tempfile.TemporaryDirectory(prefix="windtunnel-root-") as folder:
        os.chmod(folder, 0o755)
        yield tiny_root.make(Path(folder) / "root")


@pytest.fixture(scope="session")
def home() -> Iterator[Path]:
    """A home folder of this test process; whatever a test leaves in it is removed."""
    with fresh_home() as folder:
        yield folder


@pytest.fixture
def new_home() -> Iterator[Path]:
    """A home folder of one test, for what needs one that nobody has used."""
    with fresh_home() as folder:
        yield folder


@pytest.fixture(scope="session")
def spare() -> Iterator[Path]:
    with fresh_home() as folder:
        yield folder


@pytest.fixture
def own_home(spare: Path) -> Iterator[Path]:
    """A home folder for hosts of a test's own; it has the image, and no sandboxes."""
    yield spare
    emptied(spare)


@pytest.fixture(scope="session")
def host(home: Path) -> Iterator[Any]:
    """A host that many tests share."""
    from windtunnel.agents.sandbox.host import SandboxHost

    with SandboxHost(home, pool_size=3 * 2**30) as shared:
        yield shared
        for info in shared.boxes():
            shared.remove(info.name)


# the bytes of a pool are taken from the disk at once
btrfs.DEFAULT_SIZE = 2 << 30

_NUMBERS = count(1)


@pytest.fixture
def make(host: Any, request: pytest.FixtureRequest) -> Iterator[Callable[..., Any]]:
    """Make a sandbox of the shared host; it is removed after the test, and so are its forks."""
    from windtunnel.agents.sandbox.model import SandboxSpec

    before = {info.name for info in host.boxes()}

    def new(**fields: Any) -> Any:
        return host.create(SandboxSpec(**{"name": f"t{next(_NUMBERS)}", **fields}))

    yield new
    for info in host.boxes():
        if info.name not in before:
            host.remove(info.name)


@pytest.fixture
def events(host: Any) -> Iterator[list[Any]]:
    """What the shared host reports during a test."""
    reported: list[Any] = []
    before, host._on_event = host._on_event, reported.append
    yield reported
    host._on_event = before


@pytest.fixture
def misbehaving(host: Any, tmp_path: Path) -> Iterator[Callable[[str], None]]:
    """From the call on, the host's CRIU runs some lines of shell first; it is itself again after the test."""
    from agents.sandbox.hurt import wrapped_criu

    parts, real = host.context, host.context.criu

    def misbehave(lines: str) -> None:
        path = wrapped_criu(tmp_path, real.path, lines)
        object.__setattr__(parts, "criu", type(real)(path, real.version))

    yield misbehave
    object.__setattr__(parts, "criu", real)


def emptied(folder: Path) -> None:
    """Kill the sandboxes of a home, remove them and unmount its pool."""
    from windtunnel.agents.sandbox.host import SandboxHost

    with SandboxHost(folder) as host:
        for info in host.boxes():
            host.remove(info.name)
        host.gc()
