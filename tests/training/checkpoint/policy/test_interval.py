"""How often to save: the exact optimum against a scan, Young's, and a simulation; what fits, in words."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from windtunnel.training.checkpoint.policy.interval import (
    best_every,
    best_interval,
    slowdown,
    wasted,
)
from windtunnel.training.checkpoint.policy.slots import explain, needed


def test_wasted_time() -> None:
    assert wasted(2.0, 10.0, 5.0) == 12.0


@given(st.floats(1e-3, 1e3), st.floats(10.0, 1e6))
def test_the_best_interval_is_best(stall: float, mtbf: float) -> None:
    best = best_interval(stall, mtbf)
    least = slowdown(best, stall, mtbf)
    for factor in (0.5, 0.9, 0.99, 1.01, 1.1, 2.0):
        assert slowdown(best * factor, stall, mtbf) >= least * (1 - 1e-9)


def test_young_is_the_first_order() -> None:
    assert best_interval(1.0, 1e8) == pytest.approx(math.sqrt(2 * 1.0 * 1e8), rel=1e-3)
    assert best_interval(10.0, 100.0) < math.sqrt(2 * 10.0 * 100.0)
    assert best_interval(0.0, 100.0) == 0


@given(st.floats(0, 100), st.floats(10, 1e5), st.floats(0.1, 100), st.floats(0, 500))
def test_whole_steps(stall: float, mtbf: float, step: float, complete: float) -> None:
    every = best_every(stall, mtbf, step, complete)
    assert every >= 1
    assert every * step >= complete * (1 - 1e-9)
    for other in (every - 1, every + 1):
        if other >= 1 and other * step >= complete:
            assert slowdown(other * step, stall, mtbf) >= slowdown(every * step, stall, mtbf) * (1 - 1e-9)


def test_slowdown_is_that_of_a_simulated_job() -> None:
    stall, mtbf, restart, interval = 5.0, 300.0, 20.0, 60.0
    rng = np.random.default_rng(7)
    clock, done = 0.0, 0
    failure = rng.exponential(mtbf)
    while done < 20_000:
        if failure >= interval + stall:
            failure -= interval + stall
            clock += interval + stall
            done += 1
            continue
        clock += failure
        failure = rng.exponential(mtbf)
        while failure < restart:  # failures while it restarts
            clock += failure
            failure = rng.exponential(mtbf)
        clock += restart
        failure -= restart
    assert clock / (done * interval) == pytest.approx(slowdown(interval, stall, mtbf, restart), rel=0.02)


def test_extremes() -> None:
    assert slowdown(1e9, 1.0, 1.0) == math.inf
    assert slowdown(0.0, 0.0, 100.0) == 1.0
    with pytest.raises(ValueError, match="mtbf=0"):
        best_interval(1.0, 0.0)


def test_the_sum_of_memory() -> None:
    assert needed(10, 30, 2, 5) == 85
    told = explain(1_500_000_000, 3_000_000_000, 2, 4096, free=5_000_000_000)
    assert told == (
        "2 slots x (1.5 GB of its own + 3 GB held for others) + 4.1 kB of layouts = 9 GB; 5 GB are free"
    )
