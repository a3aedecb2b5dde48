"""``windtunnel network torus``: an all-to-all in an optical torus."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from windtunnel.cli import new_group
from windtunnel.cli.common import Json, emit

group = new_group("Plan an all-to-all in an optical torus.")


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
    method: Annotated[
        str, typer.Option(help="Algorithm: auto, closed-form, recursion, gar, or first-fit.")
    ] = "auto",
    out: Annotated[
        Path | None, typer.Option(metavar="FILE", help="File for the paths (CSV). Default: torus-DIMS.csv.")
    ] = None,
    as_json: Json = False,
) -> None:
    """Give every pair of nodes a route and a wavelength, so that no two meet on a link.

    All paths go into a file: source, destination, wavelength, and the nodes on the way. After a failure the
    paths that it does not touch stay as they are.

    Example: windtunnel network torus plan --dims 3x3x3 --fail 0,0,0-0,0,1 --json
    """
    from windtunnel.network.torus.planning import plan as make

    result = make(dims, failed or (), method, out).plain()
    lines = [
        f"{dims}: {result['nodes']} nodes, {result['pairs']:,} pairs, by {result['method']}, no conflicts",
        f"wavelengths       {result['wavelengths']} (lower bound {result['lower_bound']})",
    ]
    if failed:
        published = result["backup_lower_bound_published"]
        also = f", published for such a failure: {published}" if published is not None else ""
        lines += [
            f"rerouted          {result['rerouted']:,} pairs",
            f"backup among them {result['backup_wavelengths']}"
            f" (lower bound {result['backup_lower_bound']}{also})",
        ]
    emit(as_json, result, (*lines, f"paths             {result['file']}"))
