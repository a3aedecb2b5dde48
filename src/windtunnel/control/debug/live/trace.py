"""A trace: what was asked of a service, and what each of its transactions saw, as JSON lines in a folder.

    header   the engine, where the handlers are, digests of their code, the checkpoint
    request  a function of several transactions begins; what is one transaction needs no such line
    sql      a statement's text, once
    txn      a transaction: arguments, snapshot, what it did
    end      a writer has committed (or did not), a function is over
    close    the recording ended in good order

A writer's line is written, by one write, before it commits. So after ``kill -9`` every committed writer is
there, with all that was before it; the last readers may be lost. What a transaction saw stands before it: any
beginning of a trace can be replayed exactly. A last writer without its ``end`` may have committed or not.
"""

from __future__ import annotations

import base64
import json
from dataclasses import dataclass, field
from functools import partial
from json.encoder import c_make_encoder, encode_basestring_ascii  # type: ignore[attr-defined]
from pathlib import Path
from typing import Any

from windtunnel.base.errors import UserError

NAME = "trace.jsonl"
VERSION = 1


@dataclass
class Recorded:
    """A transaction. ``request``: its own ``n``, or that of a function; ``t``: when it was asked for; ``ro``:
    it only reads. ``did``: its statements (text, parameters, number of rows, a digest of those that it
    returned, else None), [kind, value] of its draws, a digest of its result, and what it raised, or ""."""

    n: int
    request: int
    handler: str
    args: dict[str, Any]
    t: float
    ro: int
    id: int
    xmax: int
    active: list[int]
    did: tuple[list[list[Any]], list[list[Any]], str, str]
    ended: float | None


@dataclass
class DebugTrace:
    """``functions``: lines of requests that are functions; ``over`` is in those that ended. ``notes``: in a
    sentence each, what is missing; ``damaged``: for certain something that was recorded is."""

    folder: Path
    header: dict[str, Any] = field(default_factory=dict)
    transactions: list[Recorded] = field(default_factory=list)
    functions: dict[int, dict[str, Any]] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)
    damaged: bool = False


def locate(trace: str) -> Path:
    """The folder of a trace: a path to it, a run's id, or ``last`` for the newest run that has one.

    Raises:
        UserError: there is none.
    """
    folder = Path(trace)
    if trace == "last" or not folder.exists():
        from windtunnel.store.runs import Store

        runs = Store.open().list() if trace == "last" else [Store.open().get(trace)]
        folder = next((run.directory for run in runs if (run.directory / NAME).is_file()), folder)
    if not (folder / NAME).is_file():
        raise UserError(f"debug: {trace!r} has no {NAME}; accepted are runs and folders that have one")
    return folder


def read(folder: Path) -> DebugTrace:
    """The trace in ``folder``, as far as it is whole.

    Raises:
        UserError: there is no header that this version reads.
    """
    lines = (folder / NAME).read_bytes().split(b"\n")
    trace, sql, by_number, closed = DebugTrace(folder), dict[int, str](), dict[int, Recorded](), False
    for number, line in enumerate(lines[:-1], 1):
        try:
            event = decode(line)
            match event.pop("kind"):
                case "header":
                    trace.header = event
                case "sql":
                    sql[event["id"]] = event["sql"]
                case "request":
                    trace.functions[event["id"]] = event
                case "txn":
                    event["did"][0] = [[sql[text], *rest] for text, *rest in event["did"][0]]
                    by_number.pop(event["n"], None)  # an attempt that lost a conflict as it committed
                    event["ended"] = event["ended"] if event["ro"] or event["did"][3] else None
                    by_number[event["n"]] = Recorded(**event)
                case "end" if "request" in event:
                    trace.functions[event["request"]]["over"] = True
                case "end" if "aborted" in event:
                    del by_number[event["n"]]
                case "end":
                    by_number[event["n"]].ended = event["t"]
                case "close":
                    closed = True
        except (ValueError, KeyError, TypeError) as error:
            trace.notes.append(f"line {number} is damaged ({error!r:.60}), it and all after it are left out")
            trace.damaged = True
            break
    if trace.header.get("version") != VERSION:
        raise UserError(f"{folder / NAME}: line 1 is no header of a trace of version {VERSION}")
    trace.transactions = list(by_number.values())
    if not closed and not trace.damaged:
        part = f" and {len(lines[-1])} bytes of a line" if lines[-1] else ""
        doubt = [transaction.n for transaction in trace.transactions[-1:] if transaction.ended is None]
        words = f"; whether transaction {doubt[0]} committed is not known" if doubt else ""
        trace.notes.append(f"the recording ended suddenly, after {len(by_number)} transactions{part}{words}")
    return trace


def encode(value: Any, *, strict: bool = False) -> str:
    """JSON, also of bytes; of anything else how Python writes it, TypeError or ValueError if ``strict``."""
    return "".join(_ENCODERS[strict](value, 0))


def decode(line: bytes | str) -> Any:
    return json.loads(line, object_hook=_object)


def _default(strict: bool, value: Any) -> Any:
    if isinstance(value, bytes | bytearray | memoryview):
        return {"$bytes": base64.b64encode(value).decode()}
    if strict:
        raise TypeError(f"a {type(value).__name__} is no value of JSON")
    return str(value)


def _object(value: dict[str, Any]) -> Any:
    return base64.b64decode(value["$bytes"]) if value.keys() == {"$bytes"} else value


# made once: `JSONEncoder.encode` makes one anew for each value, which takes longer than most values do
_ENCODERS = [
    c_make_encoder(
        None, partial(_default, strict), encode_basestring_ascii, None, ":", ",", False, False, not strict
    )
    for strict in (False, True)
]
