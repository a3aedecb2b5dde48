"""How often to save: the exact optimum against a scan, Young's, and a simulation; what fits, in words."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from windtunnel.training.checkpoint.policy.interval import (
    Failures,
    best_every,
    best_interval,
    slowdown,
)
from windtunnel.training.checkpoint.policy.slots import explain, needed


@given(
    stall=st.floats(0, 100),
    mtbf=st.floats(10, 1e5),
    uncovered=st.floats(1e-6, 1),
    step=st.floats(0.1, 100),
    write=st.floats(0, 500),
)
def test_whole_steps(stall: float, mtbf: float, uncovered: float, step: float, write: float) -> None:
    failures = Failures(mtbf, uncovered, recovery=20.0, fall=60.0)
    every = best_every(stall, failures, step, write)
    assert every >= 1
    assert every * step >= write * (1 - 1e-9)
    least = slowdown(every * step, stall, failures, write)
    for other in (every - 1, every + 1, 2 * every):
        if other >= 1 and other * step >= write:
            assert slowdown(other * step, stall, failures, write) >= least * (1 - 1e-9)
    assert best_every(stall, failures, step, write, longest=write + step) * step <= write + 2 * step


def simulated(interval: float, stall: float, write: float, failures: Failures, saves: int) -> float:
    """Time over work of a job that is walked from event to event until so many saves are whole.

    A failure in a recovery begins it anew; one that memory does not cover falls back to the last save that
    was whole, by then ``write`` seconds old and more.
    """
    rng = np.random.default_rng(7)
    clock = 0.0
    whole = 0  # saves that are in storage
    at = 0.0  # seconds of work and stalls since that save began
    due = interval + stall + write  # .. when the next one is whole
    recovering = 0.0
    left = rng.exponential(failures.mtbf)
    while whole < saves:
        busy = recovering if recovering > 0 else due - at
        if left >= busy:
            clock, left = clock + busy, left - busy
            if recovering > 0:
                recovering = 0.0
            else:
                whole, at = whole + 1, write
            continue
        clock += left
        at += 0.0 if recovering > 0 else left
        left = rng.exponential(failures.mtbf)
        if rng.random() < failures.uncovered or recovering == failures.fall > 0:
            at, recovering = 0.0, failures.fall
        else:
            recovering = failures.recovery
    return clock / (saves * interval)


@pytest.mark.parametrize("uncovered", [1.0, 0.3, 0.05, 0.0])
def test_slowdown_is_that_of_a_simulated_job(uncovered: float) -> None:
    failures = Failures(300.0, uncovered, recovery=30.0, fall=45.0)
    for interval, write in ((60.0, 0.0), (100.0, 80.0)):
        told = slowdown(interval, 5.0, failures, write)
        assert simulated(interval, 5.0, write, failures, 100_000) == pytest.approx(told, rel=0.01)


def test_limits_of_what_memory_covers() -> None:
    # nothing covered: Daly's, and Young's to the first order
    bare = Failures(1e6, 1.0, fall=100.0)
    assert best_every(2.0, bare, 1.0) == pytest.approx(best_interval(2.0, 1e6), abs=1)
    assert best_every(2.0, bare, 1.0) == pytest.approx(math.sqrt(2 * 2.0 * 1e6), rel=1e-2)
    # a part of it: as if only those failed
    tenth = Failures(1e5, 0.1)
    assert best_every(2.0, tenth, 1.0) == pytest.approx(best_every(2.0, bare, 1.0), abs=1)
    # all covered: as seldom as allowed
    assert best_every(2.0, Failures(1e5, 0.0, recovery=50.0), 7.0, 20.0, longest=86_400.0) == 86_400 // 7
    with pytest.raises(ValueError, match="no longest interval"):
        best_every(2.0, Failures(1e5, 0.0), 7.0)
    # rarer failures, longer intervals; and never shorter than a write takes
    found = [best_every(2.0, Failures(10.0**k, 0.01), 1.0, 100.0, 1e6) for k in range(1, 15)]
    assert found == sorted(found) and found[0] == 100 and found[-1] == 10**6 and len(set(found)) > 8


def test_the_sum_of_memory() -> None:
    assert needed(10, 30, 2, 5) == 85
    told = explain(1_500_000_000, 3_000_000_000, 2, 4096, free=5_000_000_000)
    assert told == (
        "2 slots x (1.5 GB of its own + 3 GB held for others) + 4.1 kB of layouts = 9 GB; 5 GB are free"
    )
