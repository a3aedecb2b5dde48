"""The matrix as a table of the documentation, between two markers of its page."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path

from conformance.sandbox.matrix.row import Outcome, Verdict
from windtunnel.base.errors import UserError

BEGIN, END = "<!-- matrix -->\n", "<!-- end of matrix -->"
MARKS = {Verdict.RIGHT: "✓ right", Verdict.REFUSED: "✓ refused beforehand"}


def table(outcomes: Sequence[Outcome]) -> str:
    """Markdown: a line of counts, and one table for each kind of row."""
    counts = [f"{sum(one.verdict is each for one in outcomes)} {each.value}" for each in Verdict]
    parts = [f"{len(outcomes)} rows: {', '.join(one for one in counts if not one.startswith('0 '))}.\n"]
    for kind, head in (("program", "program"), ("feature", "feature of the kernel")):
        lines = [_line(one) for one in outcomes if one.row.kind == kind]
        if lines:
            parts.append("\n".join([f"| {head} | held to | verdict |", "|---|---|---|", *lines]) + "\n")
    return "\n".join(parts)


def _line(one: Outcome) -> str:
    mark = MARKS.get(one.verdict, f"✗ {one.verdict.value}")
    if one.verdict is Verdict.ABSENT:
        mark = one.verdict.value
    cells = (one.row.name, one.row.asks, f"{mark}: {_short(one.words)}" if one.words else mark)
    return f"| {' | '.join(cell.replace('|', '/') for cell in cells)} |"


def _short(words: str) -> str:
    """Of a long reason the beginning; what only this run had (addresses, pids of the host) is not shown."""
    words = re.sub(r"\s+", " ", re.sub(r"\(process \d+ (on the host|inside)\)", "", words))
    return words if len(words) <= 200 else words[:199] + "…"


def write(page: Path, outcomes: Sequence[Outcome]) -> None:
    """Put the table between the markers of ``page``; UserError where it has none."""
    text = page.read_text(encoding="utf-8")
    before, begin, rest = text.partition(BEGIN)
    _, end, after = rest.partition(END)
    if not begin or not end:
        raise UserError(f"{page}: it has no line {BEGIN.strip()!r} followed by {END!r}")
    page.write_text(f"{before}{BEGIN}\n{table(outcomes)}\n{END}{after}", encoding="utf-8")
