"""``windtunnel debug``."""

from __future__ import annotations

import json
from contextlib import closing
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from windtunnel.base.errors import LessError
from windtunnel.cli import Group

if TYPE_CHECKING:
    from windtunnel.control.debug.live.replay import Outcome, Replayed
    from windtunnel.control.debug.live.trace import Trace
    from windtunnel.store.eventlog import EventLog

group = typer.Typer(
    cls=Group, no_args_is_help=True, help="Past requests of a service: asked about, replayed, tried anew."
)
Where = Annotated[str, typer.Argument(metavar="TRACE", help="A run's id, 'last', or a folder with a trace.")]
Database = Annotated[
    str | None, typer.Option(metavar="URL", help="For a trace of Postgres: a server to replay it on.")
]
Json = Annotated[bool, typer.Option("--json", help="Print the result as JSON.")]


def register(app: typer.Typer) -> None:
    """Add the verb to ``app``."""
    app.add_typer(group, name="debug")


@group.command("sql")
def sql(
    trace: Where,
    query: Annotated[str, typer.Argument(help="Over requests, transactions, reads, writes, as_of(table, n).")],
    database: Database = None,
    as_json: Json = False,
) -> None:
    """Ask who wrote a row, who read it, and what a table was after a commit, in DuckDB's SQL.

    Example: windtunnel debug sql last "SELECT n, handler FROM writes WHERE table_name = 'task' AND key = '7'"
    """
    from windtunnel.control.debug.live.provenance import sql as ask
    from windtunnel.control.debug.live.trace import encode

    found, log = _opened(trace)
    with closing(log):
        columns, rows, replayed = ask(found, query, log=log, database=database)
    if as_json:
        typer.echo(encode([dict(zip(columns, row, strict=True)) for row in rows]))
    else:
        _table(columns, rows)
    for note in replayed.notes:
        typer.echo(f"note: {note}", err=True)
    if other := len(replayed.divergences):
        typer.echo(f"note: {other} transactions did otherwise when replayed; theirs have same = false", err=True)


@group.command("replay")
def replay(
    trace: Where,
    request: Annotated[int | None, typer.Option(metavar="ID", help="Show what this request did.")] = None,
    debugger: Annotated[
        bool, typer.Option("--pdb", help="Stop in the handlers of --request, in Python's debugger.")
    ] = False,
    database: Database = None,
    as_json: Json = False,
) -> None:
    """Make past requests again, in the order of their snapshots, and compare every read. Exit status 3: a
    transaction did otherwise, or part of the trace is missing.

    Example: windtunnel debug replay last --request 27 --pdb
    """
    from windtunnel.control.debug.live.replay import replay as again

    if debugger and request is None:
        raise typer.BadParameter("give --request, whose handlers it is to stop in", param_hint="--pdb")
    found, log = _opened(trace)
    with closing(log):
        done = again(found, log=log, database=database, stop=request if debugger else None, request=request)
    if as_json:
        typer.echo(json.dumps(done.plain()))
    else:
        typer.echo(
            f"{done.transactions} transactions of {done.requests} requests replayed: {done.same} did the same "
            f"({done.reads} reads compared), {done.transactions - done.same} did not"
        )
        _said(done)
        if request is not None:
            _request(done, request)
    if done.divergences or done.damaged:
        raise LessError(
            f"debug replay: {done.transactions - done.same} of {done.transactions} transactions did otherwise"
            + (", and part of the trace is missing" if done.damaged else "")
        )


