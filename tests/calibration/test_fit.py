"""Fits that find what was put in, with no negative coefficient."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from windtunnel.calibration.fit import least_squares, quartile

NUMBER = st.floats(0, 10).map(lambda value: round(value, 3))


@given(NUMBER, NUMBER, NUMBER)
def test_the_fit_finds_what_was_put_in(base: float, each: float, other: float) -> None:
    first = np.array([0.0, 0.0, 1.0, 1.0, 3.0])
    second = np.array([0.0, 2.0, 0.0, 2.0, 5.0])
    coefficients = least_squares([np.ones(5), first, second], base + each * first + other * second)
    assert coefficients == pytest.approx([base, each, other], abs=1e-6)


@given(st.lists(st.floats(-5, 5), min_size=4, max_size=4))
def test_no_coefficient_is_negative(values: list[float]) -> None:
    coefficients = least_squares([np.ones(4), np.arange(4.0)], np.array(values))
    assert min(coefficients) >= 0


def test_the_lower_quartile_is_a_value_that_was_seen() -> None:
    assert quartile([5, 1, 4, 2, 3]) == 2
    assert quartile([7]) == 7
