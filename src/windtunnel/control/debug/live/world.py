"""A database in which past transactions are made again, in an order that the policy has decided.

A function of several transactions runs in a thread that waits at each of them until the order says that it is
made: so its steps come in any order that is wanted, and it is the function's own code that decides on them.
"""

from __future__ import annotations

import pdb
import threading
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from queue import Empty, SimpleQueue
from tempfile import TemporaryDirectory
from typing import Any

from sqlalchemy import Connection
from sqlalchemy.exc import DBAPIError

from windtunnel.base.errors import ScriptError
from windtunnel.control.debug.live import checkpoint
from windtunnel.control.debug.live.capture import Capture, Redrawing, digest, table_patterns, tables_used
from windtunnel.control.debug.live.trace import Recorded, Trace
from windtunnel.control.debug.policy import Step
from windtunnel.store.transactions import Handler, is_readonly

PATIENCE = 60.0
"""Seconds that a function may take between two of its transactions."""
BLOCKED = {"40001", "40P01", "55P03"}
"""Postgres: lost a conflict, or waited for a lock that one has which is not committed yet."""


@dataclass
class Execution:
    """A transaction made again: for which recorded one (None: there was none), with what, and what it did.
    ``statements``: with columns and rows; ``changes``: [table, row before, row after]."""

    recorded: Recorded | None
    request: int
    handler: str
    arguments: dict[str, Any]
    statements: list[Any] = field(default_factory=list)
    drawn: dict[str, int] = field(default_factory=dict)
    result: str = ""
    shown: str = ""
    error: str = ""
    changes: list[list[Any]] = field(default_factory=list)
    commit: int | None = None
    """Which commit it was in this world, from 1."""


class _Abandoned(BaseException):
    """Ends a function whose recording stopped in the middle."""


class _Function:
    """A function of several transactions, one at a time."""

    def __init__(self, function: Handler, arguments: dict[str, Any]) -> None:
        self._calls, self._answers = SimpleQueue[Any](), SimpleQueue[Any]()
        self.waiting: tuple[str, dict[str, Any]] | None = None
        self._thread = threading.Thread(target=self._main, args=(function, arguments), daemon=True)
        self._thread.start()
        self._next()

    def run(self, name: str, **arguments: Any) -> Any:
        """Called by the function."""
        self._calls.put((name, arguments))
        answer, error = self._answers.get()
        if error is not None:
            raise error
        return answer

    def answer(self, result: Any, error: BaseException | None) -> None:
        self._answers.put((result, error))
        self._next()

    def abandon(self) -> None:
        if self.waiting is not None:
            self._answers.put((None, _Abandoned()))
            self._thread.join(PATIENCE)

    def _next(self) -> None:
        try:
            self.waiting = self._calls.get(timeout=PATIENCE)
        except Empty:
            raise ScriptError(
                f"debug: {self._thread.name} did nothing for {PATIENCE:g} s between two transactions"
            ) from None

    def _main(self, function: Handler, arguments: dict[str, Any]) -> None:
        try:
            function(self, **arguments)
        except (Exception, _Abandoned):
            pass  # it was recorded like that, or its transactions say so
        self._calls.put(None)


