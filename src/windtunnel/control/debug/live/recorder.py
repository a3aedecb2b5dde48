"""Records a service while it runs: each transaction is in the trace before it commits.

The number of a commit is drawn inside the transaction. In SQLite a writer raises the only row of a table, and
a reader reads it: that row is the snapshot. In Postgres the snapshot is ``pg_current_snapshot()``, a writer's
id ``pg_current_xact_id()``, asked for in the same round trip that begins the transaction.

One process records, and it alone writes to the database meanwhile: what others write is not in the trace, and
shows as a divergence when it is replayed.
"""

from __future__ import annotations

import itertools
import os
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from sqlalchemy import Connection, Engine

from windtunnel.base.atomic import write_all
from windtunnel.base.errors import HostError, UserError
from windtunnel.control.debug.live import checkpoint
from windtunnel.control.debug.live.capture import Capture, Drawing, code_digest, digest, is_request
from windtunnel.control.debug.live.handlers import load
from windtunnel.control.debug.live.trace import NAME, VERSION, encode, encode_strictly
from windtunnel.store.transactions import Transactions, is_readonly, transact

SQLITE_WRITER = "UPDATE windtunnel_seq SET n = n + 1 RETURNING n"
SQLITE_READER = "SELECT n FROM windtunnel_seq"
POSTGRES_WRITER = (
    "SELECT pg_current_snapshot()::text, nextval('windtunnel_seq'), pg_current_xact_id()::text::bigint"
)
POSTGRES_READER = "SELECT pg_current_snapshot()::text, 0, 0"


