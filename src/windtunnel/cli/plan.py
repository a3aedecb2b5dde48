"""``windtunnel plan resilience``: what a failure rate will cost a job, and what to do about it."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import typer

from windtunnel.cli import new_group
from windtunnel.cli.common import Json, print_json, print_table
from windtunnel.cli.options import takes
from windtunnel.training.goodput.request import ResilienceRequest

if TYPE_CHECKING:
    from windtunnel.training.goodput import ResiliencePlan

group = new_group("Plan for the failures of a cluster: what they cost, and how to recover.")
LOST_TIME = {
    "slower": ("slow",), "saving": ("checkpoint",), "redone": ("redo",), "waiting": ("wait",),
    "recovering": ("detect", "start", "regroup", "load", "join"),
}  # fmt: skip
"""Columns of the table, with the phases that each adds up."""


@group.command("resilience")
@takes(ResilienceRequest, "request")
def resilience(request: ResilienceRequest, as_json: Json = False) -> None:
    """Recommend checkpoint intervals, copies, placement and a recovery method, with reasons and a command.

    All of it is emulated: a trace of failures is drawn, and each way to go on goes through it with the
    decisions of the policies that also run live.

    Example: windtunnel plan resilience --cluster h100-sxm:128x8 --state-bytes 1.1e12 --trace llama3
    """
    from windtunnel.cli import progress_bar
    from windtunnel.training.goodput.planning import plan

    with progress_bar("plan") as progress:
        result = plan(request, progress)
    if as_json:
        return print_json(result.plain())
    _show(result)


def _show(plan: ResiliencePlan) -> None:
    from windtunnel.base.units import amount

    question, advice, command = plan.question, plan.advice, plan.commands[plan.advice.scheme]
    job, costs = question.job, question.costs
    after = f"after {costs.replace:g} s" if math.isfinite(costs.replace) else "when the trace says so"
    typer.echo(
        f"{plan.cluster.name}: {job.hosts} hosts, {amount(job.state_bytes)} of state, steps of"
        f" {job.step_time:g} s, {job.hosts // job.stages} pipelines of {job.stages} hosts\n"
        f"{plan.failures} failures in {question.horizon / 86400:g} days (mean {question.mtbf / 3600:.3g} h,"
        f" {question.software:.0%} software); a host is replaced {after}; between hosts"
        f" {amount(costs.peer_bandwidth)}/s for checkpoints, to storage {amount(costs.storage_bandwidth)}/s"
    )
    print_table(
        (">copies", ">memory", ">fits", ">every", ">two lost", ">from storage"),
        [
            (
                f"{'→ ' * (choice is advice.chosen)}{choice.copies}", amount(choice.memory),
                "yes" if choice.fits else "no",
                "step" if choice.every == 1 else f"{choice.every} steps", f"{choice.pair:.2%}",
                f"{choice.fallbacks:.3g} times",
            )
            for choice in advice.choices
        ],
        "Copies in memory: memory of a host, interval, recovery after the loss of two hosts",
    )  # fmt: skip
    print_table(
        ("", ">goodput", *(f">{name}" for name in LOST_TIME)),
        [
            (
                f"{'→ ' * (result.scheme == advice.scheme)}{result.scheme}", f"{result.goodput:.2%}",
                *(
                    f"{sum(result.phases[phase] for phase in phases) / result.horizon:.2%}"
                    for phases in LOST_TIME.values()
                ),
            )
            for result in sorted(advice.results, key=lambda result: -result.goodput)
        ],
        f"Recovery methods, {question.horizon / 86400:g} days (emulated)",
    )  # fmt: skip
    typer.echo("\n  • ".join(("Recommended", *advice.reasons)))
    typer.echo(f"Run\n  {command}")
    if advice.chosen.placement.kind == "domains" and "--placement" in command:
        typer.echo("  and on each host: windtunnel host HOST:29400 --domain ITS-LEAF")
