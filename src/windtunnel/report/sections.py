"""The sections of the page as HTML, each from the summary; an empty string where there is nothing to show.

Pictures come first, then the tables: memory by class of ranks, collectives, operators. Everything that comes
from a run is escaped here: names of operators, paths and warnings may hold anything.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from html import escape
from typing import Any

import numpy as np

from windtunnel.base import units
from windtunnel.report import text
from windtunnel.report.page import heading
from windtunnel.report.text import Summary
from windtunnel.report.timeline import HeatMap

_PATH_COLOURS = {"pipeline_bubble": "bubble", "compute": "compute", "imbalance": "imbalance",
                 "launch": "launch", "idle": "idle"}  # fmt: skip


def cards(summary: Summary) -> str:
    """The headline figures; each says whether it is emulated, measured or published."""
    rows = [_card(*row) for row in text.headline(summary)]
    classes = summary.get("ranks") or ()
    if classes:
        worst = min(classes, key=lambda group: group.get("headroom_bytes", 0))
        word = text.verdict(worst)
        of = f"of {units.size(worst.get('memory_bytes'))}, ranks {worst['name']}"
        verdict = f'<span class="verdict {VERDICT_STYLES[word]}">{word}</span> {escape(of)}'
        peak = units.size(worst.get("peak_reserved_bytes"))
        origin = text.provenance(summary, "peak_reserved_bytes")
        rows.append(_card("Peak memory reserved", peak, origin, verdict, True))
    if wall := summary.get("wall_time_s"):
        rss = summary.get("peak_rss_bytes")
        note = f"{units.size(rss)} of memory" if rss else ""
        rows.append(_card("This run took", units.seconds(wall), "measured", note))
    return f'<dl class="cards">{"".join(rows)}</dl>'


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
        heading("Where the iteration goes", which)
        + f'<div class="bar" aria-hidden="true">{"".join(bar)}</div><ul class="legend">{"".join(legend)}</ul>'
    )


def period(summary: Summary) -> str:
    """The kinds of steps that repeat, where not all are alike."""
    rows = text.period(summary)
    names = rows[0] if rows else ()
    columns: list[Column] = [(name, False, lambda row, name=name: (row[name], None)) for name in names]  # type: ignore[misc]
    return heading("The steps that repeat", "emulated") + _table(columns, rows) if rows else ""


def waits(summary: Summary) -> str:
    """The largest waits, each with what would change it."""
    items = [
        f"<li><b>{units.seconds(wait['seconds'])}</b> {units.share(wait['share'])}"
        f'<p>{escape(str(wait["what"]))}</p><p class="remedy">{escape(str(wait["remedy"]))}</p></li>'
        for wait in (summary.get("waits") or ())[:3]
    ]
    if not items:
        return ""
    head = heading("What it waits for", "the largest, and what would change them")
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
        heading("Timeline", "the steps that repeat, emulated")
        + '<div class="tools"><button data-zoom="in" aria-label="Zoom in">+</button>'
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
        heading(heat.title, "a column is a host, a square a device; emulated")
        + f'<div><canvas role="img" aria-label="{escape(words)}"></canvas></div>'
        f'<p class="note">{escape(words)}</p>'
    )


def cluster(summary: Summary, picture: str) -> str:
    """The cluster as a picture of text."""
    name = (summary.get("cluster") or {}).get("name", "")
    if not picture and not name:
        return ""
    drawn = f"<pre>{escape(picture)}</pre>" if picture else ""
    return heading("Cluster", str(name)) + drawn + _pairs(summary.get("cluster") or {})


def warnings(summary: Summary) -> str:
    """What a reader must know, before everything else."""
    return _list(summary, "warnings", "Warnings", "warnings")


def approximations(summary: Summary) -> str:
    """Where the emulation is an approximation."""
    return _list(summary, "approximations", "Approximations", "plain")


def _list(summary: Summary, field: str, title: str, style: str) -> str:
    items = "".join(f"<li>{escape(str(item))}</li>" for item in summary.get(field) or ())
    return f'{heading(title)}<ul class="{style}">{items}</ul>' if items else ""


def about(summary: Summary) -> str:
    """What went in: the command, its options, the versions, the ranks that were captured."""
    command = summary.get("command") or {}
    options = {
        key: value for key, value in (command.get("options") or {}).items() if value not in (None, "", [])
    }
    captured = summary.get("captured_ranks")
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
    return heading("Inputs") + _pairs({key: value for key, value in pairs.items() if value != ""})


def _pairs(pairs: Mapping[str, Any]) -> str:
    rows = []
    for key, value in pairs.items():
        words = value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
        rows.append(f"<dt>{escape(str(key).replace('_', ' '))}</dt><dd>{escape(words)}</dd>")
    return f'<dl class="pairs">{"".join(rows)}</dl>'


TOP_OPERATORS = 30

VERDICT_STYLES = {"fits": "good", "tight": "warn", "does not fit": "bad"}
_CATEGORY_COLOURS = {"communication": "memory-communication"}

Column = tuple[str, bool, Callable[[Mapping[str, Any]], tuple[str, float | None]]]
"""Heading, whether it holds numbers, and what reads a cell: the text, and the number to sort by."""


def memory(summary: Summary, curves: Sequence[Mapping[str, Any]]) -> str:
    """Memory over time with its legend, and the table of rank classes."""
    classes = summary.get("ranks") or ()
    if not classes and not curves:
        return ""
    parts = [heading("Device memory", "emulated caching allocator")]
    if curves:
        options = "".join(
            f'<option value="{i}">{escape(curve["label"])}</option>' for i, curve in enumerate(curves)
        )
        choice = f"<label>Ranks <select>{options}</select></label>" if len(curves) > 1 else ""
        only = "" if choice else f"ranks {escape(curves[0]['label'])}"
        categories = dict.fromkeys(key for curve in curves for key in curve["categories"])
        legend = "".join(f"<li>{_swatch(_category(key))}{escape(key)}</li>" for key in categories)
        parts.append(
            f'<div class="tools">{choice}{only}</div><div><canvas role="img" aria-label="Memory over the'
            ' step, stacked by category; the table below has the peaks."></canvas></div>'
            f'<ul class="legend">{legend}<li>{_swatch("ink")}reserved</li>'
            f"<li>{_swatch('bad')}device</li></ul>"
        )
    if classes:
        parts.append("<h3>Peaks by class of ranks</h3>" + _classes(classes))
    return "".join(parts)


def _classes(classes: Sequence[Mapping[str, Any]]) -> str:
    rows = []
    has_first = any(text.first_step(group) for group in classes)
    for group in classes:
        word = text.verdict(group)
        oom = group.get("oom")
        peak_at = "".join(
            f"<li>{units.size(item['bytes'])} <code>{escape(str(item['scope']))}</code></li>"
            for item in group.get("peak_at") or ()
        )
        where = (
            f'<details><summary>at the peak</summary><ul class="plain">{peak_at}</ul></details>'
            if peak_at
            else ""
        )
        oom_text = f'<div class="bad">{escape(text.out_of_memory(oom))}</div>' if oom else ""
        who = (
            f'{escape(text.ranks(group.get("members", "")))}<div class="note">{group["count"]:,} ranks</div>'
        )
        cells = (
            f"<td>{escape(str(group['name']))}{where}{oom_text}</td>",
            f"<td>{who}</td>",
            f'<td class="number">{units.size(group.get("peak_allocated_bytes"))}</td>',
            f'<td class="number"><b>{units.size(group.get("peak_reserved_bytes"))}</b></td>',
            *((f'<td class="number">{units.size(text.first_step(group))}</td>',) if has_first else ()),
            f"<td>{_stack(group.get('by_category') or {})}</td>",
            f'<td class="number">{units.size(group.get("memory_bytes"))}</td>',
            f'<td class="number">{units.size(group.get("headroom_bytes"))}</td>',
            f'<td class="verdict {VERDICT_STYLES[word]}">{word}</td>',
        )
        rows.append(f"<tr>{''.join(cells)}</tr>")
    first = ("first step",) if has_first else ()
    names = ("class", "ranks", "allocated", "reserved", *first, "at the peak", "device", "headroom", "")
    numbers = {"allocated", "reserved", "first step", "device", "headroom"}
    head = "".join(
        f'<th scope="col"{" class=number" if name in numbers else ""}>{name}</th>' for name in names
    )
    body = f"<thead><tr>{head}</tr></thead><tbody>{''.join(rows)}</tbody>"
    return f'<div class="scroll"><table>{body}</table></div>'


def _stack(parts: Mapping[str, float]) -> str:
    total = sum(parts.values())
    if not total:
        return ""
    words = ", ".join(f"{key} {units.size(value)}" for key, value in parts.items() if value)
    bar = "".join(
        f'<span style="flex:{value / total:.5f} 0 0;background:var(--{_category(key)})"></span>'
        for key, value in parts.items()
        if value
    )
    return (
        f'<div class="bar thin" role="img" aria-label="{escape(words)}" title="{escape(words)}">{bar}</div>'
    )


def _category(key: str) -> str:
    return _CATEGORY_COLOURS.get(key, key if key.isalpha() else "temporary")


def _swatch(name: str) -> str:
    return f'<span class="swatch" style="background:var(--{escape(name)}, var(--temporary))"></span>'


def collectives(summary: Summary) -> str:
    """The table of distinct collectives and messages."""
    rows = summary.get("collectives") or ()
    columns: tuple[Column, ...] = (
        ("kind", False, lambda row: (str(row["kind"]), None)),
        ("group", False, lambda row: (str(row.get("group", "")), None)),
        ("ranks", True, lambda row: (_members(row), row.get("group_size"))),
        ("algorithm", False, lambda row: (str(row.get("algorithm") or units.NONE), None)),
        ("protocol", False, lambda row: (str(row.get("protocol") or units.NONE), None)),
        ("count", True, lambda row: _number(row, "count", units.count)),
        ("bytes", True, lambda row: _number(row, "bytes", units.size)),
        ("each", True, lambda row: _number(row, "seconds_each", units.seconds)),
        ("in all", True, lambda row: _number(row, "seconds_total", units.seconds)),
        ("exposed", True, lambda row: _number(row, "exposed_seconds", units.seconds)),
        ("bus bandwidth", True, lambda row: _number(row, "bus_bandwidth", units.rate)),
    )
    if not rows:
        return ""
    return heading("Collectives and messages", f"{text.counted(summary)}, emulated") + _table(columns, rows)


def operators(summary: Summary) -> str:
    """The table of the operators that take longest."""
    rows = sorted(summary.get("operators") or (), key=lambda row: -(row.get("seconds") or 0))
    columns: tuple[Column, ...] = (
        ("operator", False, lambda row: (str(row["name"]), None)),
        ("kind", False, lambda row: (str(row.get("kind", "")), None)),
        ("count", True, lambda row: _number(row, "count", units.count)),
        ("FLOP", True, lambda row: _number(row, "flops", units.decimal)),
        ("bytes", True, lambda row: _number(row, "bytes", units.size)),
        ("time", True, lambda row: _number(row, "seconds", units.seconds)),
        ("time from", False, lambda row: (str(row.get("source", "")), None)),
    )
    if not rows:
        return ""
    some = f"the {TOP_OPERATORS} longest of {len(rows)}, " if len(rows) > TOP_OPERATORS else ""
    head = heading("Operators", f"{some}{text.counted(summary)}, of a rank, emulated")
    return head + _table(columns, rows[:TOP_OPERATORS])


def module_table(modules: Sequence[Mapping[str, Any]]) -> str:
    """The table of what modules compute; phases in which nothing runs have no column."""
    rows = [row for row in modules if row["in all"]]
    if not rows:
        return ""
    whole = sum(row["in all"] for row in rows)
    times = [
        name for name in rows[0] if name not in ("name", "flops", "bytes") and any(row[name] for row in rows)
    ]

    def time(name: str) -> Column:
        return name, True, lambda row: _number(row, name, units.seconds)

    columns: tuple[Column, ...] = (
        ("module", False, lambda row: (str(row["name"]), None)),
        *map(time, times),
        ("share", True, lambda row: (units.share(row["in all"] / whole), row["in all"])),
        ("FLOP", True, lambda row: _number(row, "flops", units.decimal)),
        ("bytes", True, lambda row: _number(row, "bytes", units.size)),
    )
    what = "what their operators take in one iteration of the critical rank, those alike together, emulated"
    return heading("Time by module", what) + _table(columns, rows[:TOP_OPERATORS])


def _members(row: Mapping[str, Any]) -> str:
    hosts = row.get("hosts")
    return f"{row.get('group_size', units.NONE)}" + (
        f" on {hosts} host{'s' if hosts > 1 else ''}" if hosts else ""
    )


def _number(row: Mapping[str, Any], key: str, form: Callable[[float | None], str]) -> tuple[str, float]:
    value = row.get(key)
    return form(value).strip(), -1.0 if value is None else float(value)


def _table(columns: Sequence[Column], rows: Iterable[Mapping[str, Any]]) -> str:
    head = "".join(
        f'<th scope="col"{" class=number" if number else ""}><button type="button">{name}</button></th>'
        for name, number, _ in columns
    )
    body = []
    for row in rows:
        cells = []
        for _, number, read in columns:
            words, value = read(row)
            order = f' data-value="{value!r}"' if value is not None else ""
            cells.append(f"<td{' class=number' if number else ''}{order}>{escape(words)}</td>")
        body.append(f"<tr>{''.join(cells)}</tr>")
    return (
        f'<div class="scroll"><table class="sortable"><thead><tr>{head}</tr></thead>'
        f"<tbody>{''.join(body)}</tbody></table></div>"
    )
