"""``windtunnel plan resilience``: what a failure rate will cost a job, and what to do about it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer

from windtunnel.cli import Group
from windtunnel.cli.options import takes
from windtunnel.training.goodput.request import PlanRequest

group = typer.Typer(
    cls=Group, no_args_is_help=True, help="What a cluster's failures will cost, and what to do about them."
)


def register(app: typer.Typer) -> None:
    """Add the verb to ``app``."""
    app.add_typer(group, name="plan")


@group.callback()
def _plan() -> None:
    pass


@group.command("resilience")
@takes(PlanRequest, "request")
def resilience(
    request: PlanRequest,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON value.")] = False,
    html: Annotated[Path | None, typer.Option(metavar="FILE", help="Write a page with plots.")] = None,
) -> None:
    """Recommend intervals, copies, placement and the way to go on, with the reasons and the command.

    All of it is emulated: a trace of failures is drawn, and each way to go on goes through it with the
    decisions of the policies that also run live.

    Example: windtunnel plan resilience --cluster h100-sxm:128x8 --state-bytes 1.1e12 --trace llama3
    """
    from rich.console import Console

    from windtunnel.cli import shown_progress
    from windtunnel.training.goodput import report
    from windtunnel.training.goodput.planning import plan

    with shown_progress("plan") as progress:
        made = plan(request, progress)
    if html is not None:
        report.write_page(html, made, request.cluster)
    if as_json:
        typer.echo(json.dumps(report.plain(made)))
        return
    console = Console()
    report.show(made, console)
    if html is not None:
        console.print(f"Plots  {html}")
