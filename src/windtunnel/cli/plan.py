"""``windtunnel plan resilience``: what a failure rate will cost a job, and what to do about it."""

from __future__ import annotations

from windtunnel.cli import new_group
from windtunnel.cli.common import Html, Json, print_json
from windtunnel.cli.options import takes
from windtunnel.training.goodput.request import ResilienceRequest

group = new_group("Plan for the failures of a cluster: what they cost, and how to recover.")


@group.command("resilience")
@takes(ResilienceRequest, "request")
def resilience(
    request: ResilienceRequest,
    as_json: Json = False,
    html: Html = None,
) -> None:
    """Recommend checkpoint intervals, copies, placement and a recovery method, with reasons and a command.

    All of it is emulated: a trace of failures is drawn, and each way to go on goes through it with the
    decisions of the policies that also run live.

    Example: windtunnel plan resilience --cluster h100-sxm:128x8 --state-bytes 1.1e12 --trace llama3
    """
    from rich.console import Console

    from windtunnel.cli import progress_bar
    from windtunnel.training.goodput import report
    from windtunnel.training.goodput.planning import plan

    with progress_bar("plan") as progress:
        result = plan(request, progress)
    if html is not None:
        report.write_page(html, result, request.cluster)
    if as_json:
        return print_json(report.plain(result))
    console = Console()
    report.show(result, console)
    if html is not None:
        console.print(f"Plots  {html}")
