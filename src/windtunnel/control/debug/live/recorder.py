"""Records a service while it runs: each transaction is in the trace before it commits.

In SQLite a writer counts while it has the write lock, and a snapshot is the number of the last commit. A
reader takes that number; if a writer began to commit before its first statement had its snapshot, that
statement is made once more between two commits. In Postgres the snapshot is ``pg_current_snapshot()``, and a
writer's id ``pg_current_xact_id()``, asked for in the round trip that begins the transaction. Statements are
noted as SQLAlchemy executes them; rows are fetched at once, and the handler gets the same ones from memory.
"""

from __future__ import annotations

import itertools
import os
import random
import re
import sys
import threading
import time
import uuid
from collections.abc import Callable
from dataclasses import dataclass, field
from hashlib import blake2b
from inspect import getsource
from pathlib import Path
from time import monotonic
from typing import Any, TypeVar

from sqlalchemy import Connection, Engine
from sqlalchemy.engine.cursor import FullyBufferedCursorFetchStrategy
from sqlalchemy.engine.interfaces import ExecuteStyle

from windtunnel.base.atomic import write_all
from windtunnel.base.errors import HostError, UserError
from windtunnel.control.debug.live import checkpoint
from windtunnel.control.debug.live.trace import NAME, VERSION, encode
from windtunnel.store.transactions import Call, Handler, Transactions, direct, is_readonly, transact

F = TypeVar("F", bound=Handler)
Settle = Callable[[Any, str, Any], None]
POSTGRES = (b"BEGIN ISOLATION LEVEL REPEATABLE READ; SELECT pg_current_snapshot(), pg_current_xact_id()",
            b"BEGIN ISOLATION LEVEL REPEATABLE READ; SELECT pg_current_snapshot(), 0")  # fmt: skip
"""What a writer asks, and a reader."""
SHORT, LATER = 64, 64
"""Characters that no digest is made of; lines that wait for the next write, at most."""


def request(function: F) -> F:
    """Mark a function of several transactions: it is called with a `Runner` in the place of a `Call`, and
    what it does depends on its arguments and on what its transactions return, and on nothing else."""
    function.request = True  # type: ignore[attr-defined]
    return function


class _Thread(threading.local):
    """What is noted in this thread now, and for which function of several transactions; what is to be done
    after a reader's first statement, and the last commit that its snapshot shows."""

    statements: list[Any] | None = None
    request: int | None = None
    settle: Settle | None = None
    shown: int = 0


class StatementCapture:
    """Notes the statements of ``engine`` in each thread between `begin` and `end`. ``keep``: with columns and
    rows, after the digest."""

    def __init__(self, engine: Engine, *, keep: bool = False) -> None:
        self._keep, self._thread, self._dialect = keep, _Thread(), engine.dialect
        # SQLAlchemy's events of the same names do the same, and cost more than all that is noted here
        self._own = engine.dialect.do_execute, engine.dialect.do_executemany
        engine.dialect.do_execute = self._executing()  # type: ignore[method-assign]
        engine.dialect.do_executemany = self._execute_many  # type: ignore[method-assign]

    def close(self) -> None:
        self._dialect.do_execute, self._dialect.do_executemany = self._own  # type: ignore[method-assign]

    def begin(self, settle: Settle | None = None) -> list[Any]:
        """``settle``: called with the cursor after the first statement."""
        statements: list[Any] = []
        self._thread.statements, self._thread.settle = statements, settle
        return statements

    def end(self) -> None:
        self._thread.statements = None

    def _executing(self) -> Callable[..., None]:
        """A function whose names are its own: it is called for each statement, and a call is what costs."""
        thread, own = self._thread, self._own[0]
        lite = self._dialect.name == "sqlite" and "do_execute" not in vars(self._dialect)  # nobody else's
        many, Buffered, note = ExecuteStyle.INSERTMANYVALUES, FullyBufferedCursorFetchStrategy, self.rows
        settle = self._settle

        def execute(cursor: Any, statement: str, parameters: Any, context: Any = None) -> None:
            if lite:
                cursor.execute(statement, parameters)  # as its dialect does
            else:
                own(cursor, statement, parameters, context)
            if (statements := thread.statements) is None:
                return
            if thread.settle is not None:
                settle(cursor, statement, parameters)
            if (cursor.description is None or statement is not context.statement
                    or context.execute_style is many):  # fmt: skip
                statements.append((statement, parameters, cursor.rowcount, None))  # or SQLAlchemy fetches
                return
            rows = note(cursor, statement, parameters)
            context.cursor_fetch_strategy = Buffered(cursor, initial_buffer=rows)

        return execute

    def _settle(self, cursor: Any, statement: str, parameters: Any) -> None:
        settle, self._thread.settle = self._thread.settle, None
        if settle is not None:
            settle(cursor, statement, parameters)

    def _execute_many(self, cursor: Any, statement: str, parameters: Any, context: Any = None) -> None:
        self._own[1](cursor, statement, parameters, context)
        if (statements := self._thread.statements) is not None:
            statements.append((statement, parameters, cursor.rowcount, None))

    def rows(self, cursor: Any, statement: str, parameters: Any) -> list[tuple[Any, ...]]:
        """Note a statement that was executed: its rows."""
        if self._thread.settle is not None:
            self._settle(cursor, statement, parameters)
        rows: list[tuple[Any, ...]] = cursor.fetchall()
        if (statements := self._thread.statements) is not None:
            read = (len(rows), digest(rows)) if cursor.description else (cursor.rowcount, None)
            columns_and_rows = (
                ([column[0] for column in cursor.description or ()], rows) if self._keep else ()
            )
            statements.append((statement, parameters, *read, *columns_and_rows))
        return rows


