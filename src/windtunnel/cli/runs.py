"""``windtunnel runs``: list, show, compare and remove what was run."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from windtunnel.base import units
from windtunnel.base.errors import UserError
from windtunnel.cli import new_group
from windtunnel.cli.common import Json, print_json, print_table

if TYPE_CHECKING:
    from windtunnel.store.runs import StoredRun

Id = Annotated[str, typer.Argument(metavar="ID", help="An id, the beginning of an id, or 'last'.")]
Ids = Annotated[list[str], typer.Argument(metavar="ID...", help="Ids, beginnings of ids, or 'last'.")]

STYLES = {"done": "green", "running": "cyan", "failed": "red", "killed": "red"}
SHOWN = ("iteration_time_s", "mfu", "peak_reserved_bytes")
NOTE = "Figures of training.emulate are emulated, except wall time, which is measured."

group = new_group("List, show, compare and remove runs.")


@group.command("list")
def list_runs(
    limit: Annotated[int, typer.Option(min=1, help="Number of runs to list.")] = 20,
    capability: Annotated[str | None, typer.Option(help="Show runs of one capability only.")] = None,
    as_json: Json = False,
) -> None:
    """Show the newest runs.

    Example: windtunnel runs list --limit 5
    """
    from windtunnel.store.compare import figures
    from windtunnel.store.runs import Store

    runs = Store.open().list(limit, capability)
    if as_json:
        return print_json([run.as_dict() for run in runs], indent=2)
    if not runs:
        return typer.echo("No runs yet: start with `windtunnel emulate`.")
    # The capability takes a column only where it tells runs apart.
    kinds = {run.capability for run in runs}
    rows = []
    for run in runs:
        figures_of_run = figures(run.summary or {})
        cells = [_figure(*figures_of_run[name]) if name in figures_of_run else "–" for name in SHOWN]
        wall = "–" if run.wall_time_s is None else _figure("s", run.wall_time_s)
        kind = [run.capability] if len(kinds) > 1 else []
        rows.append((run.id, *kind, _status(run), _what(run), *cells, wall))
    head = ["id", *(["capability"] if len(kinds) > 1 else []), "status", "what"]
    head += [">iteration", ">MFU", ">peak memory", ">wall time"]
    print_table(head, rows, "" if len(kinds) > 1 else f"Runs of {kinds.pop()}", NOTE)


@group.command()
def show(run_id: Id, as_json: Json = False) -> None:
    """Show all details of a run.

    Example: windtunnel runs show last
    """
    from windtunnel.store.compare import figures
    from windtunnel.store.runs import Store

    run = Store.open().get(run_id)
    if as_json:
        return print_json(run.as_dict(), indent=2)
    rows = [
        ("capability", run.capability), ("status", _status(run)),
        ("begun", f"{run.created_at:%Y-%m-%d %H:%M:%S} UTC"), ("files", str(run.directory)),
        ("seed", str(run.seed)),
        ("versions", ", ".join(f"{name} {text}" for name, text in run.versions.items())),
    ]  # fmt: skip
    if run.error:
        rows.append(("error", run.error))
    if run.wall_time_s is not None:
        rows.append(("wall time", _figure("s", run.wall_time_s)))
    rows += [(name, _text(value)) for name, value in run.inputs.items()]
    for name, (unit, value) in figures(run.summary or {}).items():
        if name != "wall_time_s":
            rows.append((name, _figure(unit, value)))
    rows += [("warning", str(warning)) for warning in (run.summary or {}).get("warnings") or ()]
    print_table((f"run {run.id}", ""), rows, note=NOTE if run.summary else "")


@group.command()
def compare(run_ids: Ids, as_json: Json = False) -> None:
    """Compare runs side by side, with ratios to the first.

    Example: windtunnel runs compare last 20261121-045018
    """
    from windtunnel.store.compare import compare as compare_runs
    from windtunnel.store.runs import Store

    if len(run_ids) < 2:
        raise UserError("runs compare: one run is given, give two or more")
    store = Store.open()
    chosen = [store.get(name) for name in run_ids]
    result = compare_runs(chosen)
    if as_json:
        ids = [run.id for run in chosen]
        rows = [{**asdict(figure), "ratios": figure.ratios} for figure in result.figures]
        return print_json({"runs": ids, "inputs": result.inputs, "figures": rows}, indent=2)
    lines: list[tuple[Any, ...]] = [("status", *map(_status, chosen))]
    lines += [(name, *map(_text, values)) for name, values in result.inputs.items()]
    for figure in result.figures:
        cells = [
            "–" if value is None else _figure(figure.unit, value) + _ratio(ratio)
            for value, ratio in zip(figure.values, (None, *figure.ratios[1:]), strict=True)
        ]
        lines.append((figure.name, *cells))
    print_table(("", *(f">{run.id}" for run in chosen)), lines, note=NOTE)


@group.command("rm")
def remove(
    run_ids: Ids,
    yes: Annotated[bool, typer.Option("--yes", "-y", help="Do not ask for confirmation.")] = False,
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


def _status(run: StoredRun) -> Any:
    from rich.text import Text

    return Text(run.status, STYLES.get(run.status, "white"))


def _what(run: StoredRun) -> str:
    """The script and the cluster, from the summary or the inputs, as far as they are there."""
    names: list[str] = []
    for source in (run.summary or {}, run.inputs):
        for key, inner in (("command", "script"), ("script", "script"), ("cluster", "name")):
            value = source.get(key)
            value = value.get(inner) if isinstance(value, dict) else value
            if isinstance(value, str) and Path(value).name not in names:
                names.append(Path(value).name)
        if names:
            break
    return " on ".join(names)


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
