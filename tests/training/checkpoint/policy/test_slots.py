"""When a slot may be overwritten, and which one is. All interleavings: conformance."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from windtunnel.training.checkpoint.policy.slots import may_overwrite, slot_for


@pytest.mark.parametrize(
    ("step", "held", "committed", "slot", "may"),
    [
        (0, (-1, -1), -1, 0, True),
        (1, (0, -1), -1, 1, True),
        (2, (0, 1), 0, 0, False),
        (2, (0, 1), 1, 0, True),
        (20, (0, 10), 0, 0, False),
        (20, (0, 10), 10, 0, True),
        (11, (10, 11), 10, 1, True),  # of an abandoned course
        (11, (12, 10), 10, 0, True),
    ],
)
def test_rule_and_choice(step: int, held: tuple[int, ...], committed: int, slot: int, may: bool) -> None:
    assert slot_for(step, held) == slot
    assert may_overwrite(step, held, committed) == may


@given(st.lists(st.integers(-1, 9), min_size=2, max_size=2), st.integers(0, 10), st.integers(-1, 9))
def test_no_step_from_the_newest_committed_on_goes(held: list[int], step: int, committed: int) -> None:
    if may_overwrite(step, held, committed):
        gone = held[slot_for(step, held)]
        assert gone < max(committed, 0) or gone >= step
