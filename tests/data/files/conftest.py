"""Hosts of files on this computer, for a test."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from windtunnel.data.files.live import host as live
from windtunnel.data.files.live.client import FileClient
from windtunnel.data.files.live.host import HostProcesses
from windtunnel.data.files.model import LEAST_RING, FilesHostSpec

SMALL = FilesHostSpec("", "", "", "", least=2, ring=LEAST_RING)
Start = Callable[..., tuple[list[HostProcesses], FileClient]]


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Start]:
    """Start so many hosts; ``options`` of their specification. Returns them and a client."""
    with contextlib.ExitStack() as stack:

        def begin(count: int, **options: Any) -> tuple[list[HostProcesses], FileClient]:
            hosts = stack.enter_context(live.hosts(tmp_path, count, replace(SMALL, **options)))
            files = stack.enter_context(contextlib.closing(live.client(tmp_path, 60.0)))
            live.complete(files, count, 120.0)
            return hosts, files

        yield begin
