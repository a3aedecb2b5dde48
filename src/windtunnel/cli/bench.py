"""``windtunnel bench``: the comparison that a capability is judged by, measured on this machine."""

from __future__ import annotations

import json
from importlib import import_module
from typing import TYPE_CHECKING, Annotated, Any

import typer

if TYPE_CHECKING:
    from rich.table import Table

CAPABILITIES = ("training.emulate", "training.checkpoint", "training.pipelines", "agents.sandbox")


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
    from windtunnel.cli.progress import shown_progress
    from windtunnel.errors import UserError

    if capability not in CAPABILITIES:
        raise UserError(
            f"bench: capability {capability!r} is unknown; accepted are {', '.join(CAPABILITIES)}"
        )
    module = import_module(f"windtunnel.{capability}.bench")
    with shown_progress(f"bench {capability}") as progress:
        rows = [row.plain() for row in module.run(tuple(only or ()), quick=quick, progress=progress)]
    if as_json:
        typer.echo(json.dumps(rows))
        return
    from rich.console import Console

    console = Console()
    console.print(table(capability, rows))
    for row in rows:
        words = "; ".join(part for part in (row["source"], row["note"]) if part)
        if words:
            console.print(f"{row['name']}: {words}", style="dim", highlight=False)


def table(title: str, rows: list[dict[str, Any]]) -> Table:
    """Rows that have figures as a table, sections apart."""
    from rich.table import Table

    shown = Table(title=title)
    shown.add_column("name", overflow="fold")
    for name in ("measured", "emulated", "published", "error", "target"):
        shown.add_column(name, justify="right", overflow="fold")
    section = None
    for row in rows:
        figures = [figure(row[key], row["unit"]) for key in ("measured", "emulated", "published")]
        if not any(figures):
            continue
        if section is not None and row["section"] != section:
            shown.add_section()
        section = row["section"]
        error = "" if row["error"] is None else f"{row['error']:.2%}"
        mark = {True: "✓ ", False: "✗ ", None: ""}[row["met"]]
        shown.add_row(row["name"], *figures, error, mark + row["target"])
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
