"""The advice as a page with plots: progress over time, and where the time of every scheme goes."""

from __future__ import annotations

import html
from pathlib import Path
from typing import Any

from windtunnel.base import atomic
from windtunnel.base.errors import UserError
from windtunnel.training.goodput.advise import Advice, Question
from windtunnel.training.goodput.twin.model import PHASES, Flight

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
    figures = (progress(question, advice), breakdown(advice))
    plots = "".join(
        figure.to_html(full_html=False, include_plotlyjs=index == 0, config={"displaylogo": False})
        for index, figure in enumerate(figures)
    )
    text = (
        "<!doctype html><html lang=en><meta charset=utf-8><title>Resilience</title>"
        "<style>body{font:15px/1.5 system-ui;max-width:1100px;margin:2rem auto;padding:0 1rem;color:#222}"
        f"</style><h1>Resilience of {html.escape(cluster)}</h1>"
        f"<p>Everything on this page is <b>emulated</b>.</p><ul>{reasons}</ul>{plots}</html>"
    )
    try:
        atomic.replace(path, text)
    except OSError as error:
        raise UserError(f"plan: --html {path} cannot be written: {error.strerror}") from None


def progress(question: Question, advice: Advice) -> Any:
    """Work that is kept over time, in days of undisturbed training."""
    import plotly.graph_objects as plotly

    figure = plotly.Figure()
    day = 86400.0
    for flight in sorted(advice.flights, key=lambda flight: -flight.goodput):
        times, steps = _thinned(flight)
        done = [count * question.job.step_time / day for count in steps]
        figure.add_scatter(x=[time / day for time in times], y=done, mode="lines", name=flight.scheme)
    whole = question.horizon / day
    figure.add_scatter(
        x=[0, whole], y=[0, whole], mode="lines", name="no failures", line={"dash": "dot", "color": "#999"}
    )
    figure.update_layout(
        template="plotly_white",
        height=520,
        title="Progress",
        xaxis_title="days",
        yaxis_title="days of undisturbed training done",
        hovermode="x unified",
    )
    return figure


def breakdown(advice: Advice) -> Any:
    """Where the time goes, a bar for each scheme."""
    import plotly.graph_objects as plotly

    figure = plotly.Figure()
    flights = sorted(advice.flights, key=lambda flight: flight.goodput)
    names = [flight.scheme for flight in flights]
    for phase in PHASES:
        shares = [flight.phases[phase] / flight.horizon for flight in flights]
        if any(shares):
            figure.add_bar(y=names, x=shares, name=phase, orientation="h", marker_color=COLOURS[phase])
    figure.update_layout(
        template="plotly_white",
        barmode="stack",
        height=420,
        title="Where the time goes",
        xaxis={"tickformat": ".0%", "range": [0, 1]},
    )
    return figure


def _thinned(flight: Flight) -> tuple[list[float], list[float]]:
    """The series with no more points than a plot can show."""
    every = max(1, len(flight.series) // MOST_POINTS)
    points = [*flight.series[::every], flight.series[-1]]
    return [time for time, _ in points], [steps for _, steps in points]