def digest(value: object) -> str:
    """Of rows, or of what a handler returned, the same in each process; what is short is its own."""
    text = repr(value)
    if " at 0x" in text:
        text = re.sub(r" at 0x[0-9a-f]+", "", text)
    return text if len(text) <= SHORT else blake2b(text.encode("utf-8", "replace"), digest_size=8).hexdigest()


def code_digest(handler: Handler | None) -> str:
    """Of a function's source; "" where there is none. What it calls is not in it."""
    try:
        return digest(getsource(handler))  # type: ignore[arg-type]
    except (OSError, TypeError):
        return ""


@dataclass
class Drawing(Call):
    """A call that keeps what it gives out in ``draws``."""

    capture: StatementCapture
    draws: list[tuple[str, Any]] = field(default_factory=list)

    def rows(self, sql: str, parameters: Any = ()) -> list[tuple[Any, ...]]:
        if self.connection.dialect.name != "sqlite":
            return super().rows(sql, parameters)
        return self.capture.rows(direct(self.connection, sql, parameters), sql, parameters)

    def now(self) -> float:
        value = time.time()
        self.draws.append(("now", value))
        return value

    def random(self) -> float:
        value = random.random()
        self.draws.append(("random", value))
        return value

    def uuid(self) -> str:
        value = str(uuid.uuid4())
        self.draws.append(("uuid", value))
        return value


