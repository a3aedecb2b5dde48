"""An emulation as tables on the terminal, and as a page with plots."""

from __future__ import annotations

import html
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from windtunnel.base import atomic
from windtunnel.base.errors import UserError
from windtunnel.base.units import seconds
from windtunnel.report.page import figure, heading, page, plot
from windtunnel.serving.engine.emulation import Emulated
from windtunnel.serving.engine.twin.figures import PERCENTILES

if TYPE_CHECKING:
    from rich.console import Console

WORDS = {"ttft": "first token (TTFT)", "tpot": "each further token (TPOT)", "total": "end to end"}
COLUMNS = ("mean", *(f"p{one}" for one in PERCENTILES))
POINTS = 400


def headline(made: Mapping[str, Any]) -> list[tuple[str, str]]:
    """Figures in words; all of them emulated."""
    rows = [
        ("requests", f"{made['requests']:,}: {made['finished']:,} finished, {made['refused']:,} refused"),
        ("got what was promised", f"{made['attainment']:.2%}"),
        ("goodput", f"{made['goodput']:.4g} requests/s that got it"),
        (
            "throughput",
            f"{made['requests_per_second']:.4g} requests/s, {made['tokens_per_second']:,.0f} tokens/s",
        ),
        (
            "KV held",
            f"{made['kv_mean']:.1%} on average, {made['kv_peak']:.1%} at most of {made['kv_tokens']:,}",
        ),
        ("prompt tokens cached", f"{made['cached']:.2%}"),
        ("engine busy", f"{made['busy']:.1%} of {made['seconds']:,.0f} s, {made['steps']:,} steps"),
    ]  # fmt: skip
    if "cost" in made:
        cost = made["cost"]
        rows.append(
            (
                "cost",
                f"{cost['total']:.4g} in all, {cost['per_million_tokens']:.4g} a million tokens,"
                f" {cost['per_thousand_met']:.4g} a thousand requests that got what was promised",
            )
        )
    return rows


def show(emulated: Emulated, console: Console, page_at: Path | None) -> None:
    """Print it."""
    from rich.table import Table

    for name, words in emulated.about.items():
        console.print(f"{name:13}{words}", style="dim", highlight=False, soft_wrap=True)
    table = Table("emulated", *COLUMNS)
    for name, words in WORDS.items():
        table.add_row(words, *(seconds(emulated.summary[name][one]) for one in COLUMNS))
    console.print(table)
    for name, words in headline(emulated.summary):
        console.print(f"{name:22}{words}", highlight=False, soft_wrap=True)
    for words in sorted({words for part in emulated.parts for words in part.never.values()})[:3]:
        console.print(f"never served: {words}", highlight=False, soft_wrap=True)
    console.print(f"Run    {emulated.run}", highlight=False)
    if page_at is not None:
        console.print(f"Plots  {page_at}", highlight=False, soft_wrap=True)


def write_page(path: Path, emulated: Emulated) -> None:
    """Write one HTML file that needs nothing else.

    Raises:
        UserError: it cannot be written.
    """
    times = [
        (words, *(seconds(emulated.summary[name][one]) for one in COLUMNS)) for name, words in WORDS.items()
    ]
    sections = (
        (
            "times",
            "Times",
            heading("What users wait", "emulated") + _table(times, COLUMNS) + plot(_waits(emulated)),
        ),
        ("load", "Load", heading("What the engine holds", "emulated") + plot(_load(emulated))),
        ("figures", "Figures", heading("Figures", "emulated") + _table(headline(emulated.summary))),
    )
    lead = [f"{name}: {words}" for name, words in emulated.about.items()]
    text = page(
        "serve --trace", lead, sections, note=f"Run {emulated.run}. All figures are emulated.", plots=True
    )
    try:
        atomic.replace(path, text)
    except OSError as error:
        raise UserError(f"serve: --html {path} cannot be written: {error.strerror}") from None


def _table(rows: Iterable[Sequence[str]], columns: Sequence[str] = ()) -> str:
    head = "".join(f'<th scope="col" class="number">{column}</th>' for column in columns)
    body = "".join(
        f"<tr><td>{html.escape(name)}</td>"
        + "".join(f"<td{' class=number' * bool(columns)}>{html.escape(cell)}</td>" for cell in cells)
        + "</tr>"
        for name, *cells in rows
    )
    head = f"<thead><tr><th></th>{head}</tr></thead>" * bool(columns)
    return f'<div class="scroll"><table>{head}<tbody>{body}</tbody></table></div>'


def _waits(emulated: Emulated) -> Any:
    """The share of requests that wait no longer, over seconds."""
    chart = figure(
        "seconds", "share of the requests that were finished", xaxis_type="log", yaxis_tickformat=".0%"
    )
    shares = np.linspace(0, 100, POINTS)
    for name, words in WORDS.items():
        values = getattr(emulated.times, name)
        if len(values):
            chart.add_scatter(
                x=np.percentile(values, shares).tolist(), y=(shares / 100).tolist(), mode="lines", name=words
            )
    return chart


def _load(emulated: Emulated) -> Any:
    """KV, and requests that run and wait, over time."""
    chart = figure(
        "seconds", "requests", height=460, hovermode="x unified",
        yaxis2={"title": {"text": "KV held"}, "overlaying": "y", "side": "right", "tickformat": "~%"},
    )  # fmt: skip
    for place, part in enumerate(emulated.parts[:8]):
        at = [time for time, _, _, _ in part.looks]
        of = f" of replica {place}" if len(emulated.parts) > 1 else ""
        held = [tokens / emulated.summary["kv_tokens"] for _, tokens, _, _ in part.looks]
        chart.add_scatter(x=at, y=held, mode="lines", name=f"KV held{of}", yaxis="y2", line={"dash": "dot"})
        chart.add_scatter(x=at, y=[look[2] for look in part.looks], mode="lines", name=f"running{of}")
        chart.add_scatter(x=at, y=[look[3] for look in part.looks], mode="lines", name=f"waiting{of}")
    return chart
