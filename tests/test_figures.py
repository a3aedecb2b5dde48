"""A target's words say whether a figure meets it."""

from __future__ import annotations

import pytest

from benchmarks.figures import figure, reached


@pytest.mark.parametrize(
    ("value", "unit", "goal", "met"),
    [
        (0.059, "s", "<= 60 ms", True), (0.061, "s", "<= 60 ms", False), (0.95, "", ">= 95%", True),
        (3.0, "%", "<= 3 %", True), (3.0, "x", "> 3 of it", False), (0.0, "found", "0", True),
        (1.0, "", "100 %", True), (2.1 * 2**30, "bytes", "<= 2 GiB", False),
    ],
)  # fmt: skip
def test_units_of_the_goal_are_the_rows(value: float, unit: str, goal: str, met: bool) -> None:
    assert reached(value, goal, unit) is met


def test_what_is_not_judged_shows_its_goal_and_a_source_needs_a_figure() -> None:
    row = figure("s", "n", "x", 3.0, ">= 2 x", judged=False, source="a paper")
    assert (row.target, row.met, row.source) == (">= 2 x", None, "")
    assert figure("s", "n", "x", 3.0, "about even", met=True, published=2.0, source="a paper").met is True
    with pytest.raises(ValueError, match="'soon' names no number"):
        figure("s", "n", "s", 3.0, "soon")
