"""Many numbers in few words, and back."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from windtunnel.base import ranges


@given(st.sets(st.integers(0, 60)))
def test_what_is_written_is_read(numbers: set[int]) -> None:
    assert ranges.read(ranges.write(numbers)) == tuple(sorted(numbers))


def test_neighbours_are_one_range() -> None:
    assert ranges.write([510, *range(504)]) == "0-503,510"
    assert ranges.write([3, 3, 4]) == "3-4"
    assert ranges.write([]) == ""


@pytest.mark.parametrize("text", ["x", "1-", "1,,2", "-1"])
def test_what_is_no_range_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match="invalid literal"):
        ranges.read(text)
