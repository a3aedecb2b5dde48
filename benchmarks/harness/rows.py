"""What ``python -m benchmarks`` shows of any capability: rows of figures, made section by section.

    def speed_rows(quick: bool) -> Iterator[Row]:  # the section "speed"
        yield figure("a job", "s", [0.05, 0.06, 0.09], "<= 60 ms")

Of several figures the median stands, with their span in the note. Every figure is measured in this run or
marked as published with its source; a target that is missed is shown as missed, and a section that fails says
why and does not lose the others. Whoever runs a section notes how busy the host was.
"""

from __future__ import annotations

import json
import operator
import os
import re
import statistics
from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass, replace
from decimal import Decimal
from pathlib import Path
from typing import Any

TESTS: dict[str, Callable[[float, float], bool]] = {
    "<=": operator.le, "≤": operator.le, "at most": operator.le, ">=": operator.ge, "≥": operator.ge,
    "at least": operator.ge, "<": operator.lt, ">": operator.gt, "": operator.eq,
}  # fmt: skip
SCALES = {"%": "0.01", "ms": "0.001", "us": "0.000001", "M": "1000000", "M/s": "1000000", "GiB": "1073741824"}
Figures = float | Iterable[float | None] | None
"""A figure, or several of the same: those that are known, of which the median stands."""


@dataclass(frozen=True)
class Row:
    """One figure.

    ``error``: abs(emulated - measured) / measured, or against ``published`` where nothing was measured.
    ``target``: in words, and ``passed``: whether this run met it; None where there is none. ``note``: why a
    figure is missing, or what to know of it. ``section`` and ``load``, the load average at that time:
    whoever runs it says.
    """

    name: str
    unit: str
    measured: float | None = None
    emulated: float | None = None
    published: float | None = None
    source: str = ""
    target: str = ""
    passed: bool | None = None
    note: str = ""
    section: str = ""
    load: float | None = None

    @property
    def error(self) -> float | None:
        truth = self.measured if self.measured is not None else self.published
        if self.emulated is None or truth is None:
            return None
        if truth == 0:
            return 0.0 if self.emulated == 0 else None
        return abs(self.emulated - truth) / abs(truth)

    def plain(self) -> dict[str, Any]:
        """The row as values of JSON."""
        return {**asdict(self), "error": self.error}


def figure(
    name: str, unit: str, measured: Figures = None, goal: str = "", *,
    emulated: Figures = None, published: float | None = None, source: str = "", note: str = "",
    passed: bool | None = None, judged: bool = True,
) -> Row:  # fmt: skip
    """A row. ``goal``: what is to be reached, as "<= 60 ms", "at least 2 x of it", "0"; a unit that is not
    the row's is scaled to it. Of what is emulated against measured it may be "equal" or "within 15 %".
    ``passed``: of a goal in other words, or with more to it. With ``judged`` False the goal is shown and not
    judged; a source is shown where there is a published figure."""
    (measured, span), (emulated, twins) = (_middle(each, unit) for each in (measured, emulated))
    note = "; ".join(filter(None, (span, twins and f"emulated: {twins}" if span else twins, note)))
    value = measured if measured is not None else emulated
    if passed is None and goal and judged and value is not None:
        if goal == "equal" or goal.startswith("within "):
            off = abs((emulated or 0.0) - value)
            most = goal.removeprefix("within ")
            passed = off == 0 if goal == "equal" else reached(off / value, f"<= {most}", "")
        else:
            passed = reached(value, goal, unit)
    return Row(
        name, unit, measured, emulated, published, source if published is not None else "", goal,
        passed if judged and goal else None, note,
    )  # fmt: skip


def _middle(figures: Figures, unit: str) -> tuple[float | None, str]:
    """The median, and in words of how many that is and between which."""
    if not isinstance(figures, Iterable):
        return figures, ""
    present = sorted(value for value in figures if value is not None)
    if len(present) < 2:
        return (present[0] if present else None), ""
    least, most = (format_value(value, unit) for value in (present[0], present[-1]))
    return statistics.median(present), f"median of {len(present)}, {least} to {most}"


def format_value(value: float | None, unit: str) -> str:
    """A figure with its unit; small numbers of bytes whole, so that only equal ones look equal."""
    if value is None:
        return ""
    if unit == "bytes":
        return f"{value / 2**30:.2f} GiB" if value >= 2**30 else f"{value:,.0f} B"
    if unit == "s" and value < 1:
        return f"{value * 1e3:.1f} ms" if not 0 < value < 1e-3 else f"{value * 1e6:.1f} us"
    if unit == "":
        return f"{value:.2%}"
    if unit == "events/s":
        return f"{value / 1e6:.1f} M/s"
    return f"{value:,.4g} {unit}" if value < 1e4 else f"{value:,.0f} {unit}"


def reached(value: float, goal: str, unit: str) -> bool:
    """Whether a value in ``unit`` is as the goal's words say."""
    words = re.match(rf"({'|'.join(TESTS)})\s*([+-]?[\d.]+)\s*([^\s,;]*)", goal)
    if words is None:
        raise ValueError(f"the goal {goal!r} names no number")
    test, number, of = words.groups()
    scale = "1" if of == unit else SCALES.get(of, "1")
    return TESTS[test](value, float(Decimal(number) * Decimal(scale)))


def left_out(name: str, why: str) -> Row:
    """A row that says why there is no figure."""
    return Row(name, "", note=why)


class Missing(Exception):
    """What a section needs and this host lacks. One sentence."""


def need(why: str | None) -> None:
    """Leave the rest of the section out where ``why`` says what is missing."""
    if why:
        raise Missing(why)


def published(module: str) -> dict[str, Any]:
    """What ``published.json`` beside a module (its ``__file__``) holds: figures of others, with their source,
    and what came of a re-run that is finished."""
    figures: dict[str, Any] = json.loads(Path(module).with_name("published.json").read_text())
    return figures


def guarded(section: str, produce: Callable[[], Iterable[Row]]) -> list[Row]:
    """The rows that ``produce`` yields; where it fails, those before the failure and one that tells it."""
    rows: list[Row] = []
    try:
        for row in produce():
            rows.append(row if row.measured is None else replace(row, load=os.getloadavg()[0]))
    except Missing as error:
        rows.append(left_out(section, str(error)))
    except Exception as error:  # whatever it is, the other sections go on
        reason = f"{type(error).__name__}: {error}"
        rows.append(left_out(f"{section} (failed)", reason.splitlines()[0]))
    return [replace(row, section=section) for row in rows]
