"""A control plane that is open: its services by name, each of which rings for those who wait for what it
did."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from sqlalchemy import Connection, Engine

from windtunnel.base.errors import UserError
from windtunnel.control.database.handlers import HANDLERS
from windtunnel.control.database.live.bell import BellListener, ring
from windtunnel.control.database.tables import open_tables
from windtunnel.store.transactions import Runner, Transactions, transact

Wrap = Callable[[Transactions], Runner]
Table = tuple[list[str], list[tuple[Any, ...]]]
_RINGS: Mapping[str, Callable[[Any, Any], Iterable[str]]] = {
    **dict.fromkeys(("submit", "finish", "join", "renew"), lambda arguments, result: ["scheduler"]),
    "schedule": lambda arguments, result: {f"worker {name}" for _, name in result.assigned} if result else (),
    "send": lambda arguments, result: {f"receiver {name}" for name, _ in arguments["messages"]},
}
"""Whom a service wakes, by its arguments and its result."""


@dataclass(frozen=True)
class Control:
    engine: Engine
    runner: Runner

    def run(self, name: str, **arguments: Any) -> Any:
        """What the handler of that name (`HANDLERS`) returns, once it is committed.

        Raises:
            UserError, PolicyError: as the handler does.
            DatabaseError: the database cannot be used.
        """
        result = self.runner.run(name, **arguments)
        if name in _RINGS and (channels := _RINGS[name](arguments, result)):
            ring(self.engine, channels)
        return result

    def listen(self, kind: str, name: str = "") -> BellListener:
        """Hear of what is for the "scheduler", or the "worker" or "receiver" of that ``name``."""
        return BellListener(self.engine, f"{kind} {name}".strip())

    def query(self, statement: str) -> Table:
        """The names and rows of a statement that only reads.

        Raises:
            UserError: it is wrong, or wants to write.
        """
        lite = self.engine.dialect.name == "sqlite"

        def read(connection: Connection) -> Table:
            cursor: Any = connection.connection.cursor()
            cursor.execute("PRAGMA query_only=1" if lite else "SET TRANSACTION READ ONLY")
            try:
                # prepared: the server of Postgres then takes one statement alone
                cursor.execute(statement, **({} if lite else {"prepare": True}))
                names = [column[0] for column in cursor.description or ()]
                return names, [tuple(row) for row in cursor.fetchall()] if names else []
            except Exception as error:
                raise UserError(f"sql: {statement!r} cannot be read: {str(error).splitlines()[0]}") from error
            finally:
                if lite:
                    cursor.execute("PRAGMA query_only=0")

        table: Table = transact(self.engine, read, readonly=True)
        return table


def open_control(
    url: str, *, option: str = "url", create: bool = False, durable: bool = True, wrap: Wrap | None = None
) -> Control:
    """The control plane at ``url`` (sqlite:///FILE, postgresql://USER@HOST/NAME), made if ``create`` and
    missing. ``wrap``: makes the `Runner` of all services, such as one that records. ``durable``: what is
    committed outlives the host, not the process alone.

    Raises:
        UserError: there is none, or ``url``, which ``option`` gave, is no database.
        DatabaseError: it cannot be used.
    """
    engine = open_tables(url, option, create=create, durable=durable)
    transactions = Transactions(engine, HANDLERS)
    return Control(engine, wrap(transactions) if wrap else transactions)
