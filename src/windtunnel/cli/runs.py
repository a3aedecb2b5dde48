"""``windtunnel runs``: list, show, compare and remove what was run."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from windtunnel.base import units
from windtunnel.cli import Group

if TYPE_CHECKING:
    from windtunnel.store.runs import Run

AsJson = Annotated[bool, typer.Option("--json", help="Print one JSON value instead of a table.")]
Id = Annotated[str, typer.Argument(metavar="ID", help="An id, the beginning of one, or 'last'.")]
Ids = Annotated[list[str], typer.Argument(metavar="ID...", help="Ids, beginnings of ids, or 'last'.")]

_STYLES = {"done": "green", "running": "cyan", "failed": "red", "killed": "red"}
_CAPTION = "Figures of training.emulate are emulated, except wall time, which is measured."

runs = typer.Typer(
    name="runs", cls=Group, help="List, show, compare and remove what was run.", no_args_is_help=True
)


def register(app: typer.Typer) -> None:
    """Add the verb to the command line."""
    app.add_typer(runs)


@runs.command("list")
def list_runs(
    limit: Annotated[int, typer.Option(min=1, help="How many of the newest runs.")] = 20,
    capability: Annotated[str | None, typer.Option(help="Only of one capability.")] = None,
    as_json: AsJson = False,
) -> None:
    """Show the newest runs.

    Example: windtunnel runs list --limit 5
    """
    from windtunnel.store.compare import figures
    from windtunnel.store.runs import Store

    found = Store.open().list(limit, capability)
    if as_json:
        _print_json([run.as_dict() for run in found])
        return
    if not found:
        typer.echo("No runs yet: start with `windtunnel emulate`.")
        return
    table = Table(
        caption=_CAPTION, caption_justify="left", title_justify="left", box=SIMPLE_HEAD, padding=(0, 1, 0, 0)
    )
    # The capability takes a column only where it tells runs apart.
    kinds = {run.capability for run in found}
    if len(kinds) == 1:
        table.title = f"Runs of {kinds.pop()}"
    for name in ("id", "capability", "status") if kinds else ("id", "status"):
        table.add_column(name, no_wrap=True)
    table.add_column("what", overflow="fold")
    for name in ("iteration", "MFU", "peak memory", "wall time"):
        table.add_column(name, justify="right", no_wrap=True)
    for run in found:
        known = figures(run.summary or {})
        shown = [
            _figure(*known[name]) if name in known else "–"
            for name in ("iteration_time_s", "mfu", "peak_reserved_bytes")
        ]
        wall = "–" if run.wall_time_s is None else _figure("s", run.wall_time_s)
        kind = [run.capability] if kinds else []
        table.add_row(run.id, *kind, _status(run), escape(_what(run)), *shown, wall)
    _print(table)


@runs.command()
def show(run_id: Id, as_json: AsJson = False) -> None:
    """Show everything that is known of one run.

    Example: windtunnel runs show last
    """
    from windtunnel.store.compare import figures
    from windtunnel.store.runs import Store

    run = Store.open().get(run_id)
    if as_json:
        _print_json(run.as_dict())
        return
    table = Table(show_header=False, title=f"run {run.id}", title_justify="left", caption_justify="left")
    table.add_column(style="bold")
    table.add_column(overflow="fold")
    table.add_row("capability", run.capability)
    table.add_row("status", _status(run))
    table.add_row("begun", f"{run.created_at:%Y-%m-%d %H:%M:%S} UTC")
    table.add_row("files", escape(str(run.directory)))
    table.add_row("seed", str(run.seed))
    table.add_row("versions", escape(", ".join(f"{name} {text}" for name, text in run.versions.items())))
    if run.error:
        table.add_row("error", escape(run.error))
    if run.wall_time_s is not None:
        table.add_row("wall time", _figure("s", run.wall_time_s))
    table.add_section()
    for name, value in run.inputs.items():
        table.add_row(escape(name), escape(_text(value)))
    if run.summary:
        table.caption = _CAPTION
        table.add_section()
        for name, (unit, value) in figures(run.summary).items():
            if name != "wall_time_s":
                table.add_row(escape(name), _figure(unit, value))
        for warning in run.summary.get("warnings") or ():
            table.add_row("warning", escape(str(warning)))
    _print(table)


@runs.command()
def compare(run_ids: Ids, as_json: AsJson = False) -> None:
    """Put two or more runs side by side, with the ratio to the first.

    Example: windtunnel runs compare last 20261121-045018
    """
    from windtunnel.base.errors import UserError
    from windtunnel.store.compare import compare as compare_runs
    from windtunnel.store.runs import Store

    if len(run_ids) < 2:
        raise UserError("runs compare: one run is given, give two or more")
    store = Store.open()
    chosen = [store.get(name) for name in run_ids]
    result = compare_runs(chosen)
    if as_json:
        _print_json(
            {
                "runs": [run.id for run in chosen],
                "inputs": result.inputs,
                "figures": [
                    {"name": f.name, "unit": f.unit, "values": f.values, "ratios": f.ratios}
                    for f in result.figures
                ],
            }
        )
        return
    table = Table(caption=_CAPTION, caption_justify="left")
    table.add_column("", style="bold", overflow="fold")
    for run in chosen:
        table.add_column(run.id, justify="right", overflow="fold")
    table.add_row("status", *(_status(run) for run in chosen))
    for name, values in result.inputs.items():
        table.add_row(escape(name), *(escape(_text(value)) for value in values))
    table.add_section()
    for figure in result.figures:
        cells = [
            "–" if value is None else _figure(figure.unit, value) + ("" if first else _ratio(ratio))
            for first, value, ratio in zip(
                [True] + [False] * len(chosen), figure.values, figure.ratios, strict=False
            )
        ]
        table.add_row(escape(figure.name), *cells)
    _print(table)


@runs.command("rm")
def remove(
    run_ids: Ids, yes: Annotated[bool, typer.Option("--yes", "-y", help="Do not ask.")] = False
) -> None:
    """Delete runs and their files.

    Example: windtunnel runs rm last
    """
    from windtunnel.store.runs import Store

    store = Store.open()
    # All are looked up before the first is deleted, so that a wrong id deletes nothing.
    chosen = {run.id: run for run in map(store.get, run_ids)}
    if not yes:
        for run in chosen.values():
            typer.echo(f"{run.id}  {run.capability}  {_what(run)}")
        typer.confirm(f"Delete {len(chosen)} run(s) and their files?", abort=True)
    for name in chosen:
        store.remove(name)
        typer.echo(f"removed {name}")


def _print(table: Table) -> None:
    console = Console()
    if not console.is_terminal:
        console.width = max(console.width, 140)  # what is piped is searched or cut: do not fold it
    console.print(table)


def _print_json(value: Any) -> None:
    typer.echo(json.dumps(value, indent=2, ensure_ascii=False))


def _status(run: Run) -> str:
    return f"[{_STYLES.get(run.status, 'white')}]{run.status}[/]"


def _what(run: Run) -> str:
    """The script and the cluster, from the summary or the inputs, as far as they are there."""
    found = []
    for source in (run.summary or {}, run.inputs):
        for key, inner in (("command", "script"), ("script", "script"), ("cluster", "name")):
            value = source.get(key)
            value = value.get(inner) if isinstance(value, dict) else value
            if isinstance(value, str) and Path(value).name not in found:
                found.append(Path(value).name)
        if found:
            break
    return " on ".join(found)


def _text(value: Any) -> str:
    if value is None:
        return "–"
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)


def _ratio(ratio: float | None) -> str:
    return "" if ratio is None else f"  ×{ratio:.3g}"


def _figure(unit: str, value: float) -> str:
    """A figure with its unit, at a scale that reads well."""
    if unit == "share":
        return f"{value:.1%}"
    return units.size(value, places=2) if unit == "bytes" else units.figure(value, unit)
