"""A figure with its target: whether it was met follows from the words that the row shows."""

from __future__ import annotations

import operator
import re
from collections.abc import Callable
from decimal import Decimal

from benchmarks.harness.rows import Row

TESTS: dict[str, Callable[[float, float], bool]] = {
    "<=": operator.le, ">=": operator.ge, "<": operator.lt, ">": operator.gt, "": operator.eq,
}  # fmt: skip
SCALES = {"%": "0.01", "ms": "0.001", "M": "1000000", "GiB": "1073741824"}


def figure(
    section: str, name: str, unit: str, measured: float | None = None, goal: str = "", *,
    emulated: float | None = None, published: float | None = None, source: str = "", note: str = "",
    met: bool | None = None, judged: bool = True,
) -> Row:  # fmt: skip
    """A row. ``goal``: what is to be reached, as "<= 60 ms", ">= 2 x of it", "0"; a unit that is not the
    row's is scaled to it. ``met``: of a goal in other words, or with more to it. With ``judged`` False the
    goal is shown and not judged; a source is shown where there is a published figure."""
    value = measured if measured is not None else emulated
    if met is None and goal and judged and value is not None:
        met = reached(value, goal, unit)
    return Row(
        section, name, unit, measured, emulated, published, source if published is not None else "", goal,
        met if judged else None, note,
    )  # fmt: skip


def reached(value: float, goal: str, unit: str) -> bool:
    """Whether a value in ``unit`` is as the goal's words say."""
    found = re.match(r"(<=|>=|<|>|)\s*([+-]?[\d.]+)\s*([^\s,;]*)", goal)
    if found is None:
        raise ValueError(f"the goal {goal!r} names no number")
    test, number, of = found.groups()
    scale = "1" if of == unit else SCALES.get(of, "1")
    return TESTS[test](value, float(Decimal(number) * Decimal(scale)))
