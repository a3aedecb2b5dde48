"""What a handler does: its statements, by events of SQLAlchemy, and what it asks of its `Call`.

Rows are fetched as soon as a statement was executed, so that their digest does not depend on how the handler
reads them; it gets the same rows from memory.
"""

from __future__ import annotations

import inspect
import random
import re
import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import cache
from hashlib import blake2b
from typing import Any, TypeVar
from uuid import UUID

from sqlalchemy import Connection, Engine, event
from sqlalchemy.engine.cursor import FullyBufferedCursorFetchStrategy

from windtunnel.store.transactions import Call, Handler

F = TypeVar("F", bound=Handler)
_ADDRESS = re.compile(r" at 0x[0-9a-f]+")


def request(function: F) -> F:
    """Mark a function of several transactions: it is called with a `Runner` in the place of a `Call`, and
    what it does depends on its arguments and on what its transactions return."""
    function.request = True  # type: ignore[attr-defined]
    return function


def is_request(handler: Handler) -> bool:
    return getattr(handler, "request", False)


class Capture:
    """Notes the statements of ``engine`` in each thread between `begin` and `end`. ``keep``: with columns and
    rows, after the digest."""

    def __init__(self, engine: Engine, *, keep: bool = False) -> None:
        self._engine, self._keep = engine, keep
        self._thread = threading.local()
        event.listen(engine, "after_cursor_execute", self._executed)

    def begin(self) -> list[Any]:
        self._thread.statements = statements = list[Any]()
        return statements

    def end(self) -> None:
        self._thread.statements = None

    def close(self) -> None:
        event.remove(self._engine, "after_cursor_execute", self._executed)

    def _executed(
        self, connection: Connection, cursor: Any, sql: str, parameters: Any, context: Any, many: bool
    ) -> None:
        statements = getattr(self._thread, "statements", None)
        if statements is None:
            return
        if cursor.description is None:
            statements.append((sql, parameters, cursor.rowcount, None))
            return
        rows = cursor.fetchall()
        context.cursor_fetch_strategy = FullyBufferedCursorFetchStrategy(cursor, initial_buffer=rows)
        kept = ([column[0] for column in cursor.description], rows) if self._keep else ()
        statements.append((sql, parameters, len(rows), digest(rows), *kept))


def digest(value: object) -> str:
    """Of rows, or of what a handler returned; the same in each process."""
    text = repr(value)
    if " at 0x" in text:
        text = _ADDRESS.sub("", text)
    return blake2b(text.encode("utf-8", "surrogatepass"), digest_size=8).hexdigest()


@cache
def code_digest(handler: Handler) -> str:
    """Of a function's source, or of its code where there is none. What it calls is not in it."""
    try:
        text = inspect.getsource(handler)
    except (OSError, TypeError):
        text = repr((handler.__code__.co_code, handler.__code__.co_names, handler.__code__.co_consts))
    return digest(text)


@dataclass
class Drawing(Call):
    """A call whose clock, random numbers and identifiers are kept in ``draws``."""

    draws: list[list[Any]] = field(default_factory=list)

    def now(self) -> float:
        return self._kept("now", super().now())

    def random(self) -> float:
        return self._kept("random", super().random())

    def uuid(self) -> str:
        return self._kept("uuid", super().uuid())

    def _kept(self, kind: str, value: Any) -> Any:
        self.draws.append([kind, value])
        return value


@dataclass
class Redrawing(Call):
    """A call that gives out recorded draws, those of each kind in their order. Where there are no more, the
    time is that of the transaction, and the rest comes from its number. ``drawn``: how many of each kind."""

    draws: list[list[Any]] = field(default_factory=list)
    n: int = 0
    t: float = 0.0
    drawn: dict[str, int] = field(default_factory=dict)

    def now(self) -> float:
        return float(self._next("now", lambda _: self.t))

    def random(self) -> float:
        return float(self._next("random", lambda more: more.random()))

    def uuid(self) -> str:
        return str(self._next("uuid", lambda more: UUID(int=more.getrandbits(128), version=4)))

    def _next(self, kind: str, otherwise: Callable[[random.Random], Any]) -> Any:
        recorded = [value for name, value in self.draws if name == kind]
        place = self.drawn[kind] = self.drawn.get(kind, 0) + 1
        return recorded[place - 1] if place <= len(recorded) else otherwise(random.Random(f"{self.n} {place}"))


def tables_used(statements: list[Any], tables: Mapping[str, re.Pattern[str]]) -> tuple[set[str], set[str]]:
    """The names among ``tables`` (of `table_patterns`) that statements read or write, by the words of their
    SQL: rather one too many."""
    reads, writes = set[str](), set[str]()
    for sql, *_ in statements:
        for name, pattern in tables.items():
            for found in pattern.finditer(sql):
                (writes if found[1] else reads).add(name)
    return reads, writes


def table_patterns(names: list[str]) -> dict[str, re.Pattern[str]]:
    """By the name of a table what finds it in SQL; group 1 where it is written to."""
    verbs = r"(insert\s+(?:or\s+\w+\s+)?into\s+|replace\s+into\s+|update\s+|delete\s+from\s+)?"
    return {
        name: re.compile(verbs + r'(?<![\w.])"?' + re.escape(name) + r'\b"?', re.IGNORECASE) for name in names
    }
