"""Emulated time and what is shared in it: small cases by hand, and an independent oracle."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction

import pytest
from hypothesis import given
from hypothesis import strategies as st
from simpy import Interrupt

from windtunnel.engines.events import Environment, ProcessGenerator, SharedResource, at, kill, run_through


@dataclass(frozen=True)
class User:
    """Comes at ``start`` for ``units``, and is killed at ``gone`` unless it has ended."""

    start: float
    units: float
    gone: float | None = None


def play(capacity: float, users: Sequence[User]) -> tuple[list[float | None], SharedResource]:
    """When each user of one resource ends, with at most one unit a second; None: it was killed."""
    env = Environment()
    shared = SharedResource(env, capacity, 1.0)
    ends: list[float | None] = [None] * len(users)

    def use(place: int, user: User) -> ProcessGenerator:
        yield env.timeout(user.start)
        yield shared.use(user.units)
        ends[place] = env.now

    for place, user in enumerate(users):
        process = env.process(use(place, user))
        if user.gone is not None:
            at(env, user.gone, lambda process=process: kill(process))
    env.run()
    return ends, shared


def exact(capacity: float, users: Sequence[User]) -> list[Fraction | None]:
    """The same by another way: every user's rest is counted down from change to change, in fractions."""
    rest = {place: Fraction(user.units) for place, user in enumerate(users)}
    start = [Fraction(user.start) for user in users]
    gone = [None if user.gone is None else Fraction(user.gone) for user in users]
    ends: list[Fraction | None] = [None] * len(users)
    now = Fraction(0)
    while rest:
        for place in [place for place in rest if gone[place] is not None and gone[place] <= now]:
            del rest[place]
        here = [place for place in rest if start[place] <= now]
        for place in here:
            if rest[place] <= 0:
                ends[place] = now
                del rest[place]
        here = [place for place in here if place in rest]
        rate = min(Fraction(1), Fraction(capacity) / len(here)) if here else Fraction(0)
        steps = [rest[place] / rate for place in here]
        steps += [start[place] - now for place in rest if start[place] > now]
        steps += [when - now for place in rest if (when := gone[place]) is not None and when > now]
        if not steps:
            break
        for place in here:
            rest[place] -= rate * min(steps)
        now += min(steps)
    return ends


def test_one_user_gets_no_more_than_its_most() -> None:
    assert play(8.0, [User(0.0, 3.0)])[0] == [3.0]


def test_two_users_of_one_unit_share_it() -> None:
    # together until 2, when the first has had its 1; the second then has 2 left for itself
    assert play(1.0, [User(0.0, 1.0), User(0.0, 3.0)])[0] == [2.0, 4.0]


def test_a_late_user_slows_the_first_from_then_on() -> None:
    assert play(1.0, [User(0.0, 2.0), User(1.0, 2.0)])[0] == [3.0, 4.0]


def test_nothing_to_receive_takes_no_time() -> None:
    assert play(1.0, [User(2.0, 0.0), User(0.0, 5.0)])[0] == [2.0, 5.0]


def test_who_is_killed_leaves_its_share_to_the_others() -> None:
    ends, shared = play(1.0, [User(0.0, 4.0), User(0.0, 4.0, gone=2.0)])
    assert ends == [5.0, None]
    assert shared.served == 5.0


EIGHTHS = st.integers(0, 160).map(lambda eighths: eighths / 8)
USERS = st.lists(st.builds(User, EIGHTHS, EIGHTHS), min_size=1, max_size=20)
# a death at the very instant of an end may fall before it or after it: deaths lie between eighths
KILLED = st.lists(
    st.builds(User, EIGHTHS, EIGHTHS, st.none() | EIGHTHS.map(lambda time: time + 0.0303)),
    min_size=1,
    max_size=20,
)


@given(KILLED, st.sampled_from([0.5, 1.0, 2.5, 7.0]))
def test_ends_are_those_of_the_oracle(users: list[User], capacity: float) -> None:
    ends, _ = play(capacity, users)
    for end, right in zip(ends, exact(capacity, users), strict=True):
        assert (end is None) == (right is None)
        if end is not None and right is not None:
            assert end == pytest.approx(float(right), abs=1e-9)


@given(USERS, st.floats(0.5, 8))
def test_what_is_asked_for_is_what_is_handed_out(users: list[User], capacity: float) -> None:
    ends, shared = play(capacity, users)
    assert shared.served == pytest.approx(sum(user.units for user in users), rel=1e-6, abs=1e-6)
    for end, user in zip(ends, users, strict=True):
        assert end is not None
        assert end >= user.start + user.units - 1e-6


@given(USERS, st.floats(0.5, 8), st.floats(0, 20))
def test_one_more_user_makes_nobody_faster(users: list[User], capacity: float, more: float) -> None:
    before, _ = play(capacity, users)
    after, _ = play(capacity, [*users, User(1.0, more)])
    for late, early in zip(after, before, strict=False):
        assert late is not None
        assert early is not None
        assert late >= early - 1e-6


@given(KILLED, st.sampled_from([1.0, 2.5]))
def test_one_input_has_one_outcome(users: list[User], capacity: float) -> None:
    first, second = (play(capacity, users) for _ in range(2))
    assert first[0] == second[0]
    assert first[1].served == second[1].served


def test_a_killed_process_never_goes_on_and_fails_nobody() -> None:
    env, reached = Environment(), []

    def sleeper() -> ProcessGenerator:
        yield env.timeout(1.0)
        reached.append(env.now)

    process = env.process(sleeper())
    at(env, 0.5, lambda: (kill(process), kill(process), None)[-1])
    env.run()
    assert reached == []
    assert not process.is_alive
    kill(process)
    env.run()


def test_a_process_killed_before_it_began_leaves_nothing() -> None:
    env = Environment()
    shared = SharedResource(env, 1.0, 1.0)

    def user() -> ProcessGenerator:
        yield shared.use(3.0)

    kill(env.process(user()))
    other = env.process(user())
    env.run(other)
    assert env.now == 3.0


def test_who_is_interrupted_may_go_and_come_again() -> None:
    env = Environment()
    shared = SharedResource(env, 1.0, 1.0)
    ends = []

    def patient() -> ProcessGenerator:
        yield shared.use(4.0)
        ends.append(env.now)

    def disturbed() -> ProcessGenerator:
        use = shared.use(4.0)
        try:
            yield use
        except Interrupt:
            use.cancel()
            use.cancel()
            yield env.timeout(1.0)
            yield shared.use(1.0)
        ends.append(env.now)

    env.process(patient())
    process = env.process(disturbed())
    at(env, 2.0, process.interrupt)
    env.run()
    # 1 unit each until 2; the first alone until 3; together until 5, when the other has its 1; then alone
    assert ends == [5.0, 6.0]


def test_what_happens_at_the_end_happens() -> None:
    env, instants = Environment(), []
    for time in (1.0, 2.0, 3.0):
        at(env, time, lambda: instants.append(env.now))
    run_through(env, 2.0)
    assert instants == [1.0, 2.0]
    run_through(env, float("inf"))
    assert instants == [1.0, 2.0, 3.0]


def test_a_time_that_is_past_is_now() -> None:
    env, instants = Environment(5.0), []
    at(env, 1.0, lambda: instants.append(env.now))
    env.run()
    assert instants == [5.0]
