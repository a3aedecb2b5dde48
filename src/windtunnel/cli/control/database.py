"""``windtunnel control init``, ``serve``, ``worker``, ``submit``, ``ps``, ``sql``, ``demo``: state in a
database."""

from __future__ import annotations

import json
import os
import platform
import time
from contextlib import ExitStack
from typing import TYPE_CHECKING, Annotated, Any

import typer

from windtunnel.cli.common import Json, LogFile, choice, emit, print_columns, print_json, stop_event

if TYPE_CHECKING:
    from windtunnel.control.database import Control

_WHERE = (
    "sqlite:///FILE or postgresql://USER@HOST/NAME; $WINDTUNNEL_CONTROL, or control.db in windtunnel's home."
)
Database = Annotated[str | None, typer.Option("--db", metavar="URL", help=_WHERE)]
Policy = Annotated[str, typer.Option(help="Policy: least, fifo, locality, priority or gang.")]
_HANDLERS = "windtunnel.control.database.handlers:HANDLERS"
_PS = {
    "workers": "SELECT name, state, slots, free, tasks, epoch, lease FROM load",
    "tasks": "SELECT state, count(*) AS tasks FROM task GROUP BY state ORDER BY state",
    "waiting": "SELECT why, count(*) AS tasks, max(seconds) AS longest FROM waiting GROUP BY why",
}


def _url(db: str | None) -> str:
    from windtunnel.base.paths import home

    return db or os.environ.get("WINDTUNNEL_CONTROL") or f"sqlite:///{home() / 'control.db'}"


def _open(db: str | None, create: bool = False) -> Control:
    from windtunnel.control.database import open_control

    return open_control(_url(db), option="--db", create=create)


def _warn(text: str) -> None:
    typer.echo(f"windtunnel: {text}", err=True)


def _print_rows(table: tuple[list[str], list[tuple[Any, ...]]]) -> None:
    names, rows = table
    cells = [[f"{cell:.3f}" if isinstance(cell, float) else str(cell) for cell in row] for row in rows]
    print_columns(names, cells)


def _plain(table: tuple[list[str], list[tuple[Any, ...]]]) -> list[dict[str, Any]]:
    return [dict(zip(table[0], row, strict=True)) for row in table[1]]


def init(db: Database = None) -> None:
    """Create the tables if they are missing.

    Example: windtunnel control init --db sqlite:///control.db
    """
    typer.echo(f"Ready  {_open(db, create=True).engine.url.render_as_string()}")


def serve(
    db: Database = None,
    policy: Policy = "least",
    log: LogFile = None,
) -> None:
    """Schedule waiting tasks until interrupted. Several schedulers may run at once.

    Example: windtunnel control serve --policy priority
    """
    from windtunnel.control.database import serve as schedule
    from windtunnel.store.eventlog import EventLog

    stop, control = stop_event(), _open(db)
    typer.echo(f"Schedules  {control.engine.url.render_as_string()} by {policy}")
    schedule(control, stop, policy=policy, log=EventLog(log) if log else None, say=_warn)


def worker(
    db: Database = None,
    name: Annotated[str, typer.Option(help="Name of this worker. Default: the host's name.")] = "",
    slots: Annotated[int, typer.Option(min=1, help="Slots: concurrent one-slot tasks.")] = os.cpu_count()
    or 1,
    data: Annotated[str, typer.Option(help="Names of the data that this worker holds, for locality.")] = "",
    lease: Annotated[
        float, typer.Option(min=0.5, help="Seconds without a message after which a worker is lost.")
    ] = 10.0,
) -> None:
    """Run the tasks assigned to this host until interrupted.

    Example: windtunnel control worker --slots 8
    """
    from windtunnel.control.database import WorkerProcess

    stop, process = stop_event(), WorkerProcess(_open(db), name or platform.node(), slots, data, lease, _warn)
    typer.echo(f"Works  {process.name}, {slots} slots, at {process.control.engine.url.render_as_string()}")
    process.run(stop)


