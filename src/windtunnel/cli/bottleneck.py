"""``windtunnel bottleneck``: whether the network holds a training job up."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from windtunnel.base.errors import UserError
from windtunnel.cli.common import Arguments, Json, choice, numbers, print_json, print_table


def bottleneck(
    what: Annotated[
        str | None,
        typer.Argument(metavar="SCRIPT|RUN", help="A training script, or an emulation: its id, or last."),
    ] = None,
    arguments: Arguments = None,
    cluster: Annotated[
        str | None,
        typer.Option("--cluster", "-c", help="A name such as v100:8x8,nic=ethernet-25, or a file."),
    ] = None,
    rules: Annotated[
        str, typer.Option(help="windtunnel, or netai20: the paper's simulator, on its models without SCRIPT.")
    ] = "windtunnel",
    hosts: Annotated[str, typer.Option(metavar="N,N", help="Further numbers of hosts to emulate.")] = "",
    live: Annotated[
        str,
        typer.Option(metavar="N,N", help="Also run the job here with this many ranks over gloo. Needs root."),
    ] = "",
    live_rates: Annotated[
        str, typer.Option(metavar="R,R", help="Link rates of --live, in Gb/s.")
    ] = "0.1,0.25,0.5,1",
    page: Annotated[Path | None, typer.Option("--html", metavar="FILE", help="Write a page.")] = None,
    as_json: Json = False,
) -> None:
    """Find out whether the network limits a job, and what a faster network, compression or devices gain.

    Example: windtunnel bottleneck --cluster v100:8x8,nic=ethernet-25 examples/train_resnet.py
    """
    from windtunnel.base.importing import uncollected

    with uncollected():
        from windtunnel.base.units import share
        from windtunnel.cli import progress_bar
        from windtunnel.training.bottleneck import report, run

    choice("rules", rules, ("windtunnel", "netai20"))
    if what is None and rules == "windtunnel":
        raise UserError("bottleneck: a SCRIPT or a RUN is needed; --rules netai20 has models of its own")
    counts, ranks = numbers("hosts", hosts, int, 2), numbers("live", live, int, 2)
    rates = numbers("live_rates", live_rates, float, 1e-6)
    if rules == "netai20" and (ranks or counts or page):
        raise UserError("`live`, `hosts` and `page` go with the rules windtunnel, not with netai20")
    program, words = what or "", arguments or []
    if what is not None and not Path(what).exists() and not words:
        program, words, recorded_cluster = run.read_run(what)
        cluster = cluster or recorded_cluster
    if ranks and cluster is None:
        cluster = f"cpu:{max(ranks)}x1"
    if program and cluster is None:
        raise UserError("`cluster` is needed to emulate a script")
    with progress_bar("bottleneck") as progress:
        if rules == "netai20":
            rows = run.paper_rows(program or None, words, cluster, progress=progress)
        else:
            assert cluster is not None
            analysis = run.analyse(
                program, words, cluster=cluster, hosts=counts, live=ranks,
                live_rates=[rate * run.GBIT for rate in rates], progress=progress,
            )  # fmt: skip
    if rules == "netai20":
        if as_json:
            return print_json({"rules": rules, "source": "simulated", "rows": rows})
        head = ("model", "workers", *(f"{rate} Gb/s" for rate in rows[0]["scaling"]))
        cells = ((row["model"], str(row["workers"]), *map(share, row["scaling"].values())) for row in rows)
        return print_table(head, cells, "simulated")
    if page is not None:
        report.write_page(page, analysis)
    if as_json:
        return print_json(analysis.plain())
    print_table(report.HEAD, report.rows(analysis), "emulated")
    if analysis.live:
        print_table(report.LIVE_HEAD, report.live_rows(analysis), "measured")
    for line in (analysis.sentence(), *report.needs(analysis)):
        typer.echo(line)
