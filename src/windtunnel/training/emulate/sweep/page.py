"""``sweep.html``: time against memory of every point, coloured by cost, and the table, in one file."""

from __future__ import annotations

import os
from html import escape
from pathlib import Path
from typing import Any

from windtunnel.base import atomic, units
from windtunnel.report.page import figure, heading, page, plot
from windtunnel.training.emulate.sweep.result import Row, SweepResult, value_text

GIB = 2.0**30
GREEN, RED = "#1a7f37", "#b3261e"


def write_page(path: Path, found: SweepResult, title: str) -> None:
    """Write the page of a sweep, whole or not at all."""
    lead = f"{len(found.rows)} points, {len(found.failed)} failed."
    if found.done:
        lead += (
            " Green rings: no point that fits is better in time, memory and cost. All figures are emulated"
        )
        lead += "; cost is from the price given." if found.cost_unit == "price" else "; no price was given."
    chart = plot(_chart(found)) if found.done else ""
    sections = (
        ("points", "Points", f"{heading('Time against memory')}{chart}" if chart else ""),
        ("table", "Table", f'{heading("All points")}<div class="scroll">{_table(found, path.parent)}</div>'),
    )
    atomic.replace(path, page(title, [lead], sections, plots=found.done != []), durable=True)


def _chart(found: SweepResult) -> Any:
    chart = figure(
        found.time_title,
        "worst peak reserved memory, GiB",
        height=560,
        hovermode="closest",
        xaxis_type=_scale([found.time(row) for row in found.done]),
        yaxis_rangemode="tozero",
    )
    costs = [found.cost(row) for row in found.done]
    scale = {"cmin": min(costs), "cmax": max(costs), "colorscale": "Viridis", "reversescale": True}
    bar = {"title": {"text": found.cost_title, "side": "right"}, "thickness": 14}
    front = sorted((row for row in found.done if row["pareto"]), key=found.time)
    fits = [row for row in found.done if row["fits"]]
    misfits = [row for row in found.done if not row["fits"]]
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
                "color": [found.cost(row) for row in rows],
                "colorbar": bar,
                "showscale": rows is (fits or misfits),
            }
        chart.add_scatter(
            x=[found.time(row) for row in rows], y=[row["peak_reserved_bytes"] / GIB for row in rows],
            mode="markers", name=name, marker=marker, text=[_hover(found, row) for row in rows],
            hovertemplate="%{text}<extra></extra>", hoverinfo="text" if coloured else "skip",
        )  # fmt: skip
    highest = max(row["peak_reserved_bytes"] for row in found.done)
    for size in sorted({row["memory_bytes"] for row in found.done}):
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


def _hover(found: SweepResult, row: Row) -> str:
    lines = [
        f"<b>{row['point']}: {escape(_chosen(row))}</b>", escape(row["cluster"]),
        f"iteration {units.seconds(row['iteration_time_s'])}",
        f"{units.count(row['tokens_per_second_per_device'])} tokens/s per device",
        f"MFU {units.share(row['mfu'])}",
        f"reserved {units.size(row['peak_reserved_bytes'])} of {units.size(row['memory_bytes'])}",
        f"{found.cost_title}: {found.cost(row):.4g}", f"run {row['run_id']}",
    ]  # fmt: skip
    return "<br>".join(lines)


def _table(found: SweepResult, folder: Path) -> str:
    texts = ("cluster", "arguments", "run")
    heads = (
        "#",
        "cluster",
        "arguments",
        "iteration",
        "tokens/s/device",
        "MFU",
        "reserved",
        "headroom",
        "fits",
    )
    head = "".join(
        f"<th{'' if name in texts else ' class=number'}>{escape(name)}</th>"
        for name in (*heads, found.cost_title, "run")
    )
    return f"<table><tr>{head}</tr>{''.join(_line(found, row, folder) for row in found.rows)}</table>"


def _line(found: SweepResult, row: Row, folder: Path) -> str:
    what = f'<td class="number">{row["point"]}</td>' + "".join(
        f"<td>{escape(words)}</td>" for words in (row["cluster"], _chosen(row))
    )
    if row["status"] == "failed":
        return f'<tr>{what}<td class="bad" colspan="8">{escape(row["error"])}</td></tr>'
    cells = (
        units.seconds(row["iteration_time_s"]), units.count(row["tokens_per_second_per_device"]),
        units.share(row["mfu"]), units.size(row["peak_reserved_bytes"]), units.size(row["headroom_bytes"]),
        "yes" if row["fits"] else "no",
        f"{found.cost(row):.4g}",
    )  # fmt: skip
    figures = "".join(
        f'<td class="number{" bad" if cell == "no" else ""}">{escape(cell)}</td>' for cell in cells
    )
    front = ' class="front"' if row["pareto"] else ""
    run = f"<td>{_run_link(row, folder)}</td>"
    return f"<tr{front}>{what}{figures}{run}</tr>"


def _run_link(row: Row, folder: Path) -> str:
    report = Path(row["directory"], "report.html")
    if not report.is_file():
        return escape(row["run_id"])
    return f'<a href="{escape(os.path.relpath(report, folder))}">{escape(row["run_id"])}</a>'
