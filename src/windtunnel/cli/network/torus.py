"""``windtunnel network torus``: an all-to-all in an optical torus."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer

from windtunnel.cli import Group

group = typer.Typer(cls=Group, no_args_is_help=True, help="Plan an all-to-all in an optical torus.")


def register(app: typer.Typer) -> None:
    """Add the verb to ``app``."""
    app.add_typer(group, name="torus")


@group.callback()
def _torus() -> None:
    pass


@group.command("plan")
def plan(
    dims: Annotated[str, typer.Option(help="Size of each side, such as 3x3x3.")],
    failed: Annotated[
        list[str] | None,
        typer.Option(
            "--fail",
            metavar="LINK|NODE",
            help="What has failed: a node (0,0,1), a cable (0,0,0-0,0,1), or one direction of it"
            " ('0,0,0>0,0,1'). May be repeated.",
        ),
    ] = None,
    method: Annotated[str, typer.Option(help="auto, closed-form, recursion, gar, or first-fit.")] = "auto",
    out: Annotated[
        Path | None, typer.Option(metavar="FILE", help="For the paths (CSV); torus-DIMS.csv by default.")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print the figures as one JSON value.")] = False,
) -> None:
    """Give every pair of nodes a route and a wavelength, so that no two meet on a link.

    All paths go into a file: source, destination, wavelength, and the nodes on the way. After a failure the
    paths that it does not touch stay as they are.

    Example: windtunnel network torus plan --dims 3x3x3 --fail 0,0,0-0,0,1 --json
    """
    from windtunnel.network.torus.planning import plan as make

    made = make(dims, failed or (), method, out).plain()
    if as_json:
        typer.echo(json.dumps(made))
        return
    typer.echo(f"{dims}: {made['nodes']} nodes, {made['pairs']:,} pairs, by {made['method']}, no conflicts")
    typer.echo(f"wavelengths       {made['wavelengths']} (lower bound {made['lower_bound']})")
    if failed:
        published = made["backup_lower_bound_published"]
        also = f", published for such a failure: {published}" if published is not None else ""
        typer.echo(f"rerouted          {made['rerouted']:,} pairs")
        typer.echo(
            f"backup among them {made['backup_wavelengths']} (lower bound {made['backup_lower_bound']}{also})"
        )
    typer.echo(f"paths             {made['file']}")
