"""``windtunnel network probe``: what this host can do with networks."""

from __future__ import annotations

import json
from dataclasses import asdict
from typing import Annotated

import typer


def probe(as_json: Annotated[bool, typer.Option("--json", help="Print one JSON value.")] = False) -> None:
    """Say what this host can do with networks, and what goes without each thing that it lacks.

    Queues and programs are tried in a network namespace that goes with the trial.

    Example: windtunnel network probe --json
    """
    from windtunnel.linux.probe import probed

    found = probed()
    if as_json:
        typer.echo(json.dumps([asdict(one) | {"present": one.present} for one in found]))
        return
    from rich.console import Console
    from rich.markup import escape
    from rich.table import Table

    table = Table("", "what", "gives", "why it is missing")
    for one in found:
        mark = "[green]✓[/]" if one.present else "[red]✗[/]"
        table.add_row(mark, one.name, escape(one.gives), escape(one.missing))
    console = Console()
    (console if console.is_terminal else Console(width=120)).print(table)
