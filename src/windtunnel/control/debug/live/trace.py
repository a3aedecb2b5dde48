"""A trace: what was asked of a service, and what each of its transactions saw, as JSON lines in a folder.

    header   the engine, where the handlers are, their digests, the checkpoint's digest
    request  a function of several transactions begins; what is one transaction needs no such line
    sql      a statement's text, once
    txn      a transaction: arguments, snapshot, what it drew, and its statements
    end      a transaction has committed (or did not), a request is over
    close    the recording ended in good order

The line of a transaction is written, by one write, before it commits. So after ``kill -9`` every committed
transaction is there, and each that another one saw stands before that one: any beginning of a trace can be
replayed exactly. A transaction without its ``end`` that no other one saw may have committed or not.
"""

from __future__ import annotations

import base64
import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import date, datetime
from decimal import Decimal
from pathlib import Path
from typing import Any
from uuid import UUID

from windtunnel.base.errors import UserError
from windtunnel.control.debug.policy import Transaction

NAME = "trace.jsonl"
VERSION = 1
_TEXTS = {"datetime": datetime.fromisoformat, "date": date.fromisoformat, "uuid": UUID, "decimal": Decimal}


@dataclass
class Recorded:
    """A transaction of a trace. ``draws``: [kind, value] of what it asked of its `Call`. ``statements``: of
    each the text, its parameters, the number of rows, and a digest of rows that it returned, else None.
    ``result``: a digest; ``error``: what the handler raised, "" where it returned."""

    n: int
    request: int
    handler: str
    arguments: dict[str, Any]
    t: float
    id: int
    xmax: int
    active: tuple[int, ...]
    seq: int
    readonly: bool
    draws: list[list[Any]]
    statements: list[list[Any]]
    result: str = ""
    error: str = ""
    ended: float | None = None

    @property
    def commits(self) -> bool:
        return self.id > 0 and not self.error


@dataclass
class Request:
    """A function of several transactions. ``over``: it returned or raised while it was recorded."""

    id: int
    name: str
    arguments: dict[str, Any]
    t: float
    over: bool = False


@dataclass
class Trace:
    """What a trace has. ``notes``: in a sentence each, what is missing; ``damaged``: part of it is."""

    folder: Path
    header: dict[str, Any] = field(default_factory=dict)
    transactions: list[Recorded] = field(default_factory=list)
    requests: dict[int, Request] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)
    damaged: bool = False

    def observed(self, tables: Mapping[int, tuple[set[str], set[str]]] | None = None) -> tuple[Transaction, ...]:
        """For the policy; ``tables``: that transactions read and write, by their number."""
        last = max((one.ended or one.t for one in self.transactions), default=0.0)
        return tuple(
            Transaction(
                one.request, one.id, one.commits, one.xmax, one.active, one.seq,
                self.requests[one.request].t if one.request in self.requests else one.t, one.ended or last,
                *(tuple(sorted(names)) for names in (tables or {}).get(one.n, ())),
            )
            for one in self.transactions
        )  # fmt: skip


def encode(value: Any) -> str:
    """A line's JSON, also of bytes, times, decimals and UUIDs; of anything else how Python writes it."""
    return _ENCODE(value)


def encode_strictly(value: Any) -> str:
    """The same; TypeError or ValueError for anything else."""
    return _ENCODE_STRICTLY(value)


def decode(line: bytes | str) -> Any:
    return json.loads(line, object_hook=_object)


def locate(trace: str) -> Path:
    """The folder of a trace: a path to it or its file, a run's id, or ``last`` for the newest that has one.

    Raises:
        UserError: there is none.
    """
    path = Path(trace)
    if trace != "last" and path.exists():
        folder = path if path.is_dir() else path.parent
    else:
        from windtunnel.store.runs import Store

        store = Store.open()
        runs = store.list() if trace == "last" else [store.get(trace)]
        folders = [run.directory for run in runs if (run.directory / NAME).is_file()]
        if not folders:
            raise UserError(f"debug: {trace!r} is no run that was recorded; accepted is one with a {NAME}")
        folder = folders[0]
    if not (folder / NAME).is_file():
        raise UserError(f"debug: {trace}: there is no {NAME}, so nothing was recorded there")
    return folder