def submit(
    command: Annotated[list[str], typer.Argument(metavar="COMMAND...", help="Words after --.")],
    db: Database = None,
    key: Annotated[
        str, typer.Option(help="Idempotency key: submissions with the same key are one task.")
    ] = "",
    priority: Annotated[int, typer.Option(help="Priority. Higher goes first.")] = 0,
    slots: Annotated[int, typer.Option(min=1, help="Slots of a worker.")] = 1,
    data: Annotated[str, typer.Option(help="Names of the data that the task reads, for locality.")] = "",
    gang: Annotated[int, typer.Option(min=1, help="Number of tasks that start together.")] = 1,
    after: Annotated[float, typer.Option(min=0, help="Earliest start, in seconds from now.")] = 0.0,
    attempts: Annotated[int, typer.Option(min=1, help="Attempts before the task counts as failed.")] = 3,
) -> None:
    """Submit a command, and print the ids of its tasks.

    Example: windtunnel control submit --slots 2 -- python train.py
    """
    task = {"command": command, "key": key, "priority": priority, "slots": slots, "data": data,
            "attempts": attempts, "not_before": time.time() + after if after else 0.0}  # fmt: skip
    name = key or f"gang-{time.time_ns()}"
    member = {**task, "gang": name, "members": gang}
    tasks = [{**member, "key": f"{name}.{number}"} for number in range(gang)] if gang > 1 else [task]
    typer.echo("\n".join(map(str, _open(db).run("submit", tasks=tasks))))


def ps(db: Database = None, as_json: Json = False) -> None:
    """Show workers, task states, and why tasks wait.

    Example: windtunnel control ps
    """
    control = _open(db)
    tables = {name: control.query(statement) for name, statement in _PS.items()}
    if as_json:
        return print_json({name: _plain(table) for name, table in tables.items()})
    for table in tables.values():
        _print_rows(table)
        typer.echo()


def sql(
    statement: Annotated[str, typer.Argument(metavar="STATEMENT", help="A read-only SQL statement.")],
    db: Database = None,
    as_json: Json = False,
) -> None:
    """Query the tables and the views load, waiting and history in read-only SQL.

    Example: windtunnel control sql "select why, count(*) from waiting group by why"
    """
    table = _open(db).query(statement)
    if as_json:
        typer.echo(json.dumps(_plain(table), default=str))
    else:
        _print_rows(table)


def demo(
    db: Database = None,
    workers: Annotated[int, typer.Option(min=1, help="Worker processes of this host.")] = 2,
    tasks: Annotated[int, typer.Option(min=1, help="Number of tasks.")] = 1000,
    kill: Annotated[
        int | None,
        typer.Option(min=0, help="Kills (SIGKILL) of scheduler and workers. Default: 3, or 0 with --record."),
    ] = None,
    policy: Policy = "least",
    seed: Annotated[int, typer.Option(help="Seed of the kills.")] = 0,
    record: Annotated[
        bool, typer.Option("--record", help="Record the run, in one process, for windtunnel debug.")
    ] = False,
    as_json: Json = False,
) -> None:
    """Run tasks here while processes are killed, and check that none is lost or run twice.

    Example: windtunnel control demo --workers 2 --tasks 1000 --kill 3
    """
    from windtunnel.base.errors import LessError
    from windtunnel.cli import progress_bar
    from windtunnel.control.database.live import demo as live
    from windtunnel.control.database.policy import POLICIES
    from windtunnel.control.debug import Recorder
    from windtunnel.store import eventlog
    from windtunnel.store.runs import Store
    from windtunnel.store.transactions import Transactions

    choice("policy", policy, POLICIES)
    kill = (0 if record else 3) if kill is None else kill
    inputs: dict[str, Any] = {"workers": workers, "tasks": tasks, "kill": kill, "policy": policy}
    run = Store.open().begin("control.database", inputs, seed)
    with run.failing(), progress_bar("control demo") as progress, ExitStack() as stack:

        def wrap(service: Transactions) -> Recorder:
            return stack.enter_context(Recorder(service, run.directory, handlers=_HANDLERS))

        result = live.demo(
            _url(db), run.directory / eventlog.NAME, **inputs, seed=seed, progress=progress,
            wrap=wrap if record else None,
        )  # fmt: skip
    run.finish(result)
    lines = []
    for name, value in (*result.items(), ("replay", f"windtunnel replay {run.id} --policy fifo")):
        text = f"{value:.3f} (measured)" if isinstance(value, float) else value
        lines.append(f"{name.replace('_', ' '):22}{', '.join(text) if isinstance(text, list) else text}")
    emit(as_json, {"run": run.id, **result}, lines)
    if result["done"] != tasks or result["effects"] != tasks:
        raise LessError(
            f"demo: {result['done']} of {tasks} tasks were done, with {result['effects']} effects"
        )
