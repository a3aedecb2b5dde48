"""When a slot may be overwritten, and which one is. All interleavings: conformance."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from windtunnel.base.errors import UserError
from windtunnel.training.checkpoint.policy.slots import may_overwrite, slot_for


def test_one_slot_is_never_safe() -> None:
    with pytest.raises(UserError, match="slots is 1"):
        may_overwrite(1, 5, [4], 4)
    with pytest.raises(UserError, match="slots is 1"):
        slot_for(1, 5, [4])


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
        (3, (0, 1, 2), 0, 0, False),
        (3, (0, 1, 2), 1, 0, True),
        (11, (12, 11, 10), 10, 1, True),
    ],
)
def test_rule_and_choice(step: int, held: tuple[int, ...], committed: int, slot: int, may: bool) -> None:
    assert slot_for(len(held), step, held) == slot
    assert may_overwrite(len(held), step, held, committed) == may


@given(
    st.integers(2, 4).flatmap(lambda n: st.tuples(st.lists(st.integers(-1, 9), min_size=n, max_size=n))),
    st.integers(0, 10),
    st.integers(-1, 9),
)
def test_no_step_from_the_newest_committed_on_goes(held: tuple[list[int]], step: int, committed: int) -> None:
    steps = held[0]
    if may_overwrite(len(steps), step, steps, committed):
        gone = steps[slot_for(len(steps), step, steps)]
        assert gone < max(committed, 0) or gone >= step
