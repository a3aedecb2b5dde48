"""A control plane that is open: its services by name, each of which rings for those who wait for what it did."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from sqlalchemy import Connection, Engine

from windtunnel.base.errors import UserError
from windtunnel.control.database.handlers import HANDLERS
from windtunnel.control.database.live.bell import Listener, ring
from windtunnel.control.database.tables import open_tables
from windtunnel.store.transactions import Runner, Transactions, transact

Wrap = Callable[[Transactions], Runner]
_SCHEDULER = "scheduler"
_RINGS: Mapping[str, Callable[[Any, Any], Iterable[str]]] = {
    **dict.fromkeys(("submit", "finish", "join", "leave", "expire"), lambda arguments, result: [_SCHEDULER]),
    "schedule": lambda arguments, result: {f"worker {name}" for _, name in result.assigned} if result else (),
    "send": lambda arguments, result: {f"receiver {receiver}" for receiver, _ in arguments["messages"]},
}
"""Whom each service wakes, by its arguments and its result."""


@dataclass(frozen=True)
class Control:
    """``run`` takes the name of a handler (see `handlers`) and its arguments."""

    engine: Engine
    runner: Runner

    def run(self, name: str, **arguments: Any) -> Any:
        """What the service returns, once it is committed.

        Raises:
            UserError: an argument cannot be.
            DatabaseError: the database cannot be used.
        """
        result = self.runner.run(name, **arguments)
        if name in _RINGS:
            ring(self.engine, _RINGS[name](arguments, result))
        return result

    def listen(self, kind: str, name: str = "") -> Listener:
        """Hear of what ``kind`` waits for: "scheduler", or the "worker" or "receiver" of that ``name``."""
        return Listener(self.engine, f"{kind} {name}".strip())

    def query(self, statement: str) -> tuple[list[str], list[tuple[Any, ...]]]:
        """The names and rows of a statement that only reads.

        Raises:
            UserError: it is wrong, or wants to write.
        """

        def read(connection: Connection) -> tuple[list[str], list[tuple[Any, ...]]]:
            lite = self.engine.dialect.name == "sqlite"
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

        found: tuple[list[str], list[tuple[Any, ...]]] = transact(self.engine, read, readonly=True)
        return found


def open_control(
    url: str, *, option: str = "url", create: bool = False, durable: bool = True, wrap: Wrap | None = None
) -> Control:
    """The control plane at ``url`` (sqlite:///FILE, postgresql://USER@HOST/NAME), made if ``create`` and there is none.

    ``wrap``: makes the `Runner` that all services go through, such as one that records. ``durable``: what is
    committed outlives the host, not the process alone.

    Raises:
        UserError: there is none, or ``url``, which ``option`` gave, is no database.
        DatabaseError: it cannot be used.
    """
    engine = open_tables(url, option, create=create, durable=durable)
    transactions = Transactions(engine, HANDLERS)
    return Control(engine, wrap(transactions) if wrap else transactions)
