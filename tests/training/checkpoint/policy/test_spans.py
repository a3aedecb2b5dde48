"""Over how many steps a checkpoint is spread: by hand, and never fewer than its bytes take."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from windtunnel.training.checkpoint.policy.spans import steps_for


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
    every = steps_for(spans, nbytes, copies, 800_000, parts, bandwidth, startup, safety)
    wanted = (copies - 1) * nbytes
    assert every * safety * sum(spans) * bandwidth * (1 + 1e-9) >= wanted or every == 0
    assert (every == 0) <= (wanted > 0)


def test_examples_by_hand() -> None:
    """100 bytes/s, 0.1 s a chunk: a span of 1 s takes chunks of 40 and 40, one of 0.05 s none."""
    assert steps_for([1.0, 0.05, 1.0], 100, 2, 120, 3, 100.0, 0.1, 1.0) == 1
    assert steps_for([0.5], 100, 3, 40, 1, 100.0, 0.0, 1.0) == 4
    assert steps_for([1e-3], 10**9, 2, 10**8, 4, 1e6, 0.0, 1.0) == 1_000_000
    assert steps_for([0.01] * 4, 100, 2, 40, 1, 100.0, 0.1, 1.0) == 0
    assert steps_for([], 0, 2, 40, 1, 100.0, 0.1, 1.0) == 1


@pytest.mark.parametrize("safety", [0.0, 1.5])
def test_refused(safety: float) -> None:
    with pytest.raises(ValueError, match="safety"):
        steps_for([1.0], 1, 2, 4, 1, 1.0, 0.0, safety)
    with pytest.raises(ValueError, match="parts=8"):
        steps_for([1.0], 1, 2, 4, 8, 1.0, 0.0, 1.0)
