"""Records a service while it runs: each transaction is in the trace before it commits.

The number of a commit is drawn inside the transaction. In SQLite a writer raises the only row of a table, and
a reader reads it: that row is the snapshot. In Postgres the snapshot is ``pg_current_snapshot()``, and a
writer's id ``pg_current_xact_id()``, asked for in the round trip that begins the transaction. Statements are
noted by events of SQLAlchemy. Rows are fetched as soon as one was executed, so that their digest does not
depend on how the handler reads them; it gets the same rows from memory.
"""

from __future__ import annotations

import inspect
import itertools
import os
import re
import sys
import threading
import time
from dataclasses import dataclass, field
from hashlib import blake2b
from pathlib import Path
from typing import Any, TypeVar

from sqlalchemy import Connection, Engine, event
from sqlalchemy.engine.cursor import FullyBufferedCursorFetchStrategy

from windtunnel.base.atomic import write_all
from windtunnel.base.errors import HostError, UserError
from windtunnel.control.debug.live import checkpoint
from windtunnel.control.debug.live.trace import NAME, VERSION, encode, strictly
from windtunnel.store.transactions import Call, Handler, Transactions, is_readonly, transact

F = TypeVar("F", bound=Handler)
SQLITE = ("UPDATE windtunnel_seq SET n = n + 1 RETURNING n", "SELECT n FROM windtunnel_seq")
POSTGRES = ("SELECT pg_current_snapshot()::text, pg_current_xact_id()::text",
            "SELECT pg_current_snapshot()::text, '0'")  # fmt: skip
"""What a writer asks, and a reader."""


def request(function: F) -> F:
    """Mark a function of several transactions: it is called with a `Runner` in the place of a `Call`, and
    what it does depends on its arguments and on what its transactions return, and on nothing else."""
    function.request = True  # type: ignore[attr-defined]
    return function


class Capture:
    """Notes the statements of ``engine`` in each thread between `begin` and `end`. ``keep``: with columns and
    rows, after the digest."""

    def __init__(self, engine: Engine, *, keep: bool = False) -> None:
        self._engine, self._keep, self._thread = engine, keep, threading.local()
        event.listen(engine, "after_cursor_execute", self._executed)

    def begin(self) -> list[Any]:
        self._thread.statements = statements = list[Any]()
        return statements

    def end(self) -> None:
        self._thread.statements = None

    def close(self) -> None:
        event.remove(self._engine, "after_cursor_execute", self._executed)

    def _executed(self, _: Any, cursor: Any, sql: str, parameters: Any, context: Any, many: bool) -> None:
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
        text = re.sub(r" at 0x[0-9a-f]+", "", text)
    return blake2b(text.encode("utf-8", "surrogatepass"), digest_size=8).hexdigest()


def code_digest(handler: Handler) -> str:
    """Of a function's source. What it calls is not in it."""
    try:
        return digest(inspect.getsource(handler))
    except (OSError, TypeError):
        return ""


