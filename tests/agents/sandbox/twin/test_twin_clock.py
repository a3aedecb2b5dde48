"""Emulated time and what is shared in it: exact small cases, and nothing is lost or made."""

from __future__ import annotations

from functools import partial

import pytest
from hypothesis import given
from hypothesis import strategies as st

from windtunnel.engines.events import Activity, Clock, Running, Shared


def ends(capacity: float, users: list[tuple[float, float]]) -> tuple[list[float], Shared]:
    """When each user (start, units) of one resource ends."""
    clock = Clock()
    shared = Shared(clock, capacity, 1.0)
    found = [0.0] * len(users)

    def use(place: int, units: float) -> Activity:
        yield shared.use(units)
        found[place] = clock.now

    for place, (start, units) in enumerate(users):
        clock.at(start, partial(Running, use(place, units)))
    clock.run()
    return found, shared


def test_one_user_gets_no_more_than_its_most() -> None:
    assert ends(8.0, [(0.0, 3.0)])[0] == [3.0]


def test_two_users_of_one_unit_share_it() -> None:
    # together until 2, when the first has had its 1; the second then has 2 left for itself
    assert ends(1.0, [(0.0, 1.0), (0.0, 3.0)])[0] == [2.0, 4.0]


def test_a_late_user_slows_the_first_from_then_on() -> None:
    assert ends(1.0, [(0.0, 2.0), (1.0, 2.0)])[0] == [3.0, 4.0]


def test_nothing_to_receive_takes_no_time() -> None:
    assert ends(1.0, [(2.0, 0.0), (0.0, 5.0)])[0] == [2.0, 5.0]


USERS = st.lists(st.tuples(st.floats(0, 50), st.floats(0, 20)), min_size=1, max_size=20)


@given(USERS, st.floats(0.5, 8))
def test_what_is_asked_for_is_what_is_handed_out(users: list[tuple[float, float]], capacity: float) -> None:
    found, shared = ends(capacity, users)
    assert shared.served == pytest.approx(sum(units for _, units in users), rel=1e-6, abs=1e-6)
    for end, (start, units) in zip(found, users, strict=True):
        assert end >= start + units - 1e-6


@given(USERS, st.floats(0.5, 8), st.floats(0, 20))
def test_one_more_user_makes_nobody_faster(
    users: list[tuple[float, float]], capacity: float, more: float
) -> None:
    before, _ = ends(capacity, users)
    after, _ = ends(capacity, [*users, (1.0, more)])
    assert all(late >= early - 1e-6 for early, late in zip(before, after, strict=False))


def test_a_killed_activity_never_goes_on() -> None:
    clock, reached = Clock(), []

    def sleeper() -> Activity:
        yield clock.delay(1.0)
        reached.append(clock.now)

    running = Running(sleeper())
    clock.at(0.5, running.kill)
    clock.run()
    assert reached == []
    assert running.ended
