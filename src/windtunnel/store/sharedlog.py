"""The log of a run in a database: hosts that share no disk read it there, and one leader at a time appends.

Two tables: ``run_leaders`` has the epoch of each run's leader, with what it says of itself, and
``run_events`` the lines. An append names the epoch of who appends and goes in only while that leads: the
leader's row is locked for the time of the insert, so a new leader either sees the line or has made it fail.
A client that stands still in the midst of that, or whose host is gone, loses its transaction after `STANDS`.
Source of the idea: fencing tokens (Kleppmann, Designing Data-Intensive Applications, 2017, chapter 8).
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

from sqlalchemy import (
    Column,
    Connection,
    Integer,
    MetaData,
    String,
    Table,
    Text,
    event,
    func,
    insert,
    literal,
    select,
    update,
)
from sqlalchemy.exc import DBAPIError, IntegrityError, OperationalError, SQLAlchemyError
from sqlalchemy.schema import CreateTable

from windtunnel.base import atomic
from windtunnel.store.database import connected, hidden
from windtunnel.store.eventlog import Fenced, LogFailed

T = TypeVar("T")
PATIENCE = 5.0
"""Seconds for which a database that does not answer is asked again."""
STANDS = 2.0
"""Seconds for which a client may hold a transaction open and say nothing."""
_TABLES = MetaData()
_LEADERS = Table(
    "run_leaders",
    _TABLES,
    Column("run", String, primary_key=True),
    Column("epoch", Integer, nullable=False),
    Column("told", Text, nullable=False),
)
_EVENTS = Table(
    "run_events",
    _TABLES,
    Column("run", String, primary_key=True),
    Column("number", Integer, primary_key=True),
    Column("line", Text, nullable=False),
)


class SharedLog:
    """The log of ``run`` in the database at ``url``.

    Raises:
        UserError: the URL is wrong, or its driver is missing. LogFailed: the database cannot be used; so does
            every method.
    """

    def __init__(self, url: str, run: str) -> None:
        self.run, self.url, self.where = run, url, f"{hidden(url)}, run {run}"
        self._engine = connected(url, "--log")
        if self._engine.dialect.name == "postgresql":
            event.listen(self._engine, "connect", _every_connection)
        self._next: int | None = None
        for table in (_LEADERS, _EVENTS):
            make = CreateTable(table, if_not_exists=True)
            self._do(lambda connection, make=make: connection.execute(make))  # type: ignore[misc]

    def leader(self) -> tuple[int, dict[str, Any]]:
        """The epoch of the leader, 0 where there was none, and what it says of itself."""
        wanted = select(_LEADERS.c.epoch, _LEADERS.c.told).where(_LEADERS.c.run == self.run)
        row = self._do(lambda connection: connection.execute(wanted).one_or_none())
        return (0, {}) if row is None else (row.epoch, json.loads(row.told))

    def swap(self, before: int, epoch: int, told: dict[str, Any]) -> bool:
        """Make ``epoch`` the leader's if it is ``before``; whether it was so."""
        values = {"epoch": epoch, "told": json.dumps(told)}
        if before == 0:
            change: Any = insert(_LEADERS).values(run=self.run, **values)
            change = change.execution_options(preserve_rowcount=True)
        else:
            change = update(_LEADERS).where(_LEADERS.c.run == self.run, _LEADERS.c.epoch == before)
            change = change.values(**values)
        try:
            return bool(self._do(lambda connection: connection.execute(change).rowcount == 1))
        except IntegrityError:
            return False

    def append(self, epoch: int, line: str) -> None:
        """One more line, by the leader of ``epoch``.

        Raises:
            Fenced: another one leads.
        """
        if self._next is None:
            last = select(func.max(_EVENTS.c.number)).where(_EVENTS.c.run == self.run)
            self._next = 1 + (self._do(lambda connection: connection.execute(last).scalar()) or 0)
        number = self._next
        leads = select(literal(self.run), literal(number), literal(line)).where(
            _LEADERS.c.run == self.run, _LEADERS.c.epoch == epoch
        )
        put = insert(_EVENTS).from_select(["run", "number", "line"], leads.with_for_update(read=True))
        put = put.execution_options(preserve_rowcount=True)
        try:
            done = self._do(lambda connection: connection.execute(put).rowcount == 1)
        except IntegrityError:  # ours, of a connection that broke after the commit; or another's
            done = self.lines(number - 1)[:1] == [line]
        if not done:
            raise Fenced(f"{self.where}: epoch {epoch} does not lead this run any more")
        self._next = number + 1

    def lines(self, after: int = 0) -> list[str]:
        """The lines from the one behind number ``after`` on."""
        of = select(_EVENTS.c.line).where(_EVENTS.c.run == self.run, _EVENTS.c.number > after)
        return list(
            self._do(lambda connection: connection.execute(of.order_by(_EVENTS.c.number)).scalars().all())
        )

    def copy(self, path: Path) -> None:
        """Add to the log file at ``path`` the lines that it lacks."""
        file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o644)
        try:
            for line in self.lines(path.read_bytes().count(b"\n")):
                atomic.append_line(file, line.encode() + b"\n")
        finally:
            os.close(file)

    def _do(self, work: Callable[[Connection], T]) -> T:
        """``work`` in a transaction; tried again for a while where the connection breaks."""
        last = time.monotonic() + PATIENCE
        while True:
            try:
                with self._engine.begin() as connection:
                    return work(connection)
            except IntegrityError:
                raise
            except SQLAlchemyError as error:
                lost = isinstance(error, DBAPIError) and error.connection_invalidated
                if not (lost or isinstance(error, OperationalError)) or time.monotonic() > last:
                    cause = error.orig if isinstance(error, DBAPIError) else error
                    told = str(cause).strip().partition("\n")[0]
                    raise LogFailed(f"{self.where}: the log cannot be used ({told})") from error
                time.sleep(0.1)


def _every_connection(connection: Any, _: Any) -> None:
    connection.execute(f"SET idle_in_transaction_session_timeout = {STANDS * 1000:.0f}")
    connection.commit()
