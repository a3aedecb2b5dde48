"""Handlers: what a service does to its database, each call one transaction.

    def rename(call: Call, task: int, name: str) -> str:
        call.connection.execute(update(tasks).where(tasks.c.id == task).values(name=name, at=call.now()))
        return name

    service = Transactions(open_database("sqlite:///state.db", "--db"), {"rename": rename})
    service.run("rename", task=1, name="train")

A handler keeps no state: what it does depends on its arguments, on what it reads in its transaction, and on
the clock, random numbers and identifiers that it asks of its `Call`. So a call can be made again, later or in
another order (TROD, arXiv 2212.14161, principles P1 to P3). Whoever calls by ``run`` need not know whether it
is this class or one that records.

A transaction sees one snapshot. In SQLite a writer holds the only write lock from its first statement on; in
Postgres transactions are REPEATABLE READ. One that loses a conflict is made again from its beginning.
"""

from __future__ import annotations

import random
import sqlite3
import time
import uuid
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Protocol, TypeVar

from sqlalchemy import Connection, Engine, event
from sqlalchemy.exc import DBAPIError, SQLAlchemyError

from windtunnel.base.errors import HostError
from windtunnel.store.database import connected, hidden

Handler = Callable[..., Any]
F = TypeVar("F", bound=Handler)
ATTEMPTS = 100
_CONFLICTS = {"40001", "40P01"}  # Postgres: serialization_failure, deadlock_detected
READONLY = "windtunnel_readonly"
"""Of `Connection.info`: its next transaction only reads."""


class DatabaseError(HostError):
    """The database does not do what it is asked: it is full, locked for a minute, or cannot be reached."""


@dataclass
class Call:
    """What a handler may use: its transaction, and all that differs from one call to the next."""

    connection: Connection

    def rows(self, sql: str, parameters: Any = ()) -> list[tuple[Any, ...]]:
        """What a statement gives, in the driver's words (``:name`` of SQLite, ``%(name)s`` of Postgres).
        SQLite is asked directly, in a tenth of the time, unless somebody listens to SQLAlchemy's events.

        Raises:
            SQLAlchemyError: as `Connection.exec_driver_sql` does.
        """
        connection = self.connection
        listeners, engine = connection.dialect.dispatch, connection.engine.dispatch
        if not (connection.dialect.name != "sqlite" or listeners.do_execute
                or engine.before_cursor_execute or engine.after_cursor_execute):  # fmt: skip
            return direct(connection, sql, parameters).fetchall()
        result = connection.exec_driver_sql(sql, parameters)
        return list(map(tuple, result.fetchall())) if result.returns_rows else []

    def now(self) -> float:
        """Seconds since 1970."""
        return time.time()

    def random(self) -> float:
        """At least 0, less than 1."""
        return random.random()

    def uuid(self) -> str:
        return str(uuid.uuid4())


class Runner(Protocol):
    """Whatever runs handlers by name: `Transactions`, or one that also records."""

    def run(self, name: str, /, **arguments: Any) -> Any: ...


def readonly(handler: F) -> F:
    """Mark a handler that only reads: it waits for no writer."""
    handler.readonly = True  # type: ignore[attr-defined]
    return handler


def is_readonly(handler: Handler) -> bool:
    return getattr(handler, "readonly", False)


@dataclass(frozen=True)
class Transactions:
    """Runs handlers, by the names in ``handlers``, on ``engine`` (of `open_database`)."""

    engine: Engine
    handlers: Mapping[str, Handler]

    def run(self, name: str, /, **arguments: Any) -> Any:
        """What the handler returns, once its transaction is committed; nothing is changed where it raises.

        Raises:
            DatabaseError: the transaction could not be made.
        """
        handler = self.handlers[name]
        return transact(self.engine, lambda c: handler(Call(c), **arguments), readonly=is_readonly(handler))


def transact(engine: Engine, body: Callable[[Connection], Any], *, readonly: bool = False) -> Any:
    """What ``body`` returns, in one transaction, which is made again where it lost a conflict.

    Raises:
        DatabaseError: the database failed, or `ATTEMPTS` conflicts were lost.
    """
    try:
        with engine.connect() as connection:
            for attempt in range(ATTEMPTS):
                if readonly:
                    connection.info[READONLY] = True
                try:
                    with connection.begin():
                        return body(connection)
                except DBAPIError as error:
                    if getattr(error.orig, "sqlstate", None) not in _CONFLICTS or attempt == ATTEMPTS - 1:
                        raise
                    time.sleep(random.random() * min(0.1, 0.002 * 2**attempt))
    except SQLAlchemyError as error:
        raise _named(engine, error) from error


def direct(connection: Connection, sql: str, parameters: Any = ()) -> sqlite3.Cursor:
    """A statement at SQLite's own connection; errors are those of SQLAlchemy."""
    raw: Any = connection.connection.dbapi_connection
    try:
        return raw.execute(sql, parameters)  # type: ignore[no-any-return]
    except (sqlite3.Error, OverflowError, UnicodeError) as error:
        raise DBAPIError.instance(sql, parameters, error, sqlite3.Error) from error


def open_database(url: str, option: str, *, durable: bool = True) -> Engine:
    """The engine for ``url``: SQLite in write-ahead mode, or Postgres. ``durable``: what is committed has
    reached the disk (SQLite: synchronous=FULL, else NORMAL: it outlives the process, not the host).

    Raises:
        UserError: ``url``, given by ``option``, is no database, or its driver is missing.
        DatabaseError: it cannot be opened.
    """
    engine = connected(url, option)
    if engine.dialect.name != "sqlite":
        return engine.execution_options(isolation_level="REPEATABLE READ")

    @event.listens_for(engine, "connect")
    def prepare(connection: Any, _: Any) -> None:
        connection.isolation_level = None  # else the driver begins transactions, and only before a write
        connection.execute(f"PRAGMA synchronous={'FULL' if durable else 'NORMAL'}")
        connection.execute("PRAGMA wal_autocheckpoint=4000")  # of small pages: 4 MB, as it is of large ones

    def begin(dbapi_connection: Any) -> None:
        only_reads = dbapi_connection.info.pop(READONLY, False)
        dbapi_connection.dbapi_connection.execute("BEGIN" if only_reads else "BEGIN IMMEDIATE")

    # an event would do, but an engine that listens to one takes half as long again for a small transaction
    engine.dialect.do_begin = begin  # type: ignore[method-assign]
    try:
        with engine.connect() as connection:
            if engine.url.database:  # of a new file: a commit writes whole pages, and most change little
                direct(connection, "PRAGMA page_size=1024")
            direct(connection, "PRAGMA journal_mode=WAL")
    except SQLAlchemyError as error:
        raise _named(engine, error) from error
    return engine


def _named(engine: Engine, error: SQLAlchemyError) -> DatabaseError:
    """The error as one sentence that names the database."""
    cause = str(error.orig).strip().partition("\n")[0] if isinstance(error, DBAPIError) else str(error)
    where = engine.url.database if engine.dialect.name == "sqlite" else hidden(str(engine.url))
    return DatabaseError(f"{where}: the database cannot be used ({cause})")
