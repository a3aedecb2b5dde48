"""The advice as a page with plots: progress over time, and where the time of every scheme goes."""

from __future__ import annotations

import html
from pathlib import Path
from typing import Any

from windtunnel.base import atomic
from windtunnel.base.errors import UserError
from windtunnel.report.page import figure, heading, page, plot
from windtunnel.training.goodput.advise import Advice, Question
from windtunnel.training.goodput.twin.model import PHASES, SimulationResult

COLOURS = {
    "useful": "#2a9d8f", "slow": "#8ab17d", "checkpoint": "#e9c46a", "redo": "#e76f51", "detect": "#6d597a",
    "wait": "#264653", "start": "#457b9d", "regroup": "#a8dadc", "load": "#f4a261", "join": "#b5838d",
}  # fmt: skip
MOST_POINTS = 2000


def write_page(path: Path, cluster: str, question: Question, advice: Advice) -> None:
    """Write one HTML file that needs nothing else.

    Raises:
        UserError: it cannot be written.
    """
    reasons = "".join(f"<li>{html.escape(reason)}</li>" for reason in advice.reasons)
    sections = (
        ("advice", "Advice", f'{heading("Advice")}<ul class="plain">{reasons}</ul>'),
        ("progress", "Progress", heading("Progress") + plot(progress(question, advice))),
        ("time", "Time", heading("Where the time goes") + plot(breakdown(advice))),
    )
    text = page(f"Resilience of {cluster}", ["Everything on this page is emulated."], sections, plots=True)
    try:
        atomic.replace(path, text)
    except OSError as error:
        raise UserError(f"plan: --html {path} cannot be written: {error.strerror}") from None


def progress(question: Question, advice: Advice) -> Any:
    """Work that is kept over time, in days of undisturbed training."""
    chart = figure("days", "days of undisturbed training done", height=520, hovermode="x unified")
    day = 86400.0
    for result in sorted(advice.results, key=lambda result: -result.goodput):
        times, steps = _thinned(result)
        done = [count * question.job.step_time / day for count in steps]
        chart.add_scatter(x=[time / day for time in times], y=done, mode="lines", name=result.scheme)
    whole = question.horizon / day
    chart.add_scatter(
        x=[0, whole], y=[0, whole], mode="lines", name="no failures", line={"dash": "dot", "color": "#999"}
    )
    return chart


def breakdown(advice: Advice) -> Any:
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
