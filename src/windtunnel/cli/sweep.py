"""``windtunnel sweep``: the same script over a grid of clusters and arguments."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from windtunnel.cli.common import Json, print_json


def sweep(
    spec: Annotated[Path, typer.Argument(metavar="SPEC", help="A sweep file (YAML), see docs/sweep.md.")],
    jobs: Annotated[int, typer.Option(min=1, help="Parallel processes. Each starts one or two more.")] = 1,
    on: Annotated[
        str | None,
        typer.Option(metavar="ENGINE", help="Run on ray, ray://HOST:PORT, or the URL of a control plane."),
    ] = None,
    resume: Annotated[bool, typer.Option(help="Keep the points of an earlier sweep.")] = True,
    report: Annotated[bool, typer.Option(help="Write the report of each run, too.")] = True,
    as_json: Json = False,
) -> None:  # fmt: skip
    """Emulate a script over a grid of clusters and arguments, to find the fastest, smallest or cheapest.

    Each point of the grid is a stored run. After an interruption the same command continues.

    Example: windtunnel sweep --jobs 2 examples/sweeps/llama_debug.yaml
    """
    from rich.console import Console

    from windtunnel import api
    from windtunnel.base.errors import ScriptError
    from windtunnel.cli import progress_bar
    from windtunnel.training.emulate.sweep import print_sweep
    from windtunnel.training.emulate.sweep.result import as_json as json_of

    with progress_bar(f"sweep {spec.stem}") as progress:
        done = api.sweep(spec, jobs=jobs, on=on, resume=resume, report=report, progress=progress)
    what, result = done.sweep, done.result
    if as_json:
        named = {"sweep_id": what.id, "name": what.name, "left_out": what.left_out}
        print_json(json_of(result, **named))
    else:
        print_sweep(result, Console(), f"Sweep {what.name}")
        if what.left_out:
            typer.echo(f"{what.left_out} more points are left out by the conditions.")
    if not result.done:
        raise ScriptError(
            f"all {len(result.rows)} points failed, the first because: {result.rows[0]['error']}"
        )
