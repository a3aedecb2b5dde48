"""Open the database of runs, and say in one sentence what is wrong with it.

SQLite in write-ahead mode serves many processes at once: readers never wait, writers wait for each other (up
to a minute). Every operation opens its own connection, so that a store can be carried across a fork.
"""

from __future__ import annotations

import fcntl
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from sqlalchemy import Engine, create_engine, event, make_url
from sqlalchemy.exc import ArgumentError, DBAPIError, NoSuchModuleError, SQLAlchemyError
from sqlalchemy.orm import Session
from sqlalchemy.pool import NullPool
from sqlalchemy.schema import CreateIndex, CreateTable

from windtunnel.base.errors import UserError
from windtunnel.store.table import Row

PATIENCE_S = 60.0


def open_engine(url: str | None, home: Path) -> Engine:
    """The engine for ``url``, else ``$WINDTUNNEL_STORE``, else ``runs.db`` in ``home``, with the table made.

    Raises `UserError` when the URL is wrong, its driver is missing, or the database cannot be used.
    """
    text = url or os.environ.get("WINDTUNNEL_STORE") or f"sqlite:///{home / 'runs.db'}"
    try:
        parsed = make_url(text)
        lite = parsed.get_backend_name() == "sqlite"
        patience = {"connect_args": {"timeout": PATIENCE_S}} if lite else {}
        engine = create_engine(parsed, poolclass=NullPool, **patience)
    except (ArgumentError, NoSuchModuleError) as error:
        raise UserError(
            f"WINDTUNNEL_STORE: {_hidden(text)!r} is not a database that can be used, "
            "give sqlite:///FILE or postgresql+psycopg://USER@HOST/NAME"
        ) from error
    except ModuleNotFoundError as error:
        raise UserError(
            f"WINDTUNNEL_STORE: {_hidden(text)} needs the package {error.name}, "
            "install it with: pip install 'windtunnel[data]'"
        ) from error
    file = Path(parsed.database) if lite and parsed.database not in (None, "", ":memory:") else None
    if file is None:
        with transaction(engine) as session:
            _create(session)
        return engine
    event.listen(engine, "connect", _every_connection)
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        with open(f"{file}.lock", "w") as lock:
            # Going over to write-ahead mode fails at once if another process is doing the same.
            fcntl.flock(lock, fcntl.LOCK_EX)
            with transaction(engine) as session:
                session.connection().exec_driver_sql("PRAGMA journal_mode=WAL")
                _create(session)
    except OSError as error:
        raise UserError(
            f"{file.parent}: the run store cannot be kept there ({error.strerror}), "
            "set WINDTUNNEL_HOME to a folder that can be written to"
        ) from error
    return engine


def _every_connection(connection: Any, _: Any) -> None:
    # With write-ahead logging NORMAL is safe against a crash of the process at any moment.
    connection.execute("PRAGMA synchronous=NORMAL")


def _create(session: Session) -> None:
    table = Row.metadata.tables[Row.__tablename__]
    session.execute(CreateTable(table, if_not_exists=True))
    for index in table.indexes:
        session.execute(CreateIndex(index, if_not_exists=True))


def _hidden(url: str) -> str:
    """The URL without its password."""
    try:
        return make_url(url).render_as_string(hide_password=True)
    except ArgumentError:
        return url.rpartition("@")[2]


@contextmanager
def transaction(engine: Engine) -> Iterator[Session]:
    """All or nothing; errors of the database become a `UserError`."""
    where = engine.url.database if engine.url.get_backend_name() == "sqlite" else _hidden(str(engine.url))
    try:
        with Session(engine, expire_on_commit=False) as session, session.begin():
            yield session
    except SQLAlchemyError as error:
        cause = str(error.orig).strip().partition("\n")[0] if isinstance(error, DBAPIError) else str(error)
        raise UserError(
            f"{where}: the run store cannot be used ({cause}), give another one with WINDTUNNEL_HOME or "
            "WINDTUNNEL_STORE; the files of earlier runs are untouched"
        ) from error
