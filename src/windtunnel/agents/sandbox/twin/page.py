"""The answers as one HTML file with its plots, that needs nothing else."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from html import escape
from pathlib import Path
from typing import Any

from windtunnel.agents.sandbox.twin.answers import Answers
from windtunnel.agents.sandbox.twin.questions import MOST_OVERHEAD, Density
from windtunnel.base import atomic
from windtunnel.report.page import INK, figure, heading, page, plot

COLOURS = {
    "conversation": "#8a94a3",
    "files": "#e08a1e",
    "full": "#c02a2a",
    "full-fifo": "#d98a8a",
    "semantic": "#2559c0",
    "semantic-fifo": "#8fb0ea",
}


def write_page(path: Path, found: Answers, title: str) -> None:
    """Write the page, whole or not at all."""
    parts = (
        ("hosts", "How many sandboxes on a host", _density_words(found), [_overhead, _gate, _hidden]),
        ("notice", "What a notice saves", _SPOT, [_spot]),
        ("forks", "One checkpoint, many forks", _FORKS, [_forks]),
        ("queue", "What the urgent queue is worth", _QUEUE, [_queue]),
        ("store", "How the store grows", _STORE, [_store]),
    )
    sections = []
    for name, head, words, charts in parts:
        body = heading(head) + f"<p>{escape(words)}</p>" + (_breaks(found) if name == "hosts" else "")
        sections.append((name, head, body + "".join(plot(chart(found)) for chart in charts)))
    shares = ", ".join(f"{name} {share:.0%}" for name, share in found.classes.items())
    lead = (
        f"Every figure is emulated. {found.setting}. Turns: {shares}. "
        f"{found.assumed[0].upper()}{found.assumed[1:]}. Costs: {found.origin}."
    )
    path.parent.mkdir(parents=True, exist_ok=True)
    atomic.replace(path, page(title, [lead], sections, plots=True))


_SPOT = (
    "Mean seconds of work that each sandbox of a host does again when the host goes after a notice. Policy "
    "conversation keeps nothing at the end of turns: with a notice it shows what saving at the notice alone "
    "gives. Files alone do not bring back processes, so work after the first process that matters is lost."
)
_FORKS = "Seconds until the first and the last fork run, over all hosts."
_QUEUE = (
    "99th percentile of the seconds that a reply waits, with the urgent queue and with one queue in order "
    "of arrival, by the number of workers. Where every job has a worker at once there is no queue to order."
)
_STORE = (
    "Bytes that the store of one host holds under the default retention (upper bound), and dotted the bytes "
    "that were written to it."
)


def _density_words(found: Answers) -> str:
    return (
        "Overhead is the median over sandboxes, against the same hosts without checkpoints. A policy breaks "
        f"where that is above {MOST_OVERHEAD:.1%} or the 95th percentile of gate waits is above 1 ms."
    )


def _breaks(found: Answers) -> str:
    rows = "".join(
        f"<tr><td>{escape(row.policy)}</td><td>{row.bears}</td>"
        f"<td>{row.breaks if row.breaks is not None else f'none up to {row.searched}'}</td></tr>"
        for row in found.breaks
    )
    fits = found.breaks[0].fits if found.breaks else 0
    return (
        f"<table><tr><th>policy</th><th>bears</th><th>breaks at</th></tr>{rows}</table>"
        f"<p>Memory of one host holds {fits} of these sandboxes (searched up to the same number).</p>"
    )


def _figure(x: str, y: str, **layout: Any) -> Any:
    return figure(x, y, yaxis_rangemode="tozero", **layout)


def _lines(found: Answers, y: str, value: Callable[[Density], float], *, percent: bool = False) -> Any:
    chart = _figure("sandboxes on each host", y)
    for policy in _unique(row.policy for row in found.densities):
        rows = [row for row in found.densities if row.policy == policy]
        chart.add_scatter(
            x=[row.density for row in rows],
            y=[value(row) for row in rows],
            mode="lines+markers",
            name=policy,
            line={"color": COLOURS[policy], "dash": "dot" if policy.endswith("-fifo") else "solid"},
        )
    chart.update_xaxes(tickvals=sorted({row.density for row in found.densities}))
    if percent:
        chart.update_yaxes(tickformat=".1%")
    return chart


def _overhead(found: Answers) -> Any:
    chart = _lines(found, "overhead, median", lambda row: max(0.0, row.overhead), percent=True)
    chart.add_hline(
        y=MOST_OVERHEAD,
        line={"dash": "dash", "color": INK, "width": 1},
        annotation={"text": f"{MOST_OVERHEAD:.1%}", "font": {"size": 11}},
    )
    return chart


def _gate(found: Answers) -> Any:
    return _lines(found, "gate wait, 95th percentile, s", lambda row: row.gate_p95)


def _hidden(found: Answers) -> Any:
    chart = _lines(found, "checkpoints hidden in think time", lambda row: row.hidden)
    chart.update_yaxes(tickformat=".0%", range=[0, 1.03])
    return chart


def _spot(found: Answers) -> Any:
    chart = _figure("notice, s", "work done again, s for each sandbox", barmode="group")
    for policy in _unique(row.policy for row in found.spots):
        rows = [row for row in found.spots if row.policy == policy]
        chart.add_bar(
            x=[f"{row.notice:g}" for row in rows],
            y=[row.seconds_lost for row in rows],
            name=policy,
            marker_color=COLOURS[policy],
            text=[f"{row.saved:.0%} whole" for row in rows],
            textposition="outside",
        )
    chart.update_xaxes(type="category")
    return chart


def _forks(found: Answers) -> Any:
    chart = _figure("forks", "seconds until they run")
    for part, dash in (("last", "solid"), ("first", "dot")):
        chart.add_scatter(
            x=[row.forks for row in found.fanouts],
            y=[getattr(row, part) for row in found.fanouts],
            mode="lines+markers",
            name=part,
            line={"color": "#2559c0", "dash": dash},
        )
    return chart


def _queue(found: Answers) -> Any:
    chart = _figure("policy, sandboxes, workers", "gate wait, 99th percentile, s", barmode="group")
    names = [f"{row.policy}, {row.density}, {row.workers}" for row in found.urgents]
    chart.add_bar(x=names, y=[row.p99 for row in found.urgents], name="urgent queue", marker_color="#2559c0")
    chart.add_bar(
        x=names, y=[row.p99_fifo for row in found.urgents], name="one queue", marker_color="#8fb0ea"
    )
    return chart


def _store(found: Answers) -> Any:
    chart = _figure("seconds", "MB")
    for policy in _unique(row.policy for row in found.growths):
        rows = [row for row in found.growths if row.policy == policy]
        for part, dash in (("stored", "solid"), ("written", "dot")):
            chart.add_scatter(
                x=[row.at for row in rows],
                y=[getattr(row, part) / 1e6 for row in rows],
                mode="lines",
                name=f"{policy}, {part}",
                line={"color": COLOURS[policy], "dash": dash},
            )
    return chart


def _unique(names: Iterable[str]) -> list[str]:
    return list(dict.fromkeys(names))
