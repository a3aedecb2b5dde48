"""Requests of which some branch: no trial of a rate is given up too soon."""

from __future__ import annotations

import pytest

from benchmarks.serving.branching.goodput import ATTAINED, Workload, attainment
from benchmarks.serving.branching.live import RUNG, knee

WORK = Workload(seconds=12.0, warm=3.0, wave=6.0, tokens=30, serial=60)


def test_a_trial_is_given_up_only_where_it_fails() -> None:
    shares = [attainment(WORK, "eager", rate, 1) for rate in (4.0, 40.0)]
    assert shares[0] > ATTAINED > shares[1]
    assert [attainment(WORK, "eager", rate, 1, least=ATTAINED) for rate in (4.0, 40.0)] == [shares[0], 0.0]


@pytest.mark.parametrize("rungs", [-7.5, -0.5, 0.0, 0.5, 3.5, 9.5])
def test_a_knee_is_the_last_rung_that_holds_wherever_the_search_begins(rungs: float) -> None:
    tried = []

    def share(rate: float) -> float:
        tried.append(rate)
        return 1.0 if rate <= 8.0 * RUNG**rungs * (1 + 1e-9) else 0.0

    best = knee(share, 8.0)
    assert best <= 8.0 * RUNG**rungs * (1 + 1e-9) < best * RUNG
    assert best in tried and any(abs(rate / best / RUNG - 1) < 1e-9 for rate in tried)
    assert len(tried) <= 8
