"""The database of runs: its one table, what goes into the columns, and how it is opened.

SQLite in write-ahead mode serves many processes at once: readers never wait, writers wait for each other (up
to a minute). Every operation opens its own connection, so that a store can be carried across a fork.
"""

from __future__ import annotations

import fcntl
import math
import os
import platform
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import datetime
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import numpy as np
from sqlalchemy import JSON, DateTime, Engine, Text, create_engine, event, make_url
from sqlalchemy.exc import ArgumentError, DBAPIError, NoSuchModuleError, SQLAlchemyError
from sqlalchemy.orm import DeclarativeBase, Mapped, Session, mapped_column
from sqlalchemy.pool import NullPool
from sqlalchemy.schema import CreateIndex, CreateTable

from windtunnel.base.errors import UserError
from windtunnel.base.processes import Identity

Json = dict[str, Any]


class Base(DeclarativeBase):
    type_annotation_map = {Json: JSON(none_as_null=True), datetime: DateTime(timezone=True), str: Text}  # noqa: RUF012


class Row(Base):
    """One run. ``process`` is who executes it: host, boot, process id and when that process started."""

    __tablename__ = "runs"

    id: Mapped[str] = mapped_column(primary_key=True)
    capability: Mapped[str] = mapped_column(index=True)
    created_at: Mapped[datetime] = mapped_column(index=True)
    status: Mapped[str]
    inputs: Mapped[Json]
    seed: Mapped[int]
    versions: Mapped[Json]
    process: Mapped[Json]
    directory: Mapped[str]
    summary: Mapped[Json | None]
    wall_time_s: Mapped[float | None]
    error: Mapped[str | None]


def plain(value: Any) -> Any:
    """The value as JSON can hold it in every database: numbers that are not finite become null, arrays and
    tuples lists, paths and unknown objects text, keys text."""
    if isinstance(value, dict):
        return {str(key): plain(item) for key, item in value.items()}
    if isinstance(value, np.ndarray | np.generic):
        return plain(value.tolist())
    if isinstance(value, list | tuple | set | frozenset | range):
        return [plain(item) for item in value]
    if isinstance(value, float):
        return float(value) if math.isfinite(value) else None
    # Subclasses (enumerations of numbers or text) are reduced to what they are.
    for kind in (bool, int, str):
        if isinstance(value, kind):
            return kind(value)
    return None if value is None else str(value)


def versions() -> Json:
    """Versions of what a result depends on; packages that are not installed are left out."""
    installed: Json = {"python": platform.python_version(), "platform": sys.platform}
    for package in ("windtunnel", "torch", "numpy", "numba"):
        try:
            installed[package] = version(package)
        except PackageNotFoundError:
            continue
    return installed


def this_process() -> Json:
    own = Identity.own()
    return {"host": platform.node(), "boot": own.boot, "pid": own.pid, "started": own.started}


PATIENCE_S = 60.0
_GONE = {"connect_timeout": 5, "tcp_user_timeout": 5000, "keepalives_idle": 2, "keepalives_interval": 1}
"""When a server of Postgres that cannot be reached any more is given up: seconds, of ``tcp_user_timeout``
milliseconds. Source: libpq's connection parameters."""


def open_engine(url: str | None, home: Path) -> Engine:
    """The engine for ``url``, else ``$WINDTUNNEL_STORE``, else ``runs.db`` in ``home``, with the table made.

    Raises `UserError` when the URL is wrong, its driver is missing, or the database cannot be used.
    """
    text = url or os.environ.get("WINDTUNNEL_STORE") or f"sqlite:///{home / 'runs.db'}"
    engine = connected(text, "WINDTUNNEL_STORE", poolclass=NullPool)
    parsed, lite = engine.url, engine.dialect.name == "sqlite"
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


def connected(url: str, option: str, **options: Any) -> Engine:
    """The engine for ``url``; nothing is asked of the database yet. Of Postgres the driver is psycopg.

    Raises `UserError`, which names the ``option``, when the URL is wrong or its driver is missing.
    """
    try:
        parsed = make_url(url)
        if parsed.drivername in ("postgresql", "postgres"):
            parsed = parsed.set(drivername="postgresql+psycopg")
        patience = {"timeout": PATIENCE_S} if parsed.get_backend_name() == "sqlite" else {}
        if parsed.get_driver_name() == "psycopg":
            patience = {name: value for name, value in _GONE.items() if name not in parsed.query}
        return create_engine(parsed, connect_args=patience, **options)
    except (ArgumentError, NoSuchModuleError) as error:
        raise UserError(
            f"{option}: {hidden(url)!r} is not a database that can be used, "
            "give sqlite:///FILE or postgresql+psycopg://USER@HOST/NAME"
        ) from error
    except ModuleNotFoundError as error:
        raise UserError(
            f"{option}: {hidden(url)} needs the package {error.name}, "
            "install it with: pip install 'windtunnel[data]'"
        ) from error


def _every_connection(connection: Any, _: Any) -> None:
    # With write-ahead logging NORMAL is safe against a crash of the process at any moment.
    connection.execute("PRAGMA synchronous=NORMAL")


def _create(session: Session) -> None:
    table = Row.metadata.tables[Row.__tablename__]
    session.execute(CreateTable(table, if_not_exists=True))
    for index in table.indexes:
        session.execute(CreateIndex(index, if_not_exists=True))


def hidden(url: str) -> str:
    """The URL without its password."""
    try:
        return make_url(url).render_as_string(hide_password=True)
    except ArgumentError:
        return url.rpartition("@")[2]


@contextmanager
def transaction(engine: Engine) -> Iterator[Session]:
    """All or nothing; errors of the database become a `UserError`."""
    where = engine.url.database if engine.url.get_backend_name() == "sqlite" else hidden(str(engine.url))
    try:
        with Session(engine, expire_on_commit=False) as session, session.begin():
            yield session
    except SQLAlchemyError as error:
        cause = str(error.orig).strip().partition("\n")[0] if isinstance(error, DBAPIError) else str(error)
        raise UserError(
            f"{where}: the run store cannot be used ({cause}), give another one with WINDTUNNEL_HOME or "
            "WINDTUNNEL_STORE; the files of earlier runs are untouched"
        ) from error
