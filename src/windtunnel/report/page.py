"""The one style of all pages: HTML files that need nothing else, no network, light and dark.

`page` is the frame with the style sheet; `figure` and `plot` make Plotly's charts look like the rest of it.
A page with such charts carries plotly.js (4.5 MB) once; the report of a run, of which there may be thousands,
has small canvases of its own instead.
"""

from __future__ import annotations

from collections.abc import Sequence
from html import escape
from importlib.resources import files
from typing import Any

GRID = "rgba(128, 136, 150, .28)"
INK = "#7b8496"
"""A grey that can be read on light and on dark paper, which a chart cannot tell apart."""

Section = tuple[str, str, str]
"""Anchor, word in the navigation, and HTML; one without HTML is left out."""


def page(
    title: str, lead: Sequence[str], sections: Sequence[Section], *, note: str = "", alarm: str = "",
    footer: str = "", tail: str = "", code: bool = False, plots: bool = False,
) -> str:  # fmt: skip
    """The whole page. ``title``, ``lead`` (paragraphs), ``note`` and ``footer`` are text and are escaped, and
    so is ``alarm``, a sentence that is seen before everything else.

    ``tail``: HTML at the end of the body, such as scripts. ``code``: the
    title is a command line. ``plots``: sections hold what `plot` made.
    """
    filled = [(name, word, body) for name, word, body in sections if body]
    links = "".join(f'<a href="#{name}">{escape(word)}</a>' for name, word, _ in filled)
    nav = f'<nav aria-label="Sections"><div class="frame">{links}</div></nav>' if len(filled) > 1 else ""
    script = f"<script>{_plotly_js()}</script>" if plots else ""
    return f"""<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta name="generator" content="windtunnel">
<link rel="icon" href="data:,">
<title>{escape(title)} · windtunnel</title>
<style>
{resource("style.css")}</style>
{script}</head>
<body>
<header><div class="frame">
{f'<p class="alarm" role="alert">{escape(alarm)}</p>' if alarm else ""}
<div class="brand">windtunnel</div>
<h1{' class="code"' if code else ""}>{escape(title)}</h1>
{"".join(f"<p>{escape(paragraph)}</p>" for paragraph in lead)}
{f'<p class="note">{escape(note)}</p>' if note else ""}
</div></header>
{nav}
<main class="frame">
{"".join(f'<section id="{name}">{body}</section>' for name, _, body in filled)}
</main>
<footer class="frame">{escape(footer)}</footer>
{tail}</body>
</html>
"""


def heading(words: str, about: str = "") -> str:
    """The heading of a section, with a remark beside it."""
    remark = f" <small>{escape(about)}</small>" if about else ""
    return f"<h2>{escape(words)}{remark}</h2>"


def figure(x: str, y: str, *, height: int = 380, **layout: Any) -> Any:
    """An empty chart of Plotly in the page's style; ``x`` and ``y`` are the titles of its axes."""
    import plotly.graph_objects as plotly

    axis = {"gridcolor": GRID, "zerolinecolor": GRID, "linecolor": GRID}
    chart = plotly.Figure()
    chart.update_layout(
        height=height, margin={"l": 70, "r": 20, "t": 30, "b": 50}, paper_bgcolor="rgba(0,0,0,0)",
        plot_bgcolor="rgba(0,0,0,0)", font={"family": "system-ui, sans-serif", "size": 13, "color": INK},
        xaxis={"title": {"text": x}, **axis}, yaxis={"title": {"text": y}, **axis},
        legend={"orientation": "h", "y": 1.08, "x": 0},
    )  # fmt: skip
    chart.update_layout(**layout)
    return chart


def plot(chart: Any) -> str:
    """A figure as HTML for a page with ``plots``."""
    return str(chart.to_html(full_html=False, include_plotlyjs=False, config={"displaylogo": False}))


def resource(name: str) -> str:
    """A file of the folder ``assets``: the style sheet, or a script."""
    return (files("windtunnel.report") / "assets" / name).read_text(encoding="utf-8")


def _plotly_js() -> str:
    from plotly.offline import get_plotlyjs

    return str(get_plotlyjs())
