"""How often to save: the optimum against a scan of Daly's formula and Young's; what fits, in words."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from windtunnel.training.checkpoint.policy.interval import best_every, best_interval
from windtunnel.training.checkpoint.policy.slots import explain, needed


def expected(interval: float, stall: float, mtbf: float) -> float:
    """Daly's expected time over that of the work, but for a factor without the interval."""
    return math.expm1((interval + stall) / mtbf) * mtbf / interval


@given(
    stall=st.floats(0.01, 100),
    mtbf=st.floats(10, 1e5),
    step=st.floats(0.1, 100),
    write=st.floats(0, 500),
)
def test_whole_steps(stall: float, mtbf: float, step: float, write: float) -> None:
    best = best_interval(stall, mtbf)
    for other in (0.9, 0.99, 1.01, 1.1):
        assert expected(best, stall, mtbf) <= expected(other * best, stall, mtbf) * (1 + 1e-9)
    every = best_every(stall, mtbf, step, write)
    assert every >= max(1, write / step * (1 - 1e-9))
    assert abs(every * step - max(best, step, write)) <= step
    assert best_every(stall, mtbf, step, write, longest=write + step) * step <= write + 2 * step


def test_limits_of_what_memory_covers() -> None:
    # nothing covered: Daly's, and Young's to the first order
    assert best_every(2.0, 1e6, 1.0) == pytest.approx(math.sqrt(2 * 2.0 * 1e6), rel=1e-2)
    for stall in (1e-4, 1e-2):  # either side of the first order
        assert best_interval(stall, 1e6) == pytest.approx(math.sqrt(2 * stall * 1e6), rel=1e-4)
    # all covered: as seldom as allowed
    assert best_every(2.0, math.inf, 7.0, 20.0, longest=86_400.0) == 86_400 // 7
    with pytest.raises(ValueError, match="no longest interval"):
        best_every(2.0, math.inf, 7.0)
    # rarer failures, longer intervals; and never shorter than a write takes
    intervals = [best_every(2.0, 100 * 10.0**k, 1.0, 100.0, 1e6) for k in range(1, 15)]
    assert (
        intervals == sorted(intervals)
        and intervals[0] == 100
        and intervals[-1] == 10**6
        and len(set(intervals)) > 8
    )


def test_the_sum_of_memory() -> None:
    assert needed(10, 30, 5) == 85
    sentence = explain(1_500_000_000, 3_000_000_000, 4096, free=5_000_000_000)
    assert sentence == (
        "2 slots x (1.5 GB of its own + 3 GB held for others) + 4.1 kB of layouts = 9 GB; 5 GB are free"
    )
