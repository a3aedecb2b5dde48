"""``windtunnel plan resilience``: what a failure rate will cost a job, and what to do about it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer

from windtunnel.cli import Group

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
def resilience(
    cluster: Annotated[str, typer.Option(help="A name of the catalogue such as h100-sxm:128x8, or a file.")],
    state_bytes: Annotated[
        str,
        typer.Option(metavar="BYTES", help="Parameters and optimizer state of the job: 1.1e12, '1.1 TB'."),
    ],
    mtbf: Annotated[
        str | None, typer.Option(metavar="TIME", help="Mean time between failures of the job: 3h, 600.")
    ] = None,
    trace: Annotated[
        str | None,
        typer.Option(
            metavar="NAME|FILE",
            help="Instead of --mtbf: llama3, spot:p3, spot:g4dn (with their published statistics), or a file"
            " of lines 'milliseconds,add|remove,host' or of SkyPilot (.json).",
        ),
    ] = None,
    step_time: Annotated[str, typer.Option(metavar="TIME", help="Of one step, without failures.")] = "10s",
    step_overhead: Annotated[
        str | None,
        typer.Option(metavar="TIME", help="Of it, what fewer hosts do not lengthen (optimizer ..); none."),
    ] = None,
    days: Annotated[float, typer.Option(min=0.01, max=3650, help="How far to look ahead.")] = 30.0,
    software: Annotated[
        float, typer.Option(min=0, max=1, help="Part of the failures that leaves the host alive.")
    ] = 0.13,
    leaf_share: Annotated[
        float, typer.Option(min=0, max=1, help="Part of the host failures that takes a whole leaf switch.")
    ] = 0.0,
    replace: Annotated[str, typer.Option(metavar="TIME", help="Until a lost host is replaced.")] = "10min",
    spares: Annotated[
        int | None,
        typer.Option(min=0, help="Hosts that wait idle; by default none, compared with one."),
    ] = None,
    detect: Annotated[str, typer.Option(metavar="TIME", help="Until a loss is noticed.")] = "1s",
    start: Annotated[str, typer.Option(metavar="TIME", help="For a new process until it can train.")] = "60s",
    storage: Annotated[
        str, typer.Option(metavar="RATE", help="Bandwidth of the shared storage, for all hosts together.")
    ] = "20 GB/s",
    storage_share: Annotated[
        float, typer.Option(min=0.001, max=1, help="Part of that bandwidth that saving may take.")
    ] = 1.0,
    storage_within: Annotated[
        str, typer.Option(metavar="TIME", help="Longest time between two checkpoints to storage.")
    ] = "1d",
    save_stall: Annotated[
        str | None,
        typer.Option(
            metavar="TIME",
            help="What a checkpoint to storage takes from training; the copy within a host by default.",
        ),
    ] = None,
    host_memory: Annotated[
        str, typer.Option(metavar="BYTES", help="Memory of a host that checkpoints may take.")
    ] = "1 TB",
    network_share: Annotated[
        float, typer.Option(min=0.001, max=1, help="Part of a host's NICs that replication may take.")
    ] = 0.25,
    stages: Annotated[
        int, typer.Option(min=0, help="Hosts of one pipeline; 0: the fewest that hold the state twice.")
    ] = 0,
    microbatches: Annotated[
        int, typer.Option(min=0, help="Of one step; 0: four for every stage of every pipeline.")
    ] = 0,
    layers: Annotated[int, typer.Option(min=1, max=1000, help="Of the model, for pipelines.")] = 96,
    costs: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="Costs measured by 'python -m benchmarks training.checkpoint'."),
    ] = None,
    seed: Annotated[int, typer.Option(min=0, help="Of the failures.")] = 0,
    script: Annotated[str, typer.Option(help="Of the command that is printed.")] = "train.py",
    persist: Annotated[
        str, typer.Option(metavar="URL", help="Of the command that is printed: the storage.")
    ] = "checkpoints",
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
    from windtunnel.training.goodput.planning import PlanRequest, plan

    asked = PlanRequest(
        cluster=cluster,
        state_bytes=state_bytes,
        mtbf=mtbf,
        trace=trace,
        step_time=step_time,
        step_overhead=step_overhead,
        days=days,
        software=software,
        leaf_share=leaf_share,
        replace=replace,
        spares=spares,
        detect=detect,
        start=start,
        storage=storage,
        storage_share=storage_share,
        storage_within=storage_within,
        save_stall=save_stall,
        host_memory=host_memory,
        network_share=network_share,
        stages=stages,
        microbatches=microbatches,
        layers=layers,
        costs=costs,
        seed=seed,
        script=script,
        persist=persist,
    )
    with shown_progress("plan") as progress:
        made = plan(asked, progress)
    if html is not None:
        report.write_page(html, made, cluster)
    if as_json:
        typer.echo(json.dumps(report.plain(made)))
        return
    console = Console()
    report.show(made, console)
    if html is not None:
        console.print(f"Plots  {html}")
