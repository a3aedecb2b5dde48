"""A database in which past transactions are made again, in an order that the policy has decided.

A function of several transactions goes one further by being called again: it gets the answers that it had so
far, and stops at the next transaction. So its steps come in any order that is wanted.
"""

from __future__ import annotations

import pdb
import random
import sys
import traceback
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from importlib import import_module
from pathlib import Path
from tempfile import TemporaryDirectory
from types import ModuleType, SimpleNamespace
from typing import Any
from uuid import UUID

from sqlalchemy import Connection, Engine
from sqlalchemy.exc import SQLAlchemyError

from windtunnel.base.errors import ScriptError, UserError
from windtunnel.control.debug.live import checkpoint
from windtunnel.control.debug.live.recorder import Drawing, StatementCapture, digest
from windtunnel.control.debug.live.trace import DebugTrace, Recorded
from windtunnel.control.debug.policy import Step
from windtunnel.store.transactions import READONLY, Handler, is_readonly

BLOCKED = {"40001", "40P01", "55P03"}
"""Postgres: lost a conflict, or waited for a lock of a transaction that is not committed yet."""
MOST = 1000
"""Transactions of one function: one that polls for what does not come is not waited for."""
Answer = tuple[Any, Exception | None]
Handlers = Mapping[str, Handler]


@dataclass
class Execution:
    """A transaction made again: which recorded one (None: it is new), and what it ``did``, statements with
    columns and rows; ``changes``: see `checkpoint.changes`; ``commit``: which one here, from 1."""

    recorded: Recorded | None
    request: int
    handler: str
    args: dict[str, Any]
    did: tuple[Any, ...] = ()
    answer: str = ""
    changes: list[list[Any]] = field(default_factory=list)
    commit: int | None = None


@dataclass
class Redrawing(Drawing):
    """A call that gives out what was ``recorded``, each kind in its order. Where there is no more, the time
    is ``t`` and the rest comes from ``seed``."""

    recorded: Sequence[Sequence[Any]] = ()
    t: float = 0.0
    seed: int = 0

    def now(self) -> float:
        return float(self._drawn("now"))

    def random(self) -> float:
        return float(self._drawn("random"))

    def uuid(self) -> str:
        return str(self._drawn("uuid"))

    def _drawn(self, kind: str) -> Any:
        more, place = (
            random.Random(f"{self.seed} {len(self.draws)}"),
            [draw for draw, _ in self.draws].count(kind),
        )
        fresh = {"now": self.t, "random": more.random(), "uuid": str(UUID(int=more.getrandbits(128)))}[kind]
        value = [*[draw for name, draw in self.recorded if name == kind][place:], fresh][0]
        self.draws.append((kind, value))
        return value


class WantedTransaction(BaseException):
    """Ends a function at the transaction that it wants next."""


