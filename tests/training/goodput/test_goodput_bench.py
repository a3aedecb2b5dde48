"""The bench of the twin: the published simulation, its schemes, and how real runs are replayed."""

from __future__ import annotations

import math
from dataclasses import replace

from benchmarks.training.goodput.fidelity import Calibration, reached, replay
from benchmarks.training.goodput.published import published_rows, twin_runs
from benchmarks.training.pipelines.runs import JobRun
from windtunnel.training.goodput.twin.model import JobModel, PhaseCosts, SimulationResult


def test_when_the_twin_was_done() -> None:
    series = ((0.0, 0.0), (10.0, 5.0), (10.0, 3.0), (20.0, 3.0), (30.0, 13.0))
    result = SimulationResult("x", 30.0, {}, 13.0, 2.0, 1, 1, series)
    assert reached(result, 4.0) == 21.0  # the first time it was taken back
    assert reached(result, 3.0) == 6.0
    assert reached(result, 14.0) == math.inf


def test_the_twin_replays_the_losses_of_a_run() -> None:
    job = JobModel(6, 0.2, 8e6, 2, 12, 8)
    costs = PhaseCosts(detect=0.1, regroup=0.1, regroup_growth=0, start=0.4, replace=1.5, join=0.15)
    costs = replace(costs, storage_bandwidth=80e6, blocking_save=True)
    calibration = Calibration(job, costs, 0.02, {2: 0.6, 3: 0.4, 4: 0.3, 5: 0.25, 6: 0.2})
    steps = [{"kind": "step", "generation": 1, "step": i, "t": 100 + 0.2 * (i + 1)} for i in range(30)]
    lost = {"kind": "injected", "t": 102.5, "place": 3}
    ran = JobRun("templates", 30, (*steps, lost), {}, {})
    result, end = replay(calibration, "templates", ran, back=False)
    assert result.redone == 0 and result.phases["detect"] == 0.1 and result.phases["join"] == 0
    assert 7 < end < 8
    taken, _ = replay(calibration, "templates", ran, back=True)
    assert taken.phases["join"] == 0.15
    fewer, later = replay(calibration, "warm restart", ran, back=False)
    assert fewer.redone == 2 and fewer.phases["wait"] == 0 and later > end
    whole, _ = replay(calibration, "warm restart", ran, back=True)
    assert whole.phases["wait"] == 1.5 and whole.phases["slow"] == 0


def test_published_rows() -> None:
    rows = list(published_rows(True))
    assert [row.published for row in rows] == [1.044, 1.087, 1.571, 3.895, 13.903]
    assert "replayed once by the artifact's rules: 13.903" in rows[-1].note
    ours, theirs = twin_runs(601.2)
    assert ours.steps > 0 and theirs.steps == 0 and rows[-1].emulated is None
