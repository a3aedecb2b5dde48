"""Grids, conditions and the Pareto front, against Python itself and brute force."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from windtunnel.training.emulate.sweep.result import pareto_front
from windtunnel.training.emulate.sweep.spec import (
    expand,
    holds,
)


def test_braces_expand_as_in_a_shell() -> None:
    assert expand("h100-sxm:{1,2}x8,nic={ib-200, ib-400}") == [
        "h100-sxm:1x8,nic=ib-200",
        "h100-sxm:1x8,nic=ib-400",
        "h100-sxm:2x8,nic=ib-200",
        "h100-sxm:2x8,nic=ib-400",
    ]
    assert expand("{alone}") == ["{alone}"]


numbers = st.integers(-6, 6)
arithmetic = st.recursive(
    st.sampled_from(["tp", "pp", "0", "2", "7", "1.5"]),
    lambda part: st.builds(
        lambda left, op, right: f"({left} {op} {right})",
        part,
        st.sampled_from(["+", "-", "*", "/", "//", "%"]),
        part,
    ),
    max_leaves=6,
)
comparison = st.builds(
    lambda left, op, right: f"{left} {op} {right}",
    arithmetic,
    st.sampled_from(["<", "<=", ">", ">=", "==", "!="]),
    arithmetic,
)
conditions = st.recursive(
    comparison,
    lambda part: st.one_of(
        st.builds(lambda a, word, b: f"({a} {word} {b})", part, st.sampled_from(["and", "or"]), part),
        st.builds(lambda a: f"(not {a})", part),
    ),
    max_leaves=4,
)


@given(conditions, numbers, numbers)
def test_conditions_mean_what_they_mean_in_python(text: str, tp: int, pp: int) -> None:
    values = {"tp": tp, "pp": pp}
    try:
        truth = eval(text, {"__builtins__": {}}, dict(values))
    except ZeroDivisionError:
        with pytest.raises(ValueError):
            holds(text, values)
    else:
        assert holds(text, values) is truth


@pytest.mark.parametrize(
    "text",
    [
        "__import__('os')", "tp.__class__ == 1", "tp ** 9 > 1", "1 << tp > 1", "lambda: 1", "tp >",
        "(tp := 1) > 0",
        "", "(" * 600, "ac > 1", "tp * pp", "tp / 0 > 1", "tp in 5", "'x' * 999999 * 999999 == ac",
    ],
)  # fmt: skip
def test_what_cannot_be_said_is_an_error(text: str) -> None:
    with pytest.raises(ValueError):
        holds(text, {"ac": "x", "tp": 2, "pp": 3})


@given(
    st.integers(1, 3).flatmap(
        lambda width: st.lists(st.tuples(*[st.integers(0, 4)] * width), min_size=0, max_size=14).map(
            lambda rows: np.array(rows, np.float64).reshape(len(rows), width)
        )
    )
)
def test_pareto_front_is_that_of_brute_force(table: np.ndarray) -> None:
    def beats(one: np.ndarray, other: np.ndarray) -> bool:
        return all(a <= b for a, b in zip(one, other, strict=True)) and any(
            a < b for a, b in zip(one, other, strict=True)
        )

    expected = [not any(beats(other, row) for other in table) for row in table]
    assert pareto_front(table).tolist() == expected
