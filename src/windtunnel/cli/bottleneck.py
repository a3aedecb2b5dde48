"""``windtunnel bottleneck``: whether the network holds a training job up."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Annotated

import typer

from windtunnel.base.errors import UserError

SETTINGS = {"allow_interspersed_args": False, "ignore_unknown_options": False}


def register(app: typer.Typer) -> None:
    """Add the verb to ``app``."""
    app.command("bottleneck", context_settings=SETTINGS)(bottleneck)


def bottleneck(
    what: Annotated[
        str | None,
        typer.Argument(metavar="[SCRIPT|RUN]", help="A training script, or an emulation: its id, or last."),
    ] = None,
    arguments: Annotated[
        list[str] | None, typer.Argument(metavar="ARGS", help="The script's own arguments.")
    ] = None,
    cluster: Annotated[
        str | None,
        typer.Option("--cluster", "-c", help="A name such as v100:8x8,nic=ethernet-25, or a file."),
    ] = None,
    rules: Annotated[
        str, typer.Option(help="windtunnel, or netai20: the paper's simulator, on its models without SCRIPT.")
    ] = "windtunnel",
    hosts: Annotated[
        str, typer.Option(metavar="N,N", help="Other numbers of hosts, each emulated by itself.")
    ] = "",
    live: Annotated[
        str, typer.Option(metavar="N,N", help="Run it here, too: so many ranks, over gloo (needs root).")
    ] = "",
    live_rates: Annotated[
        str, typer.Option(metavar="R,R", help="Gb/s of the links between ranks that run here.")
    ] = "0.1,0.25,0.5,1",
    page: Annotated[Path | None, typer.Option("--html", metavar="FILE", help="Write a page.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON value.")] = False,
) -> None:
    """Say whether the network holds a job up, and what a faster one, compression or devices would give.

    Example: windtunnel bottleneck --cluster v100:8x8,nic=ethernet-25 examples/train_resnet.py
    """
    from windtunnel.base.importing import uncollected

    with uncollected():
        from rich.console import Console

        from windtunnel.cli import shown_progress
        from windtunnel.training.bottleneck import report, run

    if rules not in ("windtunnel", "netai20"):
        raise UserError(f"`rules` {rules!r}; accepted are windtunnel, netai20")
    if what is None and rules == "windtunnel":
        raise UserError("bottleneck: a SCRIPT or a RUN is needed; --rules netai20 has models of its own")
    counts, ranks, rates = _numbers("hosts", hosts), _numbers("live", live), _rates(live_rates)
    if ranks and rules == "netai20":
        raise UserError("`live` is compared with the rules windtunnel, not with netai20")
    program, words = what or "", arguments or []
    if what is not None and not Path(what).exists() and not words:
        program, words, known = run.read_run(what)
        cluster = cluster or known
    if ranks and cluster is None:
        cluster = f"cpu:{max(ranks)}x1"
    if program and cluster is None:
        raise UserError("`cluster` is needed to emulate a script")
    console = Console(highlight=False)
    with shown_progress("bottleneck") as progress:
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
            typer.echo(json.dumps({"rules": rules, "source": "simulated", "rows": rows}))
        else:
            console.print(report.paper(rows))
        return
    if page is not None:
        report.write_page(page, analysis)
    if as_json:
        typer.echo(json.dumps(analysis.plain()))
        return
    console.print(report.table(analysis))
    if analysis.live:
        console.print(report.live_table(analysis))
    console.print(analysis.sentence(), *report.needs(analysis), sep="\n", soft_wrap=True)


def _numbers(option: str, text: str) -> list[int]:
    try:
        counts = [int(part) for part in text.split(",") if part.strip()]
        if any(count < 2 for count in counts):
            raise ValueError
    except ValueError:
        raise UserError(f"`{option}` {text!r}; accepted are numbers from 2 up, such as 2,4,8") from None
    return counts


def _rates(text: str) -> list[float]:
    try:
        rates = [float(part) for part in text.split(",")]
        if not all(0 < rate < math.inf for rate in rates):
            raise ValueError
    except ValueError:
        raise UserError(f"`live_rates` {text!r}; accepted are Gb/s above 0, such as 0.1,1") from None
    return rates
