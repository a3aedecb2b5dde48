"""``windtunnel network run``: several jobs on one cluster."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from windtunnel.cli.common import Json, print_json, print_table


def run(
    scenario: Annotated[
        Path, typer.Argument(metavar="SCENARIO.yaml", help="The cluster, and the jobs on it.")
    ],
    sharing: Annotated[
        str,
        typer.Option(help="Sharing of a full link: fifo (by messages), fair, or aq (rates by weight)."),
    ] = "fifo",
    schedule: Annotated[
        str, typer.Option(help="Order of collectives: fair (none), fifo, sebf, mxdag.")
    ] = "fair",
    aggregation: Annotated[
        str,
        typer.Option(help="Switches that add up all_reduces between hosts: none, switchml, atp or esa."),
    ] = "none",
    as_json: Json = False,
) -> None:
    """Emulate several jobs on one cluster: each job's iteration time alone and together, and the links' load.

    Jobs are runs of `windtunnel emulate`, scripts that are emulated at once, Chakra traces, or generated.

    Example: windtunnel network run examples/network/three_jobs.yaml --sharing aq --schedule mxdag
    """
    from windtunnel.base.importing import uncollected

    with uncollected():
        from windtunnel.base.units import seconds
        from windtunnel.cli import progress_bar
        from windtunnel.network.scenario import run as execute

    with progress_bar(scenario.name) as progress:
        result = execute(scenario, sharing, schedule, aggregation, progress)
    if as_json:
        return print_json(result)
    jobs = [
        (
            f"{job['name']} ({job['program']})", str(job["devices"]), seconds(job["alone_s"]),
            seconds(job["together_s"]), seconds(job["together_p95_s"]), f"{job['slowdown']:.2f}x",
            "–" if job["lowering_error"] is None else f"{job['lowering_error']:+.1%}",
        )
        for job in result["jobs"]
    ]  # fmt: skip
    print_table(
        ("job", ">devices", ">alone", ">together", ">p95", ">slow-down", ">lowering"), jobs, rules=False,
        note="lowering: iteration alone over the emulation's own, less one\n",
    )  # fmt: skip
    links = []
    for row in result["links"]:
        by = ", ".join(f"{name} {share:.0%}" for name, share in row["by"].items() if share > 0)
        links.append((f"{row['busiest']} (busiest of {row['used']})", f"{row['use']:.0%}", by))
    note = f"emulated · {result['directory']}/report.html"
    print_table(("link", "use", "by"), links, rules=False, note=note)