@dataclass
class Drawing(Call):
    """A call that keeps what it gives out in ``draws``."""

    draws: list[list[Any]] = field(default_factory=list)

    def now(self) -> float:
        return self.drawn("now", super().now())

    def random(self) -> float:
        return self.drawn("random", super().random())

    def uuid(self) -> str:
        return self.drawn("uuid", super().uuid())

    def drawn(self, kind: str, value: Any) -> Any:
        self.draws.append([kind, value])
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
        self._turn, self._thread = threading.Lock(), threading.local()
        self._numbers, self._later, self._sql = itertools.count(1), list[str](), dict[str, int]()
        self._clock = time.time() - time.monotonic()  # one that is never put back
        if self._sqlite:
            transact(service.engine, _prepare)
        try:
            folder.mkdir(parents=True, exist_ok=True)
            copied = checkpoint.take(service.engine, folder)
            self._file, self._size = os.open(self.path, os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC, 0o644), 0
        except OSError as error:
            raise HostError(f"{folder}: the trace cannot be begun ({error.strerror})") from error
        self._write(encode({
            "kind": "header", "version": VERSION, "engine": service.engine.dialect.name, "checkpoint": copied,
            "handlers": handlers, "path": [one for one in sys.path if one],
            "codes": {name: code_digest(one) for name, one in service.handlers.items()},
        }))  # fmt: skip
        self._capture = Capture(service.engine)

    def run(self, name: str, /, **arguments: Any) -> Any:
        """What the handler, or the function of several transactions, returns; recorded.

        Raises:
            DatabaseError, HostError: the transaction could not be made, or not be recorded: it is not made.
            UserError: the arguments cannot be recorded.
        """
        handler, began = self.service.handlers[name], self._clock + time.monotonic()
        try:
            known = strictly(arguments)
        except (TypeError, ValueError) as error:
            raise UserError(f"{name}: arguments: {error}; accepted are values of JSON, and bytes") from error
        if getattr(handler, "request", False):
            return self._request(name, handler, arguments, f'"args":{known},"t":{began!r}')
        number, readonly = next(self._numbers), is_readonly(handler)
        head = (
            f'{{"kind":"txn","n":{number},"request":{getattr(self._thread, "request", None) or number},'
            f'"handler":"{name}","args":{known},"t":{began!r},"ro":{"true" if readonly else "false"},'
        )
        failed, written = "", False

        def body(connection: Connection) -> Any:
            nonlocal failed, written
            failed, written = "", False
            snapshot = self._snapshot(connection, readonly)
            statements, call = self._capture.begin(), Drawing(connection)
            try:
                result = handler(call, **arguments)
            except Exception as error:  # recorded once it is not made again
                failed = head + self._tail(snapshot, statements, call, "", f"{type(error).__name__}: {error}")
                raise
            finally:
                self._capture.end()
            self._write(head + self._tail(snapshot, statements, call, digest(result), ""))
            written = True
            return result

        aborted = ""
        try:
            return transact(self.service.engine, body, readonly=readonly)
        except BaseException:
            if failed:
                self._write(failed)
            aborted = ',"aborted":true' if written else ""
            raise
        finally:
            if failed or written:
                self._put_off(f'"end","n":{number}{aborted},"t":{self._clock + time.monotonic()!r}')

    def close(self) -> None:
        """The trace is whole; the service may go on without being recorded."""
        self._capture.close()
        self._write('{"kind":"close"}')
        os.close(self._file)

    def __enter__(self) -> Recorder:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _request(self, name: str, function: Handler, arguments: dict[str, Any], line: str) -> Any:
        if getattr(self._thread, "request", None):
            return function(self, **arguments)  # of another one: what it does is that one's
        number = self._thread.request = next(self._numbers)
        self._put_off(f'"request","id":{number},"name":"{name}",{line}')
        try:
            return function(self, **arguments)
        finally:
            self._thread.request = None
            self._put_off(f'"end","request":{number}')

    def _snapshot(self, connection: Connection, readonly: bool) -> str:
        """In JSON: its id (0 for a reader), the end and the gaps of what it sees."""
        raw: Any = connection.connection.dbapi_connection
        if self._sqlite:
            ((n,),) = raw.execute(SQLITE[readonly]).fetchall()
            return f'"id":{0 if readonly else n},"xmax":{n + readonly},"active":[]'
        with raw.pipeline():  # with BEGIN, which the driver sends first
            snapshot, xid = raw.execute(POSTGRES[readonly]).fetchone()
        _, xmax, active = snapshot.split(":")
        return f'"id":{xid},"xmax":{xmax},"active":[{active}]'

    def _tail(self, snapshot: str, statements: list[Any], call: Drawing, result: str, error: str) -> str:
        known = encode([(self._sql.get(sql) or self._text(sql), *rest) for sql, *rest in statements])
        return (f'{snapshot},"draws":{encode(call.draws)},"st":{known},"result":"{result}",'
                f'"error":{encode(error)}}}')  # fmt: skip

    def _text(self, sql: str) -> int:
        with self._turn:
            if sql not in self._sql:
                self._sql[sql] = len(self._sql) + 1
                self._later.append(encode({"kind": "sql", "id": self._sql[sql], "sql": sql}))
            return self._sql[sql]

    def _put_off(self, line: str) -> None:
        """A line that may be lost: it is written with the next one."""
        with self._turn:
            self._later.append(f'{{"kind":{line}}}')

    def _write(self, line: str) -> None:
        with self._turn:
            data = "\n".join([*self._later, line, ""]).encode()
            try:
                write_all(self._file, data)
            except OSError as error:
                os.ftruncate(self._file, self._size)
                os.lseek(self._file, self._size, os.SEEK_SET)
                raise HostError(f"{self.path}: {error.strerror}, so nothing is done") from error
            self._size += len(data)
            self._later.clear()


def _prepare(connection: Connection) -> None:
    """What SQLite's numbers are drawn from, made where it is not there."""
    connection.exec_driver_sql("CREATE TABLE IF NOT EXISTS windtunnel_seq (n INTEGER NOT NULL)")
    count = connection.exec_driver_sql("SELECT count(*) FROM windtunnel_seq").scalar()
    if not count:
        connection.exec_driver_sql("INSERT INTO windtunnel_seq VALUES (0)")