def read(folder: Path) -> Trace:
    """The trace in ``folder``, as far as it is whole.

    Raises:
        UserError: there is no header that this version reads.
    """
    lines = (folder / NAME).read_bytes().split(b"\n")
    trace, sql, by_number = Trace(folder), dict[int, str](), dict[int, Recorded]()
    closed = False
    for number, line in enumerate(lines[:-1], 1):
        try:
            event = decode(line)
            match event["kind"]:
                case "header":
                    trace.header = event
                case "sql":
                    sql[event["id"]] = event["sql"]
                case "request":
                    trace.requests[event["id"]] = Request(
                        event["id"], event["name"], event["args"], event["t"]
                    )
                case "txn":
                    one = _recorded(event, sql)
                    by_number.pop(one.n, None)  # an attempt that lost a conflict as it committed
                    by_number[one.n] = one
                case "end" if "request" in event:
                    trace.requests[event["request"]].over = True
                case "end" if "aborted" in event:
                    del by_number[event["n"]]
                case "end":
                    by_number[event["n"]].ended = event["t"]
                case "close":
                    closed = True
        except (ValueError, KeyError, TypeError) as error:
            rest = len(lines) - number - 1
            trace.notes.append(f"line {number} is damaged ({error!r:.60}); {rest} lines after it are left out")
            trace.damaged = True
            break
    if trace.header.get("version") != VERSION:
        raise UserError(f"{folder / NAME}: line 1 is no header of a trace of version {VERSION}")
    trace.transactions = list(by_number.values())
    if lines[-1]:
        trace.notes.append(f"the last line is cut off after {len(lines[-1])} bytes")
    if not closed and not trace.damaged:
        trace.notes.append(f"the recording ended suddenly, after {len(trace.transactions)} transactions")
    _check(trace)
    return trace


def _check(trace: Trace) -> None:
    """What snapshots show and is not there; and who may not have committed."""
    ids = {one.id for one in trace.transactions if one.commits}
    seen = max((one.xmax for one in trace.transactions), default=0)
    if trace.header["engine"] == "sqlite":  # ids have no gaps there
        gone = sorted(set(range(trace.header["first"] + 1, seen)) - ids)
        if gone:
            trace.notes.append(f"{len(gone)} transactions that others saw are missing, the first is {gone[0]}")
            trace.damaged = True
    doubt = [one.n for one in trace.transactions if one.commits and one.ended is None and one.id >= seen]
    if doubt:
        trace.notes.append(f"whether transaction {doubt[-1]} committed is not known: no other one saw it")


def _recorded(event: dict[str, Any], sql: Mapping[int, str]) -> Recorded:
    return Recorded(
        event["n"], event.get("request", event["n"]), event["handler"], event["args"], event["t"],
        event["id"], event["xmax"], tuple(event["active"]), event["seq"], event["ro"], event["draws"],
        [[sql[text], *rest] for text, *rest in event["st"]], event["result"], event["error"],
    )  # fmt: skip


def _default(value: Any) -> Any:
    match value:
        case bytes() | bytearray() | memoryview():
            return {"$bytes": base64.b64encode(value).decode()}
        case datetime() | date():
            return {f"${type(value).__name__}": value.isoformat()}
        case Decimal() | UUID():
            return {f"${type(value).__name__.lower()}": str(value)}
    raise TypeError(f"there is a {type(value).__name__}")


def _lenient(value: Any) -> Any:
    try:
        return _default(value)
    except TypeError:
        return {"$repr": repr(value)}


def _object(value: dict[str, Any]) -> Any:
    if len(value) == 1:
        ((key, text),) = value.items()
        if key == "$bytes":
            return base64.b64decode(text)
        if key[:1] == "$" and key[1:] in _TEXTS:
            return _TEXTS[key[1:]](text)
    return value


_ENCODE = json.JSONEncoder(separators=(",", ":"), default=_lenient).encode
_ENCODE_STRICTLY = json.JSONEncoder(separators=(",", ":"), default=_default, allow_nan=False).encode
