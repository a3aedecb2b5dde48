"""``windtunnel debug``."""

from __future__ import annotations

from contextlib import closing
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from windtunnel.base.errors import LessError, UserError
from windtunnel.cli import new_group
from windtunnel.cli.common import Json

if TYPE_CHECKING:
    from windtunnel.control.debug.live.trace import DebugTrace
    from windtunnel.store.eventlog import EventLog

group = new_group("Query, replay and retry past requests of a service (TROD).")
Where = Annotated[str, typer.Argument(metavar="TRACE", help="A run's id, 'last', or a folder with a trace.")]
Query = Annotated[
    str, typer.Argument(help="SQL query over requests, transactions, reads, writes, as_of(table, n).")
]
Database = Annotated[
    str | None, typer.Option(metavar="URL", help="A database server, for a trace of Postgres.")
]


@group.command("sql")
def sql(trace: Where, query: Query, database: Database = None, as_json: Json = False) -> None:
    """Query who wrote or read a row, and the past state of a table, in SQL.

    Example: windtunnel debug sql last "SELECT n, handler FROM writes WHERE table_name = 'task' AND key = '7'"
    """
    from windtunnel.control.debug import sql as ask

    recorded, log = _open_trace(trace)
    with closing(log):
        columns, rows, report = ask(recorded, query, log=log, database=database)
    if as_json:
        _json([dict(zip(columns, row, strict=True)) for row in rows])
    for row in () if as_json else (columns, *rows):
        typer.echo("\t".join(map(str, row)))
    for note in _notes(report):
        typer.echo(note, err=True)


@group.command("replay")
def replay(
    trace: Where,
    request: Annotated[int | None, typer.Option(metavar="ID", help="Only this request.")] = None,
    debugger: Annotated[bool, typer.Option("--pdb", help="Stop in the handlers of --request.")] = False,
    database: Database = None,
    as_json: Json = False,
) -> None:
    """Replay past requests in the order of their snapshots, and compare each read. Exit status 3:
    a transaction differed, or part of the trace is missing.

    Example: windtunnel debug replay last --request 27 --pdb
    """
    from windtunnel.control.debug import replay as again

    if debugger and request is None:
        raise UserError("debug replay: --pdb is given without --request, in whose handlers it is to stop")
    recorded, log = _open_trace(trace)
    with closing(log):
        done = again(recorded, log=log, database=database, stop=request if debugger else None)
    done["divergences"] = [
        divergence for divergence in done["divergences"] if request in (None, divergence[1])
    ]
    _json(done) if as_json else typer.echo(_summary(done))
    _less(done, "debug replay: transactions did otherwise" if done["divergences"] else "")


@group.command("retro")
def retro(
    trace: Where,
    code: Annotated[
        Path, typer.Option(metavar="FILE.py", help="A Python file with a dict of the changed handlers.")
    ],
    check: Annotated[
        str | None, typer.Option(metavar="SQL", help="A query for rows that must not exist.")
    ] = None,
    database: Database = None,
    as_json: Json = False,
) -> None:
    """Replay past requests with changed code, in the recorded order and other possible ones. Exit status 3:
    --check returned rows, or part of the trace is missing.

    Example: windtunnel debug retro last --code examples/control/fixed.py
    """
    from windtunnel.control.debug import retro as tried

    recorded, log = _open_trace(trace)
    with closing(log):
        done = tried(recorded, code, log=log, database=database, check=check)
    bad = sum(len(outcome["orders"]) for outcome in done["outcomes"] if outcome["violations"])
    if as_json:
        _json(done)
    else:
        typer.echo(
            f"{_summary(done['recorded'])}\n{', '.join(done['changed'])} changed: {done['explored']} of "
            f"{'' if done['counted'] else 'at least '}{done['possible']} orders within 2 preemptions tried, "
            f"{len(done['outcomes'])} outcomes" + f"; the check finds rows in {bad} of them" * bool(check)
        )
        for number, outcome in enumerate(done["outcomes"], 1):
            where = "the recorded order" if 0 in outcome["orders"] else "other orders"
            lines = [
                *(["check", "", None, row] for row in outcome["violations"]),
                *outcome["answers"],
                *outcome["rows"],
            ]
            typer.echo(
                f"outcome {number}: {len(outcome['orders'])} orders ({where}), {len(lines)} differences"
            )
            for table, key, before, after in lines[:20]:  # --json has all
                typer.echo(f"  {table} {key}: {before} -> {after}"[:300])
    _less(done["recorded"], f"debug retro: the check finds rows in {bad} orders" if bad else "")


def _open_trace(trace: str) -> tuple[DebugTrace, EventLog]:
    from windtunnel.control.debug.live import trace as traces
    from windtunnel.store import eventlog

    folder = traces.locate(trace)
    return traces.read(folder), eventlog.EventLog(folder / eventlog.NAME)


def _json(value: Any) -> None:
    from windtunnel.control.debug.live.trace import encode

    typer.echo(encode(value))


def _summary(done: dict[str, Any]) -> str:
    head = (f"replayed: {len(done['divergences'])} of {done['transactions']} transactions did otherwise, "
            f"{done['reads']} reads compared; state {done['state']}")  # fmt: skip
    check = [f"the check finds {done['violations']}"] * bool(done["violations"])
    return "\n".join([head, *_notes(done)[:20], *check])


def _notes(done: dict[str, Any]) -> list[str]:
    others = ["transaction {} of request {}, {}: {}".format(*row) for row in done["divergences"]]
    return [*(f"note: {note}" for note in done["notes"]), *others]


def _less(done: dict[str, Any], why: str) -> None:
    if why or done["damaged"]:
        raise LessError("; ".join(filter(None, [why, "part of the trace is missing" * done["damaged"]])))
