"""Over how many steps a checkpoint is spread: by hand, and never fewer than its bytes take."""

from __future__ import annotations

from collections.abc import Sequence

from hypothesis import given
from hypothesis import strategies as st

from windtunnel.training.checkpoint.policy import NetworkProfile, Profiles, Spread, decide


def steps(
    spans: Sequence[float], nbytes: int, copies: int, part: int, bandwidth: float | None, startup: float = 0.0
) -> int:
    """Of one rank that uses the whole of its spans; 0 where none has room."""
    ranks = (NetworkProfile(tuple(spans), nbytes, bandwidth),)
    spread = decide(Profiles(ranks, copies, part, 1, startup, 1.0))
    assert isinstance(spread, Spread)
    return 0 if spread.always else spread.every


@given(
    spans=st.lists(st.floats(0, 0.2), max_size=8),
    nbytes=st.integers(0, 3_000_000),
    copies=st.integers(1, 4),
    parts=st.integers(1, 8),
    bandwidth=st.floats(1e6, 1e9),
    startup=st.floats(0, 5e-3),
    safety=st.floats(0.1, 1),
)
def test_spans_have_room_for_all_bytes(
    spans: list[float], nbytes: int, copies: int, parts: int, bandwidth: float, startup: float, safety: float
) -> None:
    ranks = (NetworkProfile(tuple(spans), nbytes, bandwidth),)
    spread = decide(Profiles(ranks, copies, 800_000, parts, startup, safety))
    assert isinstance(spread, Spread)
    wanted = (copies - 1) * nbytes
    assert spread.every * safety * sum(spans) * bandwidth * (1 + 1e-9) >= wanted or spread.always
    assert spread.always <= (wanted > 0)


def test_examples_by_hand() -> None:
    """A chunk takes 20 ms at the most: 2 bytes of 100 bytes/s, and 0.1 s beside."""
    assert steps([1.0, 0.05, 1.0], 32, 2, 40, 100.0, startup=0.1) == 1
    assert steps([1.0, 0.05, 1.0], 33, 2, 40, 100.0, startup=0.1) == 2
    assert steps([0.5], 100, 3, 40, 100.0) == 4
    assert steps([1e-3], 10**9, 2, 10**8, 1e6) == 1_000_000
    assert steps([0.01] * 4, 100, 2, 40, 100.0, startup=0.1) == 0
    assert steps([], 0, 2, 40, 100.0, startup=0.1) == 1
    assert steps([], 100, 2, 40, None) == 1  # what the network can do is not known yet


def test_the_slowest_rank_holds_for_all() -> None:
    quick, slow, none = (NetworkProfile((0.5,), nbytes, 100.0) for nbytes in (10, 100, 1))
    assert decide(Profiles((quick, slow), 3, 40, 1, 0.0, 1.0)) == Spread(4)
    without = NetworkProfile((), none.nbytes, 100.0)
    assert decide(Profiles((quick, without), 3, 40, 1, 0.0, 1.0)) == Spread(1, always=True)