class Recorder:
    """A `Runner` that runs the handlers of ``service`` and records them in ``folder``, which is new or empty.

    ``handlers``: where a replay finds them, ``MODULE:NAME`` or ``FILE.py:NAME`` of a dict. The database is
    copied there first. Close it at the end; what is killed leaves a trace of all that had committed.

    Raises:
        UserError: ``folder`` has a trace, or ``handlers`` are not those of the service.
        HostError: the trace cannot be written.
    """

    def __init__(self, service: Transactions, folder: Path, *, handlers: str) -> None:
        self.service, self.folder = service, folder
        if missing := sorted(set(service.handlers) ^ set(load(handlers))):
            raise UserError(f"`handlers`: {handlers} and the service differ in {missing[0]!r}")
        self._sqlite = service.engine.dialect.name == "sqlite"
        self._turn, self._thread = threading.Lock(), threading.local()
        self._numbers, self._lines, self._sql = itertools.count(1), list[str](), dict[str, int]()
        self._clock = time.time() - time.monotonic()  # one that is never put back
        folder.mkdir(parents=True, exist_ok=True)
        if (folder / NAME).exists():
            raise UserError(f"{folder / NAME}: there is a trace already, give another folder")
        first = _prepare(service.engine)
        self._file, self._size = os.open(folder / NAME, os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC, 0o644), 0
        self._write(
            encode(
                {
                    "kind": "header", "version": VERSION, "t": time.time(), "engine": service.engine.dialect.name,
                    "handlers": handlers, "path": [place for place in sys.path if place], "first": first,
                    "codes": {name: code_digest(one) for name, one in service.handlers.items()},
                    "checkpoint": checkpoint.take(service.engine, folder),
                }
            )
        )  # fmt: skip
        self._capture = Capture(service.engine)

    def run(self, name: str, **arguments: Any) -> Any:
        """What the handler, or the function of several transactions, returns; recorded.

        Raises:
            DatabaseError: the transaction could not be made.
            HostError: it could not be recorded, and was not made.
            UserError: the arguments cannot be recorded.
        """
        handler = self.service.handlers[name]
        began = self._clock + time.monotonic()
        known = _strictly(name, arguments)
        if is_request(handler):
            return self._request(name, known, began, lambda: handler(self, **arguments))
        number, readonly = next(self._numbers), is_readonly(handler)
        head = (
            f'{{"kind":"txn","n":{number},"request":{getattr(self._thread, "request", None) or number},'
            f'"handler":{encode(name)},"args":{known},"t":{began!r},"ro":{"true" if readonly else "false"},'
        )
        failed, written = "", False

        def body(connection: Connection) -> Any:
            nonlocal failed, written
            failed, written = "", False
            taken = self._snapshot(connection, readonly)
            statements, draws = self._capture.begin(), list[list[Any]]()
            try:
                result = handler(Drawing(connection, draws), **arguments)
            except Exception as error:  # recorded once it is not made again
                failed = head + self._tail(taken, statements, draws, "", f"{type(error).__name__}: {error}")
                raise
            finally:
                self._capture.end()
            self._write(head + self._tail(taken, statements, draws, digest(result), ""))
            written = True
            return result

        state = ""
        try:
            return transact(self.service.engine, body, readonly=readonly)
        except BaseException:
            if failed:
                self._write(failed)
            state = ',"aborted":true' if written else ""
            raise
        finally:
            if failed or written:
                self._later(f'{{"kind":"end","n":{number}{state},"t":{self._clock + time.monotonic()!r}}}')

    def close(self) -> None:
        """The trace is whole; the service goes on without being recorded."""
        self._capture.close()
        self._write('{"kind":"close"}')
        os.close(self._file)

    def __enter__(self) -> Recorder:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _request(self, name: str, arguments: str, began: float, call: Callable[[], Any]) -> Any:
        if getattr(self._thread, "request", None):
            return call()  # of another one: what it does is that one's
        number = self._thread.request = next(self._numbers)
        self._later(
            f'{{"kind":"request","id":{number},"name":{encode(name)},"args":{arguments},"t":{began!r}}}'
        )
        try:
            return call()
        finally:
            self._thread.request = None
            self._later(f'{{"kind":"end","request":{number},"t":{self._clock + time.monotonic()!r}}}')

    def _snapshot(self, connection: Connection, readonly: bool) -> tuple[int, int, list[int], int]:
        """The transaction's id (0 for a reader), the end and the gaps of what it sees, and its number."""
        raw = connection.connection.dbapi_connection
        assert raw is not None
        if self._sqlite:
            ((n,),) = raw.execute(SQLITE_READER if readonly else SQLITE_WRITER).fetchall()
            return (0, n + 1, [], n) if readonly else (n, n, [], n)
        with raw.pipeline():  # type: ignore[attr-defined]  # with BEGIN, which the driver sends before
            cursor = raw.execute(POSTGRES_READER if readonly else POSTGRES_WRITER)
        (snapshot, seq, xid) = cursor.fetchone()
        _, xmax, active = snapshot.split(":")
        return xid, int(xmax), [int(one) for one in active.split(",") if one], seq

    def _tail(
        self, taken: tuple[int, int, list[int], int], statements: list[Any], draws: list[Any], result: str,
        error: str,
    ) -> str:  # fmt: skip
        xid, xmax, active, seq = taken
        known = [(self._sql.get(sql) or self._text(sql), *rest) for sql, *rest in statements]
        return (
            f'"id":{xid},"xmax":{xmax},"active":{active},"seq":{seq},"draws":{encode(draws)},'
            f'"st":{encode(known)},"result":"{result}","error":{encode(error)}}}'
        )

    def _text(self, sql: str) -> int:
        with self._turn:
            if sql not in self._sql:
                number = len(self._sql) + 1
                self._lines.append(encode({"kind": "sql", "id": number, "sql": sql}))
                self._sql[sql] = number
            return self._sql[sql]

    def _later(self, line: str) -> None:
        with self._turn:
            self._lines.append(line)

    def _write(self, line: str) -> None:
        """The line, after those that could wait."""
        with self._turn:
            data = "\n".join([*self._lines, line, ""]).encode()
            try:
                write_all(self._file, data)
            except OSError as error:
                os.ftruncate(self._file, self._size)
                os.lseek(self._file, self._size, os.SEEK_SET)
                raise HostError(f"{self.folder / NAME}: {error.strerror}; the transaction is not made") from error
            self._size += len(data)
            self._lines.clear()


def _strictly(name: str, arguments: dict[str, Any]) -> str:
    try:
        return encode_strictly(arguments)
    except (TypeError, ValueError) as error:
        raise UserError(
            f"{name}: the arguments cannot be recorded ({error}); accepted are values of JSON, bytes, dates, "
            "times, decimals and UUIDs"
        ) from error


def _prepare(engine: Engine) -> int:
    """What numbers are drawn from, made where it is not there; in SQLite the last number."""

    def body(connection: Connection) -> int:
        if engine.dialect.name != "sqlite":
            connection.exec_driver_sql("CREATE SEQUENCE IF NOT EXISTS windtunnel_seq")
            return 0
        connection.exec_driver_sql("CREATE TABLE IF NOT EXISTS windtunnel_seq (n INTEGER NOT NULL)")
        connection.exec_driver_sql(
            "INSERT INTO windtunnel_seq SELECT 0 WHERE NOT EXISTS (SELECT 1 FROM windtunnel_seq)"
        )
        return int(connection.exec_driver_sql("SELECT n FROM windtunnel_seq").scalar_one())

    return int(transact(engine, body))
