"""The tables of the page: memory by class of ranks, collectives, operators.

As in `sections`, everything that comes from a run is escaped here.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from html import escape
from typing import Any

from windtunnel.base import units
from windtunnel.report import text
from windtunnel.report.text import Summary

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
    parts = ["<h2>Device memory <small>emulated caching allocator</small></h2>"]
    if curves:
        options = "".join(
            f'<option value="{i}">{escape(one["label"])}</option>' for i, one in enumerate(curves)
        )
        choice = f"<label>Ranks <select>{options}</select></label>" if len(curves) > 1 else ""
        only = "" if choice else f"ranks {escape(curves[0]['label'])}"
        categories = dict.fromkeys(key for one in curves for key in one["categories"])
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
    has_first = any(text.first_step(one) for one in classes)
    for one in classes:
        word = text.verdict(one)
        oom = one.get("oom")
        peak_at = "".join(
            f"<li>{units.size(item['bytes'])} <code>{escape(str(item['scope']))}</code></li>"
            for item in one.get("peak_at") or ()
        )
        where = (
            f'<details><summary>at the peak</summary><ul class="plain">{peak_at}</ul></details>'
            if peak_at
            else ""
        )
        said = f'<div class="bad">{escape(text.out_of_memory(oom))}</div>' if oom else ""
        members = one.get("members") or []
        who = f'{escape(text.ranks(members))}<div class="note">{one.get("count", len(members)):,} ranks</div>'
        cells = (
            f"<td>{escape(str(one['name']))}{where}{said}</td>",
            f"<td>{who}</td>",
            f'<td class="number">{units.size(one.get("peak_allocated_bytes"))}</td>',
            f'<td class="number"><b>{units.size(one.get("peak_reserved_bytes"))}</b></td>',
            *((f'<td class="number">{units.size(text.first_step(one))}</td>',) if has_first else ()),
            f"<td>{_stack(one.get('by_category') or {})}</td>",
            f'<td class="number">{units.size(one.get("memory_bytes"))}</td>',
            f'<td class="number">{units.size(one.get("headroom_bytes"))}</td>',
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
    return "<h2>Collectives and messages <small>in one iteration, emulated</small></h2>" + _table(
        columns, rows
    )


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
    head = f"<h2>Operators <small>{some}in one iteration of a rank, emulated</small></h2>"
    return head + _table(columns, rows[:TOP_OPERATORS])


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
            shown, value = read(row)
            order = f' data-value="{value!r}"' if value is not None else ""
            cells.append(f"<td{' class=number' if number else ''}{order}>{escape(shown)}</td>")
        body.append(f"<tr>{''.join(cells)}</tr>")
    return (
        f'<div class="scroll"><table class="sortable"><thead><tr>{head}</tr></thead>'
        f"<tbody>{''.join(body)}</tbody></table></div>"
    )
