"""Captures start from a process that has torch imported; those of tests of how workers end, in real ones."""

from __future__ import annotations

import subprocess
from collections.abc import Iterator

import pytest

from support import quick
from windtunnel.training.emulate.live import session


@pytest.fixture(autouse=True, scope="session")
def quick_captures() -> Iterator[None]:
    with quick.captures():
        yield


@pytest.fixture
def real_worker(monkeypatch: pytest.MonkeyPatch) -> None:
    """The worker as it starts for users: an interpreter of its own."""
    monkeypatch.setattr(session, "subprocess", subprocess)
