"""The answers as one HTML file with its plots, that needs nothing else."""

from __future__ import annotations

from html import escape
from pathlib import Path
from typing import Any

from windtunnel.agents.sandbox.twin.questions import MOST_OVERHEAD, Answers
from windtunnel.base import atomic
from windtunnel.report.page import INK, figure, heading, page, plot

COLOURS = {"conversation": "#8a94a3", "files": "#e08a1e", "full": "#c02a2a", "semantic": "#2559c0"}
DENSITY = (
    "Overhead is the median over sandboxes, against the same hosts without checkpoints. A policy breaks "
    f"where that is above {MOST_OVERHEAD:.1%} or the 95th percentile of gate waits is above 1 ms."
)
NOTICE = (
    "Mean seconds of work that each sandbox of a host does again when the host goes after a notice. Policy "
    "conversation keeps nothing at the end of turns: with a notice it shows what saving at the notice alone "
    "gives. Files alone do not bring back processes, so work after the first process that matters is lost."
)
FORKS = "Seconds until the first and the last fork run, over all hosts."
LINES: tuple[tuple[str, str, dict[str, Any]], ...] = (
    ("overhead", "overhead, median", {"tickformat": ".1%"}),
    ("gate_p95", "gate wait, 95th percentile, s", {}),
    ("hidden", "checkpoints hidden in think time", {"tickformat": ".0%", "range": [0, 1.03]}),
)


def write_page(path: Path, answers: Answers, title: str) -> None:
    """Write the page, whole or not at all."""
    sections = [
        _section("hosts", "How many sandboxes on a host", DENSITY, _breaks(answers), *_densities(answers)),
        _section("notice", "What a notice saves", NOTICE, "", _notice(answers)),
        _section("forks", "One checkpoint, many forks", FORKS, "", _forks(answers)),
    ]
    shares = ", ".join(f"{name} {share:.0%}" for name, share in answers.classes.items())
    assumed = answers.assumed[0].upper() + answers.assumed[1:]
    lead = (
        f"Every figure is emulated. {answers.setting}. Turns: {shares}. {assumed}. Costs: {answers.origin}."
    )
    path.parent.mkdir(parents=True, exist_ok=True)
    atomic.replace(path, page(title, [lead], sections, plots=True))


def _section(name: str, head: str, words: str, table: str, *charts: Any) -> tuple[str, str, str]:
    return name, head, heading(head) + f"<p>{escape(words)}</p>" + table + "".join(map(plot, charts))


def _breaks(answers: Answers) -> str:
    rows = "".join(
        f"<tr><td>{escape(row.policy)}</td><td>{row.bears}</td>"
        f"<td>{row.breaks if row.breaks is not None else f'none up to {row.searched}'}</td></tr>"
        for row in answers.breaks
    )
    fits = answers.breaks[0].fits if answers.breaks else 0
    return (
        f"<table><tr><th>policy</th><th>bears</th><th>breaks at</th></tr>{rows}</table>"
        f"<p>Memory of one host holds {fits} of these sandboxes (searched up to the same number).</p>"
    )


def _densities(answers: Answers) -> list[Any]:
    charts = []
    for field, words, axis in LINES:
        chart = figure("sandboxes on each host", words, yaxis_rangemode="tozero")
        for policy in dict.fromkeys(row.policy for row in answers.densities):
            rows = [row for row in answers.densities if row.policy == policy]
            values = [max(0.0, getattr(row, field)) for row in rows]
            chart.add_scatter(
                x=[row.density for row in rows], y=values, name=policy, mode="lines+markers",
                line={"color": COLOURS[policy]},
            )  # fmt: skip
        chart.update_xaxes(tickvals=sorted({row.density for row in answers.densities}))
        chart.update_yaxes(**axis)
        charts.append(chart)
    charts[0].add_hline(y=MOST_OVERHEAD, line={"dash": "dash", "color": INK, "width": 1})
    return charts


def _notice(answers: Answers) -> Any:
    words = "work done again, s for each sandbox"
    chart = figure("notice, s", words, barmode="group", yaxis_rangemode="tozero")
    for policy in dict.fromkeys(row.policy for row in answers.spots):
        rows = [row for row in answers.spots if row.policy == policy]
        chart.add_bar(
            x=[f"{row.notice:g}" for row in rows], y=[row.seconds_lost for row in rows], name=policy,
            marker_color=COLOURS[policy], text=[f"{row.saved:.0%} whole" for row in rows],
            textposition="outside",
        )  # fmt: skip
    chart.update_xaxes(type="category")
    return chart


def _forks(answers: Answers) -> Any:
    chart = figure("forks", "seconds until they run", yaxis_rangemode="tozero")
    for part, dash in (("last", "solid"), ("first", "dot")):
        chart.add_scatter(
            x=[row.forks for row in answers.fanouts], y=[getattr(row, part) for row in answers.fanouts],
            mode="lines+markers", name=part, line={"color": COLOURS["semantic"], "dash": dash},
        )  # fmt: skip
    return chart