class Recorder:
    """A `Runner` that runs the handlers of ``service`` and records them in ``folder``, where no trace is yet.
    One process records, and it alone writes to the database meanwhile.

    ``handlers``: where a replay finds them, ``MODULE:NAME`` or ``FILE.py:NAME`` of a dict. The database is
    copied first. Close it at the end; what is killed leaves a trace of all that had committed.

    Raises:
        UserError: ``folder`` has a trace already. HostError: the trace cannot be written.
    """

    def __init__(self, service: Transactions, folder: Path, *, handlers: str) -> None:
        self.service, self.path = service, folder / NAME
        if self.path.exists():
            raise UserError(f"{self.path}: there is a trace already, give another folder")
        self._sqlite = service.engine.dialect.name == "sqlite"
        self._turn, self._thread = threading.Lock(), _Thread()
        self._numbers, self._later, self._sql = itertools.count(1), list[str](), dict[str, int]()
        self._clock = time.time() - monotonic()  # one that is never put back
        # of SQLite: the last writer that began to commit, the last that has committed, and held meanwhile
        self._committing, self._committed, self._commits = 0, 0, threading.Lock()
        try:
            folder.mkdir(parents=True, exist_ok=True)
            copied = checkpoint.take(service.engine, folder)
            self._file, self._size = os.open(self.path, os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC, 0o644), 0
        except OSError as error:
            raise HostError(f"{folder}: the trace cannot be begun ({error.strerror})") from error
        self._write(encode({
            "kind": "header", "version": VERSION, "engine": service.engine.dialect.name, "checkpoint": copied,
            "handlers": handlers, "path": [entry for entry in sys.path if entry],
            "codes": {name: code_digest(handler) for name, handler in service.handlers.items()},
        }))  # fmt: skip
        self._capture = StatementCapture(service.engine)

    def run(self, name: str, /, **arguments: Any) -> Any:
        """What the handler, or the function of several transactions, returns; recorded.

        Raises:
            DatabaseError, HostError: the transaction could not be made, or not be recorded: it is not made.
            UserError: the arguments cannot be recorded.
        """
        handler, number, began = self.service.handlers[name], next(self._numbers), self._clock + monotonic()
        try:
            common = f'"args":{encode(arguments, strict=True)},"t":{began!r}'
        except (TypeError, ValueError) as error:
            raise UserError(f"{name}: arguments: {error}; accepted are values of JSON, and bytes") from error
        request = self._thread.request
        if getattr(handler, "request", False):
            return handler(self, **arguments) if request else self._request(number, name, common, arguments)
        readonly, state = is_readonly(handler), ("", "")  # the line, and what the handler raised
        settle, committing = self._settle if self._sqlite and readonly else None, 0

        def body(connection: Connection) -> Any:
            nonlocal state, committing
            state, error, result = ("", ""), "", None
            xid, xmax, active = self._snapshot(connection, readonly)
            statements, call = self._capture.begin(settle), Drawing(connection, self._capture)
            try:
                result = handler(call, **arguments)
            except Exception as raised:  # recorded once it is not made again
                error = f"{type(raised).__name__}: {raised}"
                raise
            finally:
                self._capture.end()
                did = [(self._sql.get(sql) or self._text(sql), *rest) for sql, *rest in statements]
                xmax = self._thread.shown + 1 if settle else xmax
                noted = encode((did, call.draws, "" if error else digest(result), error))
                line = (
                    f'{{"kind":"txn","n":{number},"request":{request or number},"handler":"{name}",{common},'
                    f'"ro":{int(readonly)},"id":{xid},"xmax":{xmax},"active":{active},'
                    f'"ended":{self._clock + monotonic()!r},"did":{noted}}}'
                )
                if not error:
                    self._write(line, readonly)
                state = line, error
            if self._sqlite and not readonly:
                self._commits.acquire()
                committing = self._committing = xid
            return result

        try:
            result = transact(self.service.engine, body, readonly=readonly)
        except BaseException:
            if committing:
                self._committing = self._committed
                self._commits.release()
            if state[0]:
                self._write(state[0] if state[1] else f'{{"kind":"end","n":{number},"aborted":true}}')
            raise
        if committing:
            self._committed = committing
            self._commits.release()
        if not readonly:
            self._write(f'{{"kind":"end","n":{number},"t":{self._clock + monotonic()!r}}}', True)
        return result

    def close(self) -> None:
        """The trace is whole; the service may go on without being recorded."""
        self._capture.close()
        self._write('{"kind":"close"}')
        os.close(self._file)

    def __enter__(self) -> Recorder:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _request(self, number: int, name: str, common: str, arguments: dict[str, Any]) -> Any:
        self._write(f'{{"kind":"request","id":{number},"name":"{name}",{common}}}', True)
        self._thread.request = number
        try:
            return self.service.handlers[name](self, **arguments)
        finally:
            self._thread.request = None
            self._write(f'{{"kind":"end","request":{number}}}', True)

    def _snapshot(self, connection: Connection, readonly: bool) -> tuple[int, int, list[int]]:
        """The transaction's id (0 for a reader), the end and the gaps of what it sees."""
        if self._sqlite:
            self._thread.shown = self._committed
            n = 0 if readonly else self._committing + 1
            return n, n, []
        raw: Any = connection.connection.dbapi_connection
        answer = raw.pgconn.exec_(POSTGRES[readonly])  # the driver need not send BEGIN any more
        if answer.ntuples != 1:
            raise HostError(f"{self.path}: no snapshot of Postgres ({answer.error_message.decode().strip()})")
        _, xmax, active = answer.get_value(0, 0).decode().split(":")
        return int(answer.get_value(0, 1)), int(xmax), [int(number) for number in active.split(",") if number]

    def _settle(self, cursor: Any, statement: str, parameters: Any) -> None:
        """A reader's first statement in SQLite took its snapshot: if that may show a commit of just then, or
        not, it is made once more while nobody commits."""
        if self._committing > self._thread.shown:
            cursor.fetchall()
            cursor.connection.execute("ROLLBACK")
            with self._commits:
                cursor.connection.execute("BEGIN")
                cursor.connection.execute("SELECT 1 FROM sqlite_master LIMIT 1").fetchall()
                self._thread.shown = self._committed
            cursor.execute(statement, parameters)

    def _text(self, sql: str) -> int:
        with self._turn:
            if sql not in self._sql:
                self._sql[sql] = len(self._sql) + 1
                self._later.append(encode({"kind": "sql", "id": self._sql[sql], "sql": sql}))
            return self._sql[sql]

    def _write(self, line: str, later: bool = False) -> None:
        """``later``: it may be lost, and is written with the next one that may not, if not before."""
        with self._turn:
            self._later.append(line)
            if later and len(self._later) < LATER:
                return
            data = "\n".join([*self._later, ""]).encode()
            try:
                write_all(self._file, data)
            except OSError as error:
                os.ftruncate(self._file, self._size)
                os.lseek(self._file, self._size, os.SEEK_SET)
                self._later.pop()
                raise HostError(f"{self.path}: {error.strerror}, so nothing is done") from error
            self._size += len(data)
            self._later.clear()
