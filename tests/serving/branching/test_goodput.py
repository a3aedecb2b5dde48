"""Requests of which some branch: no trial of a rate is given up too soon."""

from __future__ import annotations

from windtunnel.serving.branching.bench.workload import ATTAINED, Workload, attainment

WORK = Workload(seconds=12.0, warm=3.0, wave=6.0, tokens=30, serial=60)


def test_a_trial_is_given_up_only_where_it_fails() -> None:
    shares = [attainment(WORK, "eager", rate, 1) for rate in (4.0, 40.0)]
    assert shares[0] > ATTAINED > shares[1]
    assert [attainment(WORK, "eager", rate, 1, least=ATTAINED) for rate in (4.0, 40.0)] == [shares[0], 0.0]
