"""``windtunnel emulate``: run a training script as ranks of a cluster that is not there."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer

SETTINGS = {"allow_interspersed_args": False, "ignore_unknown_options": False}


def register(app: typer.Typer) -> None:
    """Add the verb to the command line."""
    app.command("emulate", context_settings=SETTINGS)(emulate)


def emulate(
    script: Annotated[str, typer.Argument(metavar="SCRIPT", help="A torchrun-style training script.")],
    arguments: Annotated[
        list[str] | None, typer.Argument(metavar="ARGS", help="The script's own arguments.")
    ] = None,
    cluster: Annotated[
        str, typer.Option("--cluster", "-c", help="A name such as h100-sxm:16x8, or a YAML file.")
    ] = "h100-sxm:1x8",
    module: Annotated[
        bool, typer.Option("--module", "-m", help="SCRIPT is a module, as for python -m.")
    ] = False,
    ranks: Annotated[str, typer.Option(help="Ranks to capture: auto, all, or 0,17,120-127.")] = "auto",
    slow: Annotated[
        list[str] | None, typer.Option(help="A straggler: host=3:1.3, rank=17:1.5, nic=3:2.")
    ] = None,
    jitter: Annotated[float, typer.Option(min=0.0, max=1.0, help="Sigma of random operator times.")] = 0.0,
    seed: Annotated[int, typer.Option(help="Seed of the jitter.")] = 0,
    alloc_conf: Annotated[
        str, typer.Option(envvar="PYTORCH_CUDA_ALLOC_CONF", help="As PYTORCH_CUDA_ALLOC_CONF.")
    ] = "",
    max_split_size: Annotated[int | None, typer.Option(help="The allocator's max_split_size_mb.")] = None,
    tokens: Annotated[
        int | None, typer.Option(min=0, help="Tokens (or samples) of a step of the whole job.")
    ] = None,
    timeline: Annotated[
        str, typer.Option(help="Ranks in the timeline, as --ranks; default: one of each part.")
    ] = "",
    jobs: Annotated[int, typer.Option(min=1, help="Ranks captured at once.")] = 2,
    timeout: Annotated[float, typer.Option(min=1, help="Seconds without progress that are a hang.")] = 900.0,
    steps: Annotated[
        int | None, typer.Option(min=1, help="Steps to run at most for a sequence that repeats.")
    ] = None,
    reserve: Annotated[
        float | None, typer.Option(min=0, help="Device memory that no tensor can have, MiB.")
    ] = None,
    profile: Annotated[str | None, typer.Option(help="A measured device profile to use, by name.")] = None,
    aggregation: Annotated[
        str, typer.Option(help="Switches that add all_reduces: none, switchml, atp or esa.")
    ] = "none",
    neighbours: Annotated[int, typer.Option(help="Other jobs that share the slots of these switches.")] = 0,
    confidential: Annotated[
        str, typer.Option(help="What protects all that leaves a GPU: none, hix, graviton or h100-cc.")
    ] = "none",
    live: Annotated[str, typer.Option(help="Ranks that run for real beside the others, as --ranks.")] = "",
    data: Annotated[
        str, typer.Option(help="What virtual ranks give live ones: uniform (the same data), or zeros.")
    ] = "uniform",
    attach: Annotated[
        int | None, typer.Option(min=3, help="Stop the first live rank in pdb before this step.")
    ] = None,
    report: Annotated[bool, typer.Option(help="Write report.html, the timeline and the graph.")] = True,
    fail_on: Annotated[
        list[str] | None, typer.Option(help="End with status 3 on: oom, hang, slower:10%.")
    ] = None,
    baseline: Annotated[
        str | None, typer.Option(help="What slower compares with: a run's id or a summary.json.")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print the summary as one JSON object.")] = False,
) -> None:
    """Emulate SCRIPT on a cluster that is not there: iteration time, waits, memory of every rank.

    The script runs unmodified, as chosen ranks of the whole world, on this machine. Options come before
    SCRIPT; what follows it is the script's own.

    Example: windtunnel emulate --cluster h100-sxm:16x8 train.py --batch 2
    """
    from windtunnel.base.importing import uncollected

    with uncollected():
        from rich.console import Console

        from windtunnel import api
        from windtunnel.base.errors import VerdictError
        from windtunnel.cli import shown_progress
        from windtunnel.cluster.load import load_cluster
        from windtunnel.report.terminal import print_summary

    where = load_cluster(cluster)
    failed: VerdictError | None = None
    try:
        with shown_progress(f"{Path(script).name} on {where.name}") as progress:
            run = api.emulate(
                script, *(arguments or ()), cluster=where, module=module, ranks=ranks, slow=slow or (),
                jitter=jitter, seed=seed, alloc_conf=alloc_conf, max_split_size=max_split_size, tokens=tokens,
                timeline=timeline, jobs=jobs, timeout=timeout, steps=steps,
                reserve=None if reserve is None else reserve * 2**20, profile=profile,
                aggregation=aggregation, neighbours=neighbours, confidential=confidential, live=live,
                data=data, attach=attach, report=report, fail_on=fail_on or (), baseline=baseline,
                progress=progress,
            )  # fmt: skip
    except VerdictError as error:
        if error.run is None:
            raise
        run, failed = error.run, error
    summary = run.summary.to_json()
    if as_json:
        typer.echo(json.dumps(summary))
    else:
        page = run.directory / "report.html"
        print_summary(summary, Console(), page if page.exists() else None)
    if failed is not None:
        raise failed
