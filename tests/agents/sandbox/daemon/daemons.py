"""Fixtures: real daemon processes in front of the fake host."""

from __future__ import annotations

import os
import shutil
import signal
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import pytest

from agents.sandbox.daemon import fakehost
from support.waiting import gone, until
from windtunnel.agents.sandbox.client import Client, connect
from windtunnel.agents.sandbox.place import LOCK
from windtunnel.linux.processes import command_line


@pytest.fixture
def daemon_home() -> Iterator[Path]:
    """A home; short, since the path of a Unix socket has a limit."""
    folder = Path(tempfile.mkdtemp(prefix="wt-daemon-"))
    yield folder
    shutil.rmtree(folder)


def pid_of(home: Path) -> int:
    """The process that is the daemon of ``home``."""
    return int((home / LOCK).read_text())


@contextmanager
def ended(home: Path) -> Iterator[None]:
    """End the daemons that are started for ``home`` in the background."""
    (home / "starts").touch()
    try:
        yield
    finally:
        for pid in (home / "starts").read_text().split():
            if fakehost.__file__ in command_line(int(pid)):
                with suppress(ProcessLookupError):
                    os.kill(int(pid), signal.SIGTERM)
                until(lambda pid=int(pid): gone(pid))  # type: ignore[misc]


@pytest.fixture(scope="session")
def shared_daemon() -> Iterator[Path]:
    """The home of a daemon that the tests of this process share."""
    folder = Path(tempfile.mkdtemp(prefix="wt-daemon-"))
    with fakehost.daemon(folder):
        yield folder
    shutil.rmtree(folder)


@pytest.fixture
def client(shared_daemon: Path) -> Iterator[Client]:
    """A client of a running daemon; the sandboxes that a test makes are removed after it."""
    with connect(shared_daemon, start=False) as connected:
        yield connected
        for info in connected.boxes():
            connected.remove(info.name)
