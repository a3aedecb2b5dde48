"""``windtunnel bench``: the comparison that a capability is judged by, measured on this machine."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Annotated, Any

import typer

if TYPE_CHECKING:
    from rich.console import Console
    from rich.table import Table

    from windtunnel.bench.rows import Row

WIDTH = 120  # characters of a line where there is no terminal


def register(app: typer.Typer) -> None:
    """Add the verb to ``app``."""
    app.command("bench")(bench)


def bench(
    capability: Annotated[str, typer.Argument(help="Such as agents.sandbox.")] = "training.emulate",
    only: Annotated[list[str] | None, typer.Option(help="A section to run alone; may be repeated.")] = None,
    quick: Annotated[bool, typer.Option("--quick", help="Fewer repeats, and no large jobs.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print the rows as one JSON list.")] = False,
) -> None:
    """Hold CAPABILITY against real runs, published figures and its peers, side by side."""
    from windtunnel.capabilities import find
    from windtunnel.cli.progress import shown_progress

    module = find(capability, lambda one: "bench" in one.rooms, who="bench").room("bench")
    console = _output()

    def show(found: list[Row]) -> None:
        if not as_json:
            _print(console, capability, [row.plain() for row in found])

    with shown_progress(f"bench {capability}") as progress:
        rows = module.run(tuple(only or ()), quick=quick, progress=progress, shown=show)
    if as_json:
        typer.echo(json.dumps([row.plain() for row in rows]))
        return
    missed = [row.name for row in rows if row.met is False]
    met = sum(row.met is True for row in rows)
    if met or missed:
        words = f"targets: {met} met, {len(missed)} missed"
        console.print(words + (f" ({'; '.join(missed)})" if missed else ""), highlight=False)


def _output() -> Console:
    """Standard output: as wide as the terminal, and wide enough for tables in a file."""
    from rich.console import Console

    console = Console()
    return console if console.is_terminal else Console(width=WIDTH)


def _print(console: Console, capability: str, rows: list[dict[str, Any]]) -> None:
    """A section, as soon as it is done: an hour's work is not lost with its last minute."""
    if not rows:
        return
    shown = table(f"{capability}: {rows[0]['section']}", rows)
    if shown.row_count:
        console.print(shown)
    for row in rows:
        words = "; ".join(part for part in (row["source"], row["note"]) if part)
        if words:
            console.print(f"{row['name']}: {words}", style="dim", highlight=False)
    console.print()


def table(title: str, rows: list[dict[str, Any]]) -> Table:
    """Rows that have figures as a table, in columns that have any."""
    from rich.table import Table

    kinds = [
        key for key in ("measured", "emulated", "published") if any(row[key] is not None for row in rows)
    ]
    errors = any(row["error"] is not None for row in rows)
    targets = any(row["target"] for row in rows)
    shown = Table(title=title, title_justify="left")
    shown.add_column("name", overflow="fold")
    for name in (*kinds, *(["error"] if errors else []), *(["target"] if targets else [])):
        shown.add_column(name, justify="right", overflow="fold")
    for row in rows:
        figures = [figure(row[key], row["unit"]) for key in kinds]
        if not any(figures):
            continue
        error = "" if row["error"] is None else f"{row['error']:.2%}"
        mark = {True: "✓ ", False: "✗ ", None: ""}[row["met"]]
        target = mark + row["target"]
        shown.add_row(row["name"], *figures, *([error] if errors else []), *([target] if targets else []))
    return shown


def figure(value: float | None, unit: str) -> str:
    """A figure with its unit; small numbers of bytes whole, so that only equal ones look equal."""
    if value is None:
        return ""
    if unit == "bytes":
        return f"{value / 2**30:.2f} GiB" if value >= 2**30 else f"{value:,.0f} B"
    if unit == "s" and value < 1:
        return f"{value * 1e3:.1f} ms"
    if unit == "":
        return f"{value:.2%}"
    if unit == "events/s":
        return f"{value / 1e6:.1f} M/s"
    return f"{value:,.4g} {unit}" if value < 1e4 else f"{value:,.0f} {unit}"