class ReplayedWorld:
    """What was done. ``start``, ``rows``: before and afterwards; ``keys``: of the tables; ``done``:
    transactions made, by index, and -1 - k where k was committed; ``violations``: rows that the check found.
    ``noting``: rows are compared before and after each writer; ``stop``: a request that runs in pdb."""

    def __init__(
        self, trace: DebugTrace, handlers: Handlers, engine: Engine, noting: bool, stop: int | None
    ) -> None:
        self.trace, self.handlers, self.engine, self.noting, self.stop = trace, handlers, engine, noting, stop
        self.executions, self.done, self.violations = list[Execution](), list[int](), list[dict[str, Any]]()
        self.keys, self.commits = checkpoint.keys(engine), 0
        self.start = self._all_rows()
        self._open: dict[int, tuple[Connection, Execution]] = {}
        self._answers: dict[int, list[Answer]] = {number: [] for number in trace.functions}
        self._capture = StatementCapture(engine, keep=True)

    def run(self, order: Sequence[Step]) -> None:
        """In that order; then what functions still want to do."""
        try:
            for step in order:
                self._commit(step.commit)
                recorded = self.trace.transactions[step.run]
                if recorded.request not in self.trace.functions:
                    self._make(step.run, recorded, recorded.request, recorded.handler, recorded.args)
                elif operation := self._next(recorded.request):  # else it does less than was recorded
                    self._answers[recorded.request].append(
                        self._make(step.run, recorded, recorded.request, *operation)
                    )
            self._commit(list(self._open))
            for number in (number for number, line in self.trace.functions.items() if "over" in line):
                while operation := self._next(number):
                    self._answers[number].append(self._make(-1, None, number, *operation))
                    if len(self._answers[number]) > MOST:
                        raise ScriptError(f"debug: request {number} goes on after {MOST} transactions")
            self.rows = self._all_rows()
        finally:
            self._capture.close()
            for connection, _ in self._open.values():
                connection.close()

    def _all_rows(self) -> checkpoint.Tables:
        with self.engine.connect() as connection:
            return checkpoint.rows(connection, self.keys)

    def _next(self, request: int) -> tuple[str, dict[str, Any]] | None:
        """The transaction that a function makes after those that were answered; None where it is over."""
        line, answers = self.trace.functions[request], iter(self._answers[request])

        def run(name: str, /, **arguments: Any) -> Any:
            for answer, error in answers:
                if error is not None:
                    raise error
                return answer
            raise WantedTransaction(name, arguments)

        try:
            self.handlers[line["name"]](SimpleNamespace(run=run), **line["args"])
        except WantedTransaction as operation:
            return operation.args  # type: ignore[return-value]
        except Exception:  # it did then, too, or its transactions differ
            pass
        return None

    def _make(
        self, k: int, recorded: Recorded | None, request: int, name: str, args: dict[str, Any]
    ) -> Answer:
        """One transaction; what its handler returned, or raised."""
        if (handler := self.handlers.get(name)) is None:
            raise UserError(f"debug: request {request} calls {name!r}, which is no handler (any more)")
        done = Execution(recorded, request, name, args)
        self.executions.append(done)
        self.done += [k] * (k >= 0)
        connection = self.engine.connect()
        self._open[k] = connection, done
        result, error = self._attempt(connection, handler, done)
        if getattr(getattr(error, "orig", None), "sqlstate", "") in BLOCKED:
            self._commit([other for other in self._open if other != k])
            result, error = self._attempt(connection, handler, done)
        if error is not None or is_readonly(handler):
            self._open.pop(k)[0].close()
        elif recorded is None or not recorded.id or recorded.did[3]:
            self._commit([k])  # it did not commit then: nobody says when it is due
        return result, error

    def _attempt(self, connection: Connection, handler: Handler, done: Execution) -> Answer:
        recorded, result, error = done.recorded, None, None
        call = Redrawing(
            connection, self._capture, [], *((recorded.did[1], recorded.t, recorded.n) if recorded else ())
        )
        noting = self.noting and not is_readonly(handler)
        connection.info[READONLY] = is_readonly(handler)
        connection.begin()
        before = checkpoint.rows(connection, self.keys) if noting else {}
        statements = self._capture.begin()
        try:
            stops = done.request == self.stop
            result = pdb.runcall(handler, call, **done.args) if stops else handler(call, **done.args)
        except Exception as raised:
            error = raised
        finally:
            self._capture.end()
        words = f"{type(error).__name__}: {error}" if error else ""
        done.did, done.answer = (
            (statements, call.draws, "" if error else digest(result), words),
            words or repr(result),
        )
        if error:
            connection.rollback()
        elif noting:
            done.changes = checkpoint.changes(before, checkpoint.rows(connection, self.keys))
        return result, error

    def _commit(self, due: Sequence[int]) -> None:
        for k in [k for k in due if k in self._open]:
            connection, done = self._open.pop(k)
            connection.commit()
            connection.close()
            self.commits = done.commit = self.commits + 1
            self.done += [-1 - k] * (k >= 0)


def make_again(
    trace: DebugTrace, handlers: Handlers, order: Sequence[Step], database: str | None, check: str | None,
    noting: bool = False, stop: int | None = None,
) -> ReplayedWorld:  # fmt: skip
    """Make the transactions of a trace in ``order`` in a database as it was. ``check``: SQL, at the end.

    Raises:
        UserError: the checkpoint was changed, or ``check`` is wrong.
    """
    with (
        TemporaryDirectory(prefix="windtunnel-debug-") as scratch,
        checkpoint.restored(trace.folder, trace.header, database, Path(scratch)) as engine,
    ):
        world = ReplayedWorld(trace, handlers, engine, noting, stop)
        world.run(order)
        try:
            with engine.connect() as connection:
                rows = connection.exec_driver_sql(check).mappings().all() if check else []
        except SQLAlchemyError as error:
            raise UserError(f"`check`: {str(error).partition(chr(10))[0]}") from error
        world.violations = [dict(row) for row in rows]
    return world


def load(place: str, path: Sequence[str] = ()) -> Handlers:
    """The dict at ``place``, ``MODULE:NAME`` or ``FILE.py:NAME``. ``path``: where modules are also searched.

    Raises:
        UserError: there is no such module, file or dict. ScriptError: it failed while it was loaded.
    """
    module, _, name = place.rpartition(":")
    file, before = Path(module), list(sys.path)
    sys.path[:] = dict.fromkeys([str(file.absolute().parent)] * (file.suffix == ".py") + before + [*path])
    try:
        if file.suffix == ".py":  # an importer's cache takes a file that was saved twice in a second for one
            loaded = sys.modules[f"windtunnel_handlers_{file.stem}"] = ModuleType(file.stem)
            loaded.__file__ = module
            exec(compile(file.read_bytes(), file, "exec"), vars(loaded))
        else:
            loaded = import_module(module)
        return dict(vars(loaded)[name])
    except (OSError, ImportError, ValueError, KeyError) as error:
        raise UserError(
            f"debug: {place!r} is no dict of handlers, as MODULE:NAME or FILE.py:NAME ({error})"
        ) from error
    except Exception as error:
        raise ScriptError(f"{place} failed: {error}", traceback.format_exc()) from error
    finally:
        sys.path[:] = before