class World:
    """A database as it was when the recording began, and what is made again in it. A context.

    ``changes``: rows before and after each change are noted. ``stop``: a request whose handlers run in pdb.
    """

    def __init__(
        self, trace: Trace, handlers: Mapping[str, Handler], database: str | None = None, *,
        changes: bool = False, stop: int | None = None,
    ) -> None:  # fmt: skip
        self.trace, self.handlers, self._database = trace, handlers, database
        self._noting, self._stop = changes, stop
        self.executions, self.done, self.forced = list[Execution](), list[int](), 0
        self._open: dict[int, tuple[Connection, Execution]] = {}
        self._commits = 0
        self._stack = ExitStack()

    def __enter__(self) -> World:
        with ExitStack() as stack:
            scratch = Path(stack.enter_context(TemporaryDirectory(prefix="windtunnel-debug-")))
            self.engine = stack.enter_context(
                checkpoint.restored(self.trace.folder, self.trace.header, self._database, scratch)
            )
            self._capture = Capture(self.engine, keep=True)
            stack.callback(self._capture.close)
            self.keys = checkpoint.keys(self.engine)
            self._patterns = table_patterns(list(self.keys))
            if self._noting:
                checkpoint.note_changes(self.engine)
            stack.callback(self._give_up)
            self._stack = stack.pop_all()
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()

    def run(self, order: Sequence[Step]) -> list[Execution]:
        """Make transactions in ``order``; then what functions still want to do, and commit all."""
        requests = self.trace.requests
        self._functions = functions = dict[int, _Function]()
        for step in order:
            self._commit(step.commit)
            recorded = self.trace.transactions[step.run]
            of = requests.get(recorded.request)
            if of is None:
                self._make(step.run, recorded, recorded.request, recorded.handler, recorded.arguments)
                continue
            if of.id not in functions:
                functions[of.id] = _Function(self.handlers[of.name], of.arguments)
            if functions[of.id].waiting is not None:  # else it does less than was recorded
                self._go_on(functions[of.id], step.run, recorded, of.id)
        self._commit(list(self._open))
        for number, function in functions.items():
            while requests[number].over and function.waiting is not None:
                self._go_on(function, -1, None, number)
        return self.executions

    def tables(self) -> dict[int, tuple[set[str], set[str]]]:
        """What each recorded transaction read and wrote here, by its number."""
        return {
            one.recorded.n: tables_used(one.statements, self._patterns)
            for one in self.executions
            if one.recorded
        }

    def _go_on(self, function: _Function, k: int, recorded: Recorded | None, request: int) -> None:
        assert function.waiting is not None
        function.answer(*self._make(k, recorded, request, *function.waiting))

    def _make(
        self, k: int, recorded: Recorded | None, request: int, name: str, arguments: dict[str, Any]
    ) -> tuple[Any, BaseException | None]:
        """One transaction; what its handler returned, or raised."""
        handler = self.handlers.get(name)
        if handler is None:
            raise ScriptError(f"debug: request {request} calls {name!r}, which is no handler")
        done = Execution(recorded, request, name, arguments)
        self.executions.append(done)
        if k >= 0:
            self.done.append(k)
        connection = self.engine.connect().execution_options(windtunnel_readonly=is_readonly(handler))
        try:
            result, error = self._attempt(connection, handler, done)
            if getattr(getattr(error, "orig", None), "sqlstate", "") in BLOCKED:
                self.forced += len(self._open)
                self._commit(list(self._open))
                result, error = self._attempt(connection, handler, done)
        except BaseException:
            connection.close()
            raise
        if error is not None or is_readonly(handler):
            connection.rollback()
            connection.close()
            return result, error
        self._open[k] = connection, done
        if recorded is None or not recorded.commits:
            self._commit([k])  # it did not commit then: nobody says when it is due
        return result, None

    def _attempt(
        self, connection: Connection, handler: Handler, done: Execution
    ) -> tuple[Any, Exception | None]:
        recorded = done.recorded
        call = Redrawing(connection, *((recorded.draws, recorded.n, recorded.t) if recorded else ()))
        connection.begin()
        done.statements = self._capture.begin()
        result, error = None, None
        try:
            if done.request == self._stop:
                result = pdb.Pdb().runcall(handler, call, **done.arguments)
            else:
                result = handler(call, **done.arguments)
        except Exception as raised:
            error = raised
            connection.rollback()
        finally:
            self._capture.end()
        done.drawn = call.drawn
        done.result, done.shown = ("", "") if error else (digest(result), f"{result!r:.200}")
        done.error = f"{type(error).__name__}: {error}" if error else ""
        if self._noting and error is None and not is_readonly(handler):
            done.changes = checkpoint.noted(connection)
        return result, error

    def _commit(self, due: Sequence[int]) -> None:
        for k in due:
            if k in self._open:
                connection, done = self._open.pop(k)
                connection.commit()
                connection.close()
                self._commits += 1
                done.commit = self._commits
                if k >= 0:
                    self.done.append(-1 - k)

    def _give_up(self) -> None:
        for connection, _ in self._open.values():
            connection.close()
        for function in getattr(self, "_functions", {}).values():
            function.abandon()
