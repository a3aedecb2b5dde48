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
    counts = [f"{sum(outcome.verdict is each for outcome in outcomes)} {each.value}" for each in Verdict]
    parts = [f"{len(outcomes)} rows: {', '.join(count for count in counts if not count.startswith('0 '))}.\n"]
    for kind, head in (("program", "program"), ("feature", "feature of the kernel")):
        lines = [_line(outcome) for outcome in outcomes if outcome.row.kind == kind]
        if lines:
            parts.append("\n".join([f"| {head} | held to | verdict |", "|---|---|---|", *lines]) + "\n")
    return "\n".join(parts)


def _line(outcome: Outcome) -> str:
    mark = MARKS.get(outcome.verdict, f"✗ {outcome.verdict.value}")
    if outcome.verdict is Verdict.ABSENT:
        mark = outcome.verdict.value
    cells = (
        outcome.row.name,
        outcome.row.asks,
        f"{mark}: {_short(outcome.words)}" if outcome.words else mark,
    )
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
