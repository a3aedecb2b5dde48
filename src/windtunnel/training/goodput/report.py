"""The advice as a page with plots, as tables, and as values of JSON."""

from __future__ import annotations

import html
import math
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from windtunnel.base import atomic
from windtunnel.base.errors import UserError
from windtunnel.base.units import amount
from windtunnel.report.page import figure, heading, page, plot
from windtunnel.training.goodput.model import (
    RecoveryAdvice,
)
from windtunnel.training.goodput.planning import ResiliencePlan
from windtunnel.training.goodput.twin.simulate import PHASES, SimulationResult

if TYPE_CHECKING:
    from rich.console import Console
    from rich.table import Table


COLOURS = {
    "useful": "#2a9d8f", "slow": "#8ab17d", "checkpoint": "#e9c46a", "redo": "#e76f51", "detect": "#6d597a",
    "wait": "#264653", "start": "#457b9d", "regroup": "#a8dadc", "load": "#f4a261", "join": "#b5838d",
}  # fmt: skip
MOST_POINTS = 2000


def write_page(path: Path, plan: ResiliencePlan, cluster: str) -> None:
    """Write one HTML file that needs nothing else.

    Raises:
        UserError: it cannot be written.
    """
    reasons = "".join(f"<li>{html.escape(reason)}</li>" for reason in plan.advice.reasons)
    sections = (
        ("advice", "Advice", f'{heading("Advice")}<ul class="plain">{reasons}</ul>'),
        ("progress", "Progress", heading("Progress") + plot(progress(plan))),
        ("time", "Time", heading("Where the time goes") + plot(breakdown(plan.advice))),
    )
    text = page(f"Resilience of {cluster}", ["Everything on this page is emulated."], sections, plots=True)
    try:
        atomic.replace(path, text)
    except OSError as error:
        raise UserError(f"plan: --html {path} cannot be written: {error.strerror}") from None


def progress(plan: ResiliencePlan) -> Any:
    """Work that is kept over time, in days of undisturbed training."""
    chart = figure("days", "days of undisturbed training done", height=520, hovermode="x unified")
    day = 86400.0
    for result in sorted(plan.advice.results, key=lambda result: -result.goodput):
        times, steps = _thinned(result)
        done = [count * plan.question.job.step_time / day for count in steps]
        chart.add_scatter(x=[time / day for time in times], y=done, mode="lines", name=result.scheme)
    whole = plan.question.horizon / day
    chart.add_scatter(
        x=[0, whole], y=[0, whole], mode="lines", name="no failures", line={"dash": "dot", "color": "#999"}
    )
    return chart


def breakdown(advice: RecoveryAdvice) -> Any:
    """Where the time goes, a bar for each scheme."""
    chart = figure("", "", height=420, barmode="stack", xaxis_tickformat=".0%", xaxis_range=[0, 1])
    results = sorted(advice.results, key=lambda result: result.goodput)
    names = [result.scheme for result in results]
    for phase in PHASES:
        shares = [result.phases[phase] / result.horizon for result in results]
        if any(shares):
            chart.add_bar(y=names, x=shares, name=phase, orientation="h", marker_color=COLOURS[phase])
    return chart


def _thinned(result: SimulationResult) -> tuple[list[float], list[float]]:
    """The series with no more points than a plot can show."""
    every = max(1, len(result.series) // MOST_POINTS)
    points = [*result.series[::every], result.series[-1]]
    return [time for time, _ in points], [steps for _, steps in points]


def plain(plan: ResiliencePlan) -> dict[str, Any]:
    """The advice as values of JSON."""
    question, advice = plan.question, plan.advice
    chosen = advice.chosen
    return {
        "origin": "emulated",
        "failures": plan.failures,
        "copies": chosen.copies,
        "placement": chosen.placement.kind,
        "every": chosen.every,
        "persist_every": advice.intervals[advice.scheme],
        "memory_per_host": chosen.memory,
        "scheme": advice.scheme,
        "command": plan.commands[advice.scheme],
        "commands": plan.commands,
        "reasons": advice.reasons,
        "job": asdict(question.job),
        # JSON knows no infinity: null says that hosts come when the trace says so
        "costs": {
            name: None if value is None or math.isinf(value) else value
            for name, value in asdict(question.costs).items()
        },
        "schemes": [_result(result) for result in advice.results],
    }


def _result(result: SimulationResult) -> dict[str, Any]:
    return {
        "name": result.scheme,
        "goodput": result.goodput,
        "steps": result.steps,
        "redone": result.redone,
        "failures": result.failures,
        "from_storage": result.from_storage,
        "phases": dict(result.phases),
    }


def show(plan: ResiliencePlan, console: Console) -> None:
    """Print the advice."""
    from rich.table import Table

    question, advice = plan.question, plan.advice
    job, costs = question.job, question.costs
    replicas = job.hosts // job.stages
    console.print(
        f"{plan.cluster.name}: {job.hosts} hosts, {amount(job.state_bytes)} of state,"
        f" steps of {job.step_time:g} s, {replicas} pipelines of {job.stages} hosts"
    )
    after = f"after {costs.replace:g} s" if math.isfinite(costs.replace) else "when the trace says so"
    console.print(
        f"{plan.failures} failures in {question.horizon / 86400:g} days (mean {question.mtbf / 3600:.3g} h,"
        f" {question.software:.0%} software); a host is replaced {after}; between hosts"
        f" {amount(costs.peer_bandwidth)}/s for checkpoints, to storage {amount(costs.storage_bandwidth)}/s",
        style="dim",
        highlight=False,
    )
    table = Table(title="Copies in memory: memory of a host, interval, recovery after the loss of two hosts")
    for name in ("copies", "memory", "fits", "every", "two lost", "from storage"):
        table.add_column(name, justify="right")
    for choice in advice.choices:
        mark = "→ " if choice is advice.chosen else ""
        steps = "step" if choice.every == 1 else f"{choice.every} steps"
        table.add_row(
            f"{mark}{choice.copies}",
            amount(choice.memory),
            "yes" if choice.fits else "no",
            steps,
            f"{choice.pair:.2%}",
            f"{choice.fallbacks:.3g} times",
        )
    console.print(table)
    days = f"{question.horizon / 86400:g} days (emulated)"
    console.print(_ways(f"Recovery methods, {days}", advice.results, advice.scheme))
    console.print("Recommended", style="bold")
    for reason in advice.reasons:
        console.print(f"  • {reason}", highlight=False)
    console.print("Run", style="bold")
    console.print(f"  {plan.commands[advice.scheme]}", highlight=False, soft_wrap=True)
    if advice.chosen.placement.kind == "domains" and "--placement" in plan.commands[advice.scheme]:
        console.print("  and on each host: windtunnel host HOST:29400 --domain ITS-LEAF", highlight=False)


def _ways(title: str, simulation_results: Sequence[SimulationResult], best: str) -> Table:
    from rich.table import Table

    results = Table(title=title)
    results.add_column("")
    results.add_column("goodput", justify="right")
    groups = {
        "slower": ("slow",),
        "saving": ("checkpoint",),
        "redone": ("redo",),
        "waiting": ("wait",),
        "recovering": ("detect", "start", "regroup", "load", "join"),
    }
    for name in groups:
        results.add_column(name, justify="right")
    for result in sorted(simulation_results, key=lambda result: -result.goodput):
        shares = [
            f"{sum(result.phases[phase] for phase in phases) / result.horizon:.2%}"
            for phases in groups.values()
        ]
        mark = "→ " if result.scheme == best else ""
        results.add_row(f"{mark}{result.scheme}", f"{result.goodput:.2%}", *shares)
    return results
