"""The outcomes of a sweep side by side: what they are compared by, which are on the Pareto front, a table of
them for the terminal, and ``sweep.html``: time against memory of every point, coloured by cost.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from html import escape
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray
from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.markup import escape as markup
from rich.table import Table

from windtunnel.base import atomic, units
from windtunnel.report import text
from windtunnel.report.page import figure, heading, page, plot

Row = dict[str, Any]
"""The outcome of a point."""


@dataclass(frozen=True)
class SweepResult:
    """``rows``: outcomes in order of points, each with ``pareto``, true for those on the front.

    ``per_token``: whether points are compared by what a million tokens take and cost, which they are as soon
    as their iterations are not of equally many tokens; else by what an iteration takes.
    """

    rows: list[Row]
    per_token: bool
    cost_unit: str

    @property
    def done(self) -> list[Row]:
        return [row for row in self.rows if row["status"] == "done"]

    @property
    def failed(self) -> list[Row]:
        return [row for row in self.rows if row["status"] == "failed"]

    def time(self, row: Row) -> float:
        """Seconds of the whole job, for an iteration or for a million tokens."""
        seconds: float = row["iteration_time_s"]
        return seconds / row["tokens_per_iteration"] * 1e6 if self.per_token else seconds

    def cost(self, row: Row) -> float:
        """For a million tokens where tokens could be counted, else for an iteration."""
        cost = row["cost_per_million_tokens"]
        return float(row["cost_per_iteration"] if cost is None or not self.cost_per_token else cost)

    @property
    def cost_per_token(self) -> bool:
        return all(row["cost_per_million_tokens"] is not None for row in self.done)

    @property
    def time_title(self) -> str:
        return "seconds for a million tokens" if self.per_token else "iteration time, seconds"

    @property
    def cost_title(self) -> str:
        unit = "device hours" if self.cost_unit == "device-hours" else "cost"
        return f"{unit} for a million tokens" if self.cost_per_token else f"{unit} for an iteration"

    @property
    def columns(self) -> tuple[str, ...]:
        """What is shown of a point, in short."""
        what = "dev-h" if self.cost_unit == "device-hours" else "cost"
        cost = f"{what}/Mtok" if self.cost_per_token else f"{what}/iter"
        return ("iteration", "tok/s/dev", "MFU", "reserved", "fits", cost)

    def figures(self, row: Row) -> tuple[str, ...]:
        """The words for `columns` of a point that is done."""
        return (
            units.seconds(row["iteration_time_s"]), units.count(row["tokens_per_second_per_device"]),
            units.share(row["mfu"]), units.size(row["peak_reserved_bytes"]), "yes" if row["fits"] else "no",
            f"{self.cost(row):.4g}",
        )  # fmt: skip


def result(rows: list[Row]) -> SweepResult:
    """Compare the outcomes of a sweep by time, worst peak reserved memory and cost.

    A point that does not fit into memory is on no front, however fast it would be.
    """
    done = [row for row in rows if row["status"] == "done"]
    tokens = {row["tokens_per_iteration"] for row in done}
    plain = SweepResult(rows, len(tokens) > 1 and all(tokens), done[0]["cost_unit"] if done else "price")
    fitting = [row for row in done if row["fits"]]
    values = [(plain.time(row), row["peak_reserved_bytes"], plain.cost(row)) for row in fitting]
    front = pareto_front(np.array(values).reshape(-1, 3))
    best = {row["point"] for row, on_front in zip(fitting, front, strict=True) if on_front}
    marked = [row | {"pareto": row["point"] in best} for row in rows]
    return SweepResult(marked, plain.per_token, plain.cost_unit)


def as_json(sweep_result: SweepResult, **more: Any) -> dict[str, Any]:
    """The result as one JSON object; every figure but ``wall_time_s`` is emulated."""
    return more | {
        "rows": sweep_result.rows,
        "objectives": [sweep_result.time_title, "worst peak reserved memory, bytes", sweep_result.cost_title],
        "provenance": {"wall_time_s": "measured", "price": "declared", "other figures": "emulated"},
    }


def pareto_front(values: ArrayLike) -> NDArray[np.bool_]:
    """Which rows of ``values`` (points x objectives, the smaller the better) are on the front.

    A row is on the front unless another one is at least as good in every objective and better in one; equal
    rows are on it together. Returns a mask, shape (points,). Rows with a NaN are not on it and beat nobody.
    """
    table = np.asarray(values, np.float64)
    complete = np.array([not np.isnan(row).any() for row in table], np.bool_)
    front = complete.copy()
    for row in np.flatnonzero(complete):
        others = table[complete]
        better = (others <= table[row]).all(axis=1) & (others < table[row]).any(axis=1)
        front[row] = not better.any()
    return front


def print_sweep(sweep_result: SweepResult, console: Console, title: str) -> None:
    """Print the table of a sweep, and below it why points failed."""
    options = list(dict.fromkeys(option for row in sweep_result.rows for option in row["chosen"]))
    # Names of clusters are long: they stand above the table, and it says c1, c2.
    names = list(dict.fromkeys(row["cluster"] for row in sweep_result.rows))
    short = {name: f"c{place}" for place, name in enumerate(names, start=1)} if len(names) > 1 else {}
    if not short:
        title = f"{title} on {names[0]}"
    table = Table(box=SIMPLE_HEAD, padding=(0, 1, 0, 0), pad_edge=False)
    table.add_column("", no_wrap=True)
    table.add_column("#", justify="right", no_wrap=True)
    if short:
        table.add_column("on", no_wrap=True)
    for option in options:
        table.add_column(option.lstrip("-"), justify="right", overflow="fold")
    for name in sweep_result.columns:
        table.add_column(name, justify="right", no_wrap=True)
    for row in sweep_result.rows:
        where = [short[row["cluster"]]] if short else []
        chosen = [markup(value_text(row["chosen"].get(option))) for option in options]
        failed = row["status"] == "failed"
        table.add_row(
            "[green]★[/]" if row["pareto"] else "",
            str(row["point"]),
            *where,
            *chosen,
            *(["[red]failed[/]"] if failed else _coloured(sweep_result.figures(row))),
            style="bold" if row["pareto"] else "dim" if failed else None,
        )
    console.print(markup(title), style="bold", highlight=False)
    for name, place in short.items():
        console.print(f"  [cyan]{place}[/] {markup(name)}", highlight=False)
    console.print(table, highlight=False)
    reasons: dict[str, list[int]] = {}
    for row in sweep_result.failed:
        reasons.setdefault(row["error"], []).append(row["point"])
    for reason, points in reasons.items():
        console.print(f"[red]✗ {text.ranks(points)}[/] {markup(reason)}", highlight=False)
    if sweep_result.done:
        cost = (
            "cost is from the price given" if sweep_result.cost_unit == "price" else "a device hour costs 1"
        )
        front = "★ no point that fits is better in time, memory and cost."
        console.print(f"{front} Figures are emulated; {cost}.", style="dim", highlight=False)


def value_text(value: object) -> str:
    """A value of an option: a flag is ``yes`` or ``no``."""
    if isinstance(value, bool):
        return "yes" if value else "no"
    return str(value)


def _coloured(figures: tuple[str, ...]) -> list[str]:
    colours = {"yes": "green", "no": "red"}
    return [f"[{colours[text]}]{text}[/]" if text in colours else text for text in figures]


GIB = 2.0**30
GREEN, RED = "#1a7f37", "#b3261e"


def write_page(path: Path, sweep_result: SweepResult, title: str) -> None:
    """Write the page of a sweep, whole or not at all."""
    lead = f"{len(sweep_result.rows)} points, {len(sweep_result.failed)} failed."
    if sweep_result.done:
        lead += (
            " Green rings: no point that fits is better in time, memory and cost. All figures are emulated"
        )
        lead += (
            "; cost is from the price given."
            if sweep_result.cost_unit == "price"
            else "; no price was given."
        )
    chart = plot(_chart(sweep_result)) if sweep_result.done else ""
    sections = (
        ("points", "Points", f"{heading('Time against memory')}{chart}" if chart else ""),
        (
            "table",
            "Table",
            f'{heading("All points")}<div class="scroll">{_table(sweep_result, path.parent)}</div>',
        ),
    )
    atomic.replace(path, page(title, [lead], sections, plots=sweep_result.done != []), durable=True)


def _chart(sweep_result: SweepResult) -> Any:
    chart = figure(
        sweep_result.time_title, "worst peak reserved memory, GiB", height=560, hovermode="closest",
        xaxis_type=_scale([sweep_result.time(row) for row in sweep_result.done]), yaxis_rangemode="tozero",
    )  # fmt: skip
    costs = [sweep_result.cost(row) for row in sweep_result.done]
    scale = {"cmin": min(costs), "cmax": max(costs), "colorscale": "Viridis", "reversescale": True}
    bar = {"title": {"text": sweep_result.cost_title, "side": "right"}, "thickness": 14}
    front = sorted((row for row in sweep_result.done if row["pareto"]), key=sweep_result.time)
    fits = [row for row in sweep_result.done if row["fits"]]
    misfits = [row for row in sweep_result.done if not row["fits"]]
    marks: tuple[tuple[str, list[Row], dict[str, Any]], ...] = (
        ("Pareto front", front, {"size": 19, "symbol": "circle-open", "color": GREEN, "line": {"width": 2}}),
        ("fits", fits, {"size": 11, "symbol": "circle"} | scale),
        ("does not fit", misfits, {"size": 11, "symbol": "x"} | scale),
    )  # fmt: skip
    for name, rows, marker in marks:
        if not rows:
            continue
        coloured = "cmin" in marker
        if coloured:
            marker |= {
                "color": [sweep_result.cost(row) for row in rows],
                "colorbar": bar,
                "showscale": rows is (fits or misfits),
            }
        chart.add_scatter(
            x=[sweep_result.time(row) for row in rows], y=[row["peak_reserved_bytes"] / GIB for row in rows],
            mode="markers", name=name, marker=marker, text=[_hover(sweep_result, row) for row in rows],
            hovertemplate="%{text}<extra></extra>", hoverinfo="text" if coloured else "skip",
        )  # fmt: skip
    highest = max(row["peak_reserved_bytes"] for row in sweep_result.done)
    for size in sorted({row["memory_bytes"] for row in sweep_result.done}):
        if size > 2 * highest:
            continue  # the limit is far away, and showing it would press all points to the bottom
        chart.add_hline(
            y=size / GIB, line={"dash": "dot", "color": RED, "width": 1},
            annotation={"text": f"device memory {units.size(size)}", "font": {"color": RED, "size": 11}},
        )  # fmt: skip
    return chart


def _scale(values: list[float]) -> str:
    """Over a wide range small differences would vanish."""
    return "log" if min(values) > 0 and max(values) > 20 * min(values) else "linear"


def _chosen(row: Row) -> str:
    return " ".join(f"{option} {value_text(value)}" for option, value in row["chosen"].items())


def _hover(sweep_result: SweepResult, row: Row) -> str:
    words = zip(sweep_result.columns, sweep_result.figures(row), strict=True)
    lines = [f"<b>{row['point']}: {escape(_chosen(row))}</b>", escape(row["cluster"])]
    return "<br>".join([*lines, *map(" ".join, words), f"run {row['run_id']}"])


def _table(sweep_result: SweepResult, folder: Path) -> str:
    numbers = "".join(f"<th class=number>{escape(name)}</th>" for name in sweep_result.columns)
    head = f"<th class=number>#</th><th>cluster</th><th>arguments</th>{numbers}<th>run</th>"
    lines = "".join(_line(sweep_result, row, folder) for row in sweep_result.rows)
    return f"<table><tr>{head}</tr>{lines}</table>"


def _line(sweep_result: SweepResult, row: Row, folder: Path) -> str:
    what = f'<td class="number">{row["point"]}</td>' + "".join(
        f"<td>{escape(words)}</td>" for words in (row["cluster"], _chosen(row))
    )
    if row["status"] == "failed":
        columns = len(sweep_result.columns) + 1
        return f'<tr>{what}<td class="bad" colspan="{columns}">{escape(row["error"])}</td></tr>'
    cells = "".join(
        f'<td class="number{" bad" if cell == "no" else ""}">{escape(cell)}</td>'
        for cell in sweep_result.figures(row)
    )
    front = ' class="front"' if row["pareto"] else ""
    return f"<tr{front}>{what}{cells}<td>{_run_link(row, folder)}</td></tr>"


def _run_link(row: Row, folder: Path) -> str:
    report = Path(row["directory"], "report.html")
    if not report.is_file():
        return escape(row["run_id"])
    return f'<a href="{escape(os.path.relpath(report, folder))}">{escape(row["run_id"])}</a>'