@group.command("retro")
def retro(
    trace: Where,
    code: Annotated[Path, typer.Option(metavar="FILE.py", help="Has a dict with the changed handlers.")],
    check: Annotated[str | None, typer.Option(metavar="SQL", help="Finds rows that must not be.")] = None,
    preemptions: Annotated[int, typer.Option(min=0, help="Departures from the recorded order, at most.")] = 2,
    orders: Annotated[int, typer.Option(min=1, help="How many orders to try, at most.")] = 200,
    database: Database = None,
    as_json: Json = False,
) -> None:
    """Make past requests with changed code, in the recorded order and in those that could have been. Exit
    status 3: --check found rows.

    Example: windtunnel debug retro last --code examples/control/fixed.py
    """
    from windtunnel.control.debug.live.replay import retro as tried

    found, log = _opened(trace)
    with closing(log):
        done = tried(
            found, code, log=log, database=database, preemptions=preemptions, limit=orders, check=check
        )
    if as_json:
        typer.echo(json.dumps(done.plain()))
    else:
        bound = "" if done.counted else "at least "
        typer.echo(
            f"{', '.join(done.handlers)} changed: {done.explored} of {bound}{done.possible} orders within "
            f"{done.preemptions} preemptions of the recorded one tried, {len(done.outcomes)} outcomes"
        )
        _said(done.recorded)
        if check:
            typer.echo(f"as recorded: the check finds {len(done.violations)} rows {_short(done.violations)}")
        for number, outcome in enumerate(done.outcomes, 1):
            _outcome(number, outcome, check)
    bad = sum(len(one.orders) for one in done.outcomes if one.violations)
    if bad or done.recorded.damaged:
        raise LessError(f"debug retro: the check finds rows in {bad} of {done.explored} orders")


def _opened(trace: str) -> tuple[Trace, EventLog]:
    from windtunnel.control.debug.live import trace as traces
    from windtunnel.store import eventlog

    folder = traces.locate(trace)
    return traces.read(folder), eventlog.EventLog(folder / eventlog.NAME)


def _said(done: Replayed) -> None:
    for note in done.notes:
        typer.echo(f"note: {note}")
    for one in done.divergences[:20]:
        typer.echo(f"transaction {one.n} of request {one.request}, {one.handler}: {one.what}")
    if len(done.divergences) > 20:
        typer.echo(f"… and {len(done.divergences) - 20} more; --json has all")


def _request(done: Replayed, request: int) -> None:
    for one in done.shown:
        typer.echo(f"\n{one['handler']}({_short(one['arguments'])}) = {one['answer']}")
        for statement in one["statements"]:
            rows = statement["rows"]
            words = f"{statement['count']} rows" if rows is None else f"{_short(rows)}"
            typer.echo(f"  {statement['sql']} {_short(statement['parameters'])} -> {words}")


def _outcome(number: int, outcome: Outcome, check: str | None) -> None:
    where = "the recorded order" if 0 in outcome.orders else "other orders only"
    found = f"; the check finds {len(outcome.violations)} rows {_short(outcome.violations)}" if check else ""
    typer.echo(f"\noutcome {number}: {len(outcome.orders)} orders, {where}{found}")
    for request, handler, before, after in outcome.answers[:10]:
        typer.echo(f"  request {request}, {handler}: {before} before, {after} now")
    for table, key, before, after in outcome.changed[:10]:
        typer.echo(f"  {table} {key}: {_short(before)} -> {_short(after)}")
    if more := max(0, len(outcome.answers) - 10) + max(0, len(outcome.changed) - 10):
        typer.echo(f"  … and {more} more; --json has all")


def _short(value: Any) -> str:
    text = "–" if value is None else str(value)
    return text if len(text) <= 160 else text[:159] + "…"


def _table(columns: list[str], rows: list[tuple[Any, ...]]) -> None:
    from rich.box import SIMPLE_HEAD
    from rich.console import Console
    from rich.markup import escape
    from rich.table import Table

    table = Table(box=SIMPLE_HEAD, padding=(0, 1, 0, 0))
    for name in columns:
        table.add_column(escape(name), overflow="fold")
    for row in rows:
        table.add_row(*(escape(_short(value)) for value in row))
    console = Console()
    if not console.is_terminal:
        console.width = 160  # what is piped is searched or cut: do not fold it
    console.print(table)
