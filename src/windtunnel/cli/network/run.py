"""``windtunnel network run``: several jobs on one cluster."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated, Any

import typer


def register(app: typer.Typer) -> None:
    """Add the verb to ``app``."""
    app.command("run")(run)


def run(
    scenario: Annotated[
        Path, typer.Argument(metavar="SCENARIO.yaml", help="The cluster, and the jobs on it.")
    ],
    sharing: Annotated[
        str,
        typer.Option(help="What jobs get of a full link: fifo (by messages), fair, or aq (rates by weight)."),
    ] = "fifo",
    schedule: Annotated[
        str, typer.Option(help="Which collective goes first: fair (none), fifo, sebf, mxdag.")
    ] = "fair",
    aggregation: Annotated[
        str,
        typer.Option(help="Who adds up all_reduces between hosts: none, or switches by switchml, atp, esa."),
    ] = "none",
    as_json: Annotated[bool, typer.Option("--json", help="Print the result as one JSON value.")] = False,
) -> None:
    """Emulate several jobs on one cluster: each one's iteration alone and beside the others, and the links.

    Jobs are runs of `windtunnel emulate`, scripts that are emulated at once, Chakra traces, or generated.

    Example: windtunnel network run examples/network/three_jobs.yaml --sharing aq --schedule mxdag
    """
    from windtunnel.base.importing import uncollected

    with uncollected():
        from windtunnel.cli import shown_progress
        from windtunnel.network.scenario import run as execute

    with shown_progress(scenario.name) as progress:
        found = execute(scenario, sharing, schedule, aggregation, progress)
    if as_json:
        typer.echo(json.dumps(found))
    else:
        _print(found)


def _print(found: dict[str, Any]) -> None:
    from rich.console import Console
    from rich.markup import escape
    from rich.table import Table

    from windtunnel.base import units

    console = Console()
    table = Table(box=None, pad_edge=False, header_style="dim", padding=(0, 2, 0, 0))
    table.add_column("job")
    for name in ("devices", "alone", "together", "p95", "slow-down", "lowering"):
        table.add_column(name, justify="right", no_wrap=True)
    for job in found["jobs"]:
        error = job["lowering_error"]
        table.add_row(
            escape(f"{job['name']} ({job['program']})"), str(job["devices"]), units.seconds(job["alone_s"]),
            units.seconds(job["together_s"]), units.seconds(job["together_p95_s"]), f"{job['slowdown']:.2f}x",
            "–" if error is None else f"{error:+.1%}",
        )  # fmt: skip
    console.print(table)
    console.print("[dim]lowering: iteration alone over the emulation's own, less one[/]\n")
    table = Table(box=None, pad_edge=False, header_style="dim", padding=(0, 2, 0, 0))
    for name in ("link", "use", "by"):
        table.add_column(name)
    for row in found["links"]:
        by = ", ".join(f"{name} {share:.0%}" for name, share in row["by"].items() if share > 0)
        table.add_row(f"{row['busiest']} (busiest of {row['used']})", f"{row['use']:.0%}", escape(by))
    console.print(table)
    console.print(f"[dim]emulated · {escape(found['directory'])}/report.html[/]", soft_wrap=True)
