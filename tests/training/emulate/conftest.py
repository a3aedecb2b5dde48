"""Captures start from a process that has torch imported; those of tests of how workers end, in real ones."""

from __future__ import annotations

import subprocess
import sys
from typing import Any

import pytest

from support import preloaded
from windtunnel.training.emulate.live import session

WORKER = "windtunnel.training.emulate.live.worker"


def popen(command: list[str], **options: Any) -> Any:
    """`subprocess.Popen`, but the worker of a capture is forked from one that has imported what it will."""
    if command[:3] != [sys.executable, "-m", WORKER]:
        return subprocess.Popen(command, **options)
    return preloaded.Process(command[1:], modules=("support.absent_device",), **options)


class _Subprocess:
    """The module as `session` sees it."""

    Popen = staticmethod(popen)

    def __getattr__(self, name: str) -> Any:
        return getattr(subprocess, name)


@pytest.fixture(autouse=True, scope="session")
def quick_captures() -> Any:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(session, "subprocess", _Subprocess())
        yield


@pytest.fixture
def real_worker(monkeypatch: pytest.MonkeyPatch) -> None:
    """The worker as it starts for users: an interpreter of its own."""
    monkeypatch.setattr(session, "subprocess", subprocess)
