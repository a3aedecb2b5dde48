"""Rows as a reader wants them: a table on the terminal, Markdown for a page, JSON for a program."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from benchmarks.harness.rows import Row, format_value
from windtunnel.base import units

if TYPE_CHECKING:
    from rich.table import Table

KINDS = ("measured", "emulated", "published")
MARKS = {True: "✓ ", False: "✗ ", None: ""}


def columns(rows: Sequence[Row]) -> tuple[list[str], list[list[str]]]:
    """Headings and cells of the rows that have figures, in columns that have any."""
    kinds = [kind for kind in KINDS if any(getattr(row, kind) is not None for row in rows)]
    errors = any(row.error is not None for row in rows)
    targets = any(row.target for row in rows)
    cells = []
    for row in rows:
        figures = [format_value(getattr(row, kind), row.unit) for kind in kinds]
        if any(figures):
            error = "" if row.error is None else f"{row.error:.2%}"
            cells.append(
                [
                    row.name,
                    *figures,
                    *([error] if errors else []),
                    *([MARKS[row.passed] + row.target] * targets),
                ]
            )
    return ["name", *kinds, *(["error"] if errors else []), *(["target"] if targets else [])], cells


def remarks(rows: Sequence[Row]) -> list[str]:
    """What is to be known of rows, or why they have no figure; and how busy the host was."""
    notes = [(row.name, "; ".join(part for part in (row.source, row.note) if part)) for row in rows]
    words = [f"{name}: {words}" for name, words in notes if words]
    loads = [row.load for row in rows if row.load is not None]
    span = f"load average {min(loads):.1f} to {max(loads):.1f} on {os.cpu_count()} CPUs" if loads else ""
    return [*words, *filter(None, [span])]


def targets(rows: Sequence[Row]) -> str:
    """In one line which targets were met; "" where there are none."""
    missed = [row.name for row in rows if row.passed is False]
    reached = sum(row.passed is True for row in rows)
    if not reached and not missed:
        return ""
    return f"targets: {reached} met, {len(missed)} missed" + (f" ({'; '.join(missed)})" if missed else "")


def table(title: str, rows: Sequence[Row]) -> Table:
    """For the terminal."""
    from rich.table import Table

    headings, cells = columns(rows)
    shape = Table(title=title, title_justify="left")
    for place, heading in enumerate(headings):
        shape.add_column(heading, justify="right" if place else "left", overflow="fold")
    for line in cells:
        shape.add_row(*line)
    return shape


def markdown(capability: str, rows: Sequence[Row], host: Mapping[str, Any], *, quick: bool = False) -> str:
    """For a page: what it was measured on, a table a section, and what is to be known of it beneath."""
    gpus = f", {', '.join(host['gpus'])}" if host["gpus"] else ""
    memory = units.size(host["memory_bytes"])
    versions = (f"{name} {version}" for name, version in host["versions"].items() if name != "platform")
    lines = [
        f"### `python -m benchmarks {capability}{' --quick' if quick else ''}`",
        "",
        f"{host['date']}: {host['processor']}, {host['cpus']} CPUs, {memory}{gpus}, Linux {host['kernel']}, "
        f"load average {host['load_average']:.1f} at the start; {', '.join(versions)}.",
    ]
    for section in dict.fromkeys(row.section for row in rows):
        own = [row for row in rows if row.section == section]
        headings, cells = columns(own)
        lines += ["", f"**{section}**"]
        if cells:
            lines += ["", _line(headings), _line(["---", *["---:"] * (len(headings) - 1)])]
            lines += [_line(line) for line in cells]
        notes = remarks(own)
        lines += ["", *(f"- {_escaped(note)}" for note in notes)] if notes else []
    summary = targets(rows)
    return "\n".join([*lines, *(["", _escaped(summary)] if summary else [])]) + "\n"


def document(capability: str, rows: Sequence[Row], host: Mapping[str, Any], *, quick: bool) -> dict[str, Any]:
    """For a program: every figure with its kind, and what it was measured on."""
    return {"capability": capability, "quick": quick, "host": host, "rows": [row.plain() for row in rows]}


def _line(cells: Sequence[str]) -> str:
    return f"| {' | '.join(_escaped(cell) for cell in cells)} |"


def _escaped(text: str) -> str:
    return text.replace("|", "\\|").replace("<", "&lt;").replace("\n", " ")
