"""The bench of the twin: the published simulation and its schemes."""

from __future__ import annotations

import math
from dataclasses import replace

from benchmarks.training.goodput.published import GoOnOnFewer, RestartOnFewer, published_rows, twin_runs
from windtunnel.traces.failures import regular
from windtunnel.training.goodput.twin.model import JobModel, PhaseCosts
from windtunnel.training.goodput.twin.simulate import simulate


def test_restart_on_fewer_keeps_saved_steps_and_its_pace() -> None:
    costs = PhaseCosts(
        detect=0, regroup=0, regroup_growth=0, start=10, replace=math.inf, storage_bandwidth=1.0
    )
    costs = replace(costs, blocking_save=True)
    job = JobModel(2, 1.0, 0.0)  # saves and loads take no time
    trace = regular(2, 25.5, 1)
    result = simulate(RestartOnFewer(job, costs, 10, {2: 1.0, 1: 2.0}), job, costs, trace, 45.5)
    assert result.steps == 20 + 5 and result.redone == 5
    ours = simulate(GoOnOnFewer(2, 10.0, {2: 1.0, 1: 2.0}), job, costs, trace, 45.5)
    assert ours.steps == 25 + 5 and ours.redone == 0


def test_published_rows() -> None:
    rows = list(published_rows(True))
    assert [row.published for row in rows] == [1.044, 1.087, 1.571, 3.895, 13.903]
    assert "replayed once by the artifact's rules: 13.903" in rows[-1].note
    ours, theirs = twin_runs(601.2)
    assert ours.steps > 0 and theirs.steps == 0 and rows[-1].emulated is None
