"""The sections of the page as HTML, each from the summary; an empty string where there is nothing to show.

Everything that comes from a run is escaped here: names of operators, paths and warnings may hold anything.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from html import escape
from typing import Any

import numpy as np

from windtunnel.base import units
from windtunnel.report import text
from windtunnel.report.tables import VERDICT_STYLES
from windtunnel.report.text import Summary
from windtunnel.report.timeline import HeatMap

_PATH_COLOURS = {
    "compute": "compute",
    "pipeline_bubble": "bubble",
    "imbalance": "imbalance",
    "launch": "launch",
    "idle": "idle",
}


def cards(summary: Summary) -> str:
    """The headline figures; each says whether it is emulated, measured or published."""
    found = []
    first = summary.get("first_iteration_time_s")
    tokens, wall = summary.get("tokens_per_iteration"), summary.get("wall_time_s")
    flops = summary.get("model_flops_per_iteration"), summary.get("hardware_flops_per_iteration")
    rows: tuple[tuple[str, str, Callable[[float], str], str], ...] = (
        (
            "iteration_time_s",
            "Iteration time",
            units.seconds,
            f"first one {units.seconds(first)}" if first else "",
        ),
        (
            "tokens_per_second_per_device",
            "Tokens/s per device",
            units.count,
            f"{units.count(tokens)} an iteration" if tokens else "",
        ),
        ("mfu", "MFU", units.share, f"{units.decimal(flops[0])}FLOP of the model" if flops[0] else ""),
        ("hfu", "HFU", units.share, f"{units.decimal(flops[1])}FLOP run" if flops[1] else ""),
    )
    for field, name, form, about_it in rows:
        if summary.get(field):
            found.append(_card(name, form(summary[field]), text.provenance(summary, field), about_it))
    classes = summary.get("ranks") or ()
    if classes:
        worst = min(classes, key=lambda one: one.get("headroom_bytes", 0))
        word = text.verdict(worst)
        of = f"of {units.size(worst.get('memory_bytes'))}, ranks {worst['name']}"
        verdict = f'<span class="verdict {VERDICT_STYLES[word]}">{word}</span> {escape(of)}'
        peak = units.size(worst.get("peak_reserved_bytes"))
        found.append(
            _card(
                "Peak memory reserved", peak, text.provenance(summary, "peak_reserved_bytes"), verdict, True
            )
        )
    if wall:
        rss = summary.get("peak_rss_bytes")
        note = f"{units.size(rss)} of memory" if rss else ""
        found.append(_card("This run took", units.seconds(wall), "measured", note))
    return f'<dl class="cards">{"".join(found)}</dl>'


def _card(name: str, value: str, origin: str, about_it: str, is_html: bool = False) -> str:
    note = about_it if is_html else escape(about_it)
    return (
        f'<div class="card"><dt>{name}</dt><dd class="value">{escape(value)}</dd>'
        f'<dd class="about"><span class="tag">{escape(origin)}</span> {note}</dd></div>'
    )


def critical_path(summary: Summary) -> str:
    """The split of the iteration as a bar with its legend."""
    parts = text.path_parts(summary)
    if not parts:
        return ""
    bar, legend, tone = [], [], 0
    for key, seconds, share in parts:
        paint = f"var(--{_PATH_COLOURS.get(key, 'host')})"
        if key.startswith("communication"):
            # Kinds of communication are tones of one colour.
            paint = f"color-mix(in srgb, var(--communication) {max(40, 100 - 20 * tone)}%, var(--paper))"
            tone += 1
        words = f"{text.path_label(key)} {units.seconds(seconds)} ({units.share(share)})"
        inside = units.share(share) if share > 0.06 else ""
        bar.append(
            f'<span style="flex:{share:.6f} 0 0;background:{paint}{";padding:0" if not inside else ""}"'
            f' title="{escape(words)}">{inside}</span>'
        )
        legend.append(
            f'<li><span class="swatch" style="background:{paint}"></span>{escape(text.path_label(key))}'
            f" <b>{units.seconds(seconds)}</b> {units.share(share)}</li>"
        )
    whole = units.seconds(summary.get("iteration_time_s"))
    which = f"critical path{text.critical(summary)}, {whole} in all, emulated"
    return (
        f"<h2>Where the iteration goes <small>{which}</small></h2>"
        f'<div class="bar" aria-hidden="true">{"".join(bar)}</div><ul class="legend">{"".join(legend)}</ul>'
    )


def waits(summary: Summary) -> str:
    """The largest waits, each with what would change it."""
    items = [
        f"<li><b>{units.seconds(wait['seconds'])}</b> {units.share(wait['share'])}"
        f'<p>{escape(str(wait["what"]))}</p><p class="remedy">{escape(str(wait["remedy"]))}</p></li>'
        for wait in (summary.get("waits") or ())[:3]
    ]
    if not items:
        return ""
    head = "<h2>What it waits for <small>the largest, and what would change them</small></h2>"
    return f'{head}<ol class="waits">{"".join(items)}</ol>'


def timeline_section(spans: Mapping[str, Any] | None, note: str) -> str:
    """The frame of the timeline; the script draws it."""
    if spans is None:
        return ""
    boxes = "".join(
        f'<label><input type="checkbox" value="{rank}"{" checked" if i < 4 else ""}> {rank}</label>'
        for i, rank in enumerate(spans["ranks"])
    )
    legend = "".join(
        f'<li><span class="swatch" style="background:var(--{escape(kind)})"></span>{escape(kind)}</li>'
        for kind in spans["used"]
    )
    return (
        "<h2>Timeline <small>one steady iteration, emulated</small></h2>"
        '<div class="tools"><button data-zoom="in" aria-label="Zoom in">+</button>'
        '<button data-zoom="out" aria-label="Zoom out">−</button><button data-zoom="all">All</button>'
        '<input type="search" placeholder="Find a name…" aria-label="Highlight spans by name">'
        f"<fieldset><legend>Ranks</legend>{boxes}</fieldset></div>"
        '<div><canvas tabindex="0" role="img" aria-label="Timeline of the chosen ranks. Arrow keys move,'
        ' plus and minus zoom, Home shows all."></canvas></div>'
        f'<ul class="legend">{legend}</ul>'
        '<p class="note">Drag to move; Ctrl and wheel, or + and − to zoom; a double click goes to a span.'
        f" {escape(note)}</p><noscript>The timeline needs JavaScript.</noscript>"
    )


def heat_section(heat: HeatMap) -> str:
    """The frame of the heat map; the script draws it."""
    value, devices = heat.value, heat.value.shape[1]
    extremes = []
    for word, rank in (("least", int(np.nanargmin(value))), ("most", int(np.nanargmax(value)))):
        figure = units.figure(float(value.flat[rank]), heat.unit)
        extremes.append(f"{word} {figure} (rank {rank}, host {rank // devices})")
    mean = units.figure(float(np.nanmean(value)), heat.unit)
    words = f"{extremes[0]}, mean {mean}, {extremes[1]}"
    return (
        f"<h2>{escape(heat.title)} <small>a column is a host, a square a device; emulated</small></h2>"
        f'<div><canvas role="img" aria-label="{escape(words)}"></canvas></div>'
        f'<p class="note">{escape(words)}</p>'
    )


def cluster(summary: Summary, picture: str) -> str:
    """The cluster as a picture of text."""
    name = (summary.get("cluster") or {}).get("name", "")
    if not picture and not name:
        return ""
    drawn = f"<pre>{escape(picture)}</pre>" if picture else ""
    return f"<h2>Cluster <small>{escape(str(name))}</small></h2>{drawn}{_pairs(summary.get('cluster') or {})}"


def warnings(summary: Summary) -> str:
    """Warnings, and where the emulation is an approximation."""
    parts = []
    for field, title, style in (
        ("warnings", "Warnings", "warnings"),
        ("approximations", "Approximations", "plain"),
    ):
        items = "".join(f"<li>{escape(str(item))}</li>" for item in summary.get(field) or ())
        if items:
            parts.append(f'<h2>{title}</h2><ul class="{style}">{items}</ul>')
    return "".join(parts)


def about(summary: Summary) -> str:
    """What went in: the command, its options, the versions, the ranks that were captured."""
    command = summary.get("command") or {}
    options = {
        key: value for key, value in (command.get("options") or {}).items() if value not in (None, "", [])
    }
    captured = summary.get("captured_ranks") or []
    pairs = {
        "command": text.command_line(summary),
        **{f"option {key}": value for key, value in options.items()},
        "captured ranks": f"{text.ranks(captured)} of {summary.get('world_size', units.NONE)}"
        if captured
        else "",
        "captured steps": summary.get("steps_captured", ""),
        **(summary.get("versions") or {}),
        "schema": summary.get("schema", ""),
    }
    return f"<h2>Inputs</h2>{_pairs({key: value for key, value in pairs.items() if value != ''})}"


def _pairs(pairs: Mapping[str, Any]) -> str:
    rows = []
    for key, value in pairs.items():
        shown = value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
        rows.append(f"<dt>{escape(str(key).replace('_', ' '))}</dt><dd>{escape(shown)}</dd>")
    return f'<dl class="pairs">{"".join(rows)}</dl>'
