"""``windtunnel emulate``: run a training script as ranks of a cluster that is not there."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from windtunnel.cli.common import Arguments, Json, Script, print_json
from windtunnel.cli.options import takes
from windtunnel.training.emulate.options import Options

DEFAULT = Options()


@takes(Options)
def emulate(
    script: Script,
    arguments: Arguments = None,
    cluster: Annotated[
        str, typer.Option("--cluster", "-c", help="A name such as h100-sxm:16x8, or a YAML file.")
    ] = "h100-sxm:1x8",
    module: Annotated[
        bool, typer.Option("--module", "-m", help="SCRIPT is a module, as for python -m.")
    ] = False,
    options: Options = DEFAULT,
    timeline: Annotated[
        str, typer.Option(help="Ranks in the timeline, in the form of --ranks. Default: one of each part.")
    ] = "",
    report: Annotated[bool, typer.Option(help="Write report.html, the timeline and the graph.")] = True,
    fail_on: Annotated[
        list[str] | None, typer.Option(help="Exit with status 3 on: oom, hang, slower:10%.")
    ] = None,
    baseline: Annotated[
        str | None, typer.Option(help="The run that slower compares with: its id, or a summary.json.")
    ] = None,
    as_json: Json = False,
) -> None:
    """Emulate SCRIPT on a cluster that you do not have: iteration time, waits, and memory of every rank.

    The script runs unmodified, as chosen ranks of the whole world, on this machine. Options come before
    SCRIPT; what follows it is the script's own.

    Example: windtunnel emulate --cluster h100-sxm:16x8 train.py --batch 2
    """
    from windtunnel.base.importing import uncollected

    with uncollected():
        from rich.console import Console

        from windtunnel import api
        from windtunnel.base.errors import VerdictError
        from windtunnel.cli import progress_bar
        from windtunnel.cluster.load import load_cluster
        from windtunnel.report.terminal import print_summary

    where = load_cluster(cluster)
    failed: VerdictError | None = None
    try:
        with progress_bar(f"{Path(script).name} on {where.name}") as progress:
            run = api.emulate(
                script, *(arguments or ()), cluster=where, module=module, options=options, timeline=timeline,
                report=report, fail_on=fail_on or (), baseline=baseline, progress=progress,
            )  # fmt: skip
    except VerdictError as error:
        if error.run is None:
            raise
        run, failed = error.run, error
    summary = run.summary.to_json()
    if as_json:
        print_json(summary)
    else:
        page = run.directory / "report.html"
        print_summary(summary, Console(), page if page.exists() else None)
    if failed is not None:
        raise failed
