"""The bench of pipelines: its second exact method, its arithmetic, and the rows that cost little."""

from __future__ import annotations

import math
import random
from collections.abc import Sequence
from dataclasses import replace
from itertools import pairwise

import pytest

from windtunnel.base.errors import UserError
from windtunnel.traces.failures import regular
from windtunnel.training.goodput.twin.model import Costs, Job, SimulationResult
from windtunnel.training.goodput.twin.simulate import simulate
from windtunnel.training.pipelines.bench import SECTIONS, run
from windtunnel.training.pipelines.bench import planner as planner_section
from windtunnel.training.pipelines.bench.exact import brute_force, certificate, even_cuts, formula
from windtunnel.training.pipelines.bench.fidelity import Calibration, reached, replay
from windtunnel.training.pipelines.bench.measured import random_losses, regular_losses
from windtunnel.training.pipelines.bench.replay import TRACES, twin_runs
from windtunnel.training.pipelines.bench.runs import HOSTS, JobRun
from windtunnel.training.pipelines.bench.schemes import GoOnOnFewer, RestartOnFewer
from windtunnel.training.pipelines.model import LayerProfile
from windtunnel.training.pipelines.policy.planner import plan


def test_the_second_method_equals_brute_force() -> None:
    draw = random.Random(1)
    for _ in range(300):
        layers = draw.randint(1, 9)
        stages = draw.randint(1, layers)
        times = [draw.randint(1, 6) for _ in range(layers)]  # many equal stages: ties count
        assert certificate(times, stages) == brute_force(times, stages)


def test_the_known_case() -> None:
    times, stages = planner_section.KNOWN_CASE
    assert certificate(times, stages) == brute_force(times, stages) == 268
    assert planner_section.planned(times, stages) == 268


def layers_of(times: Sequence[float]) -> list[LayerProfile]:
    return [LayerProfile("l", time / 4, 3 * time / 4) for time in times]


def test_the_published_search_is_not_optimal() -> None:
    times, stages = planner_section.KNOWN_CASE
    profile = layers_of(times)
    best, published = plan(profile, stages, 1, 1.0), planner_section.memoised_plan(profile, stages)
    assert best is not None and published is not None
    assert (best.time, published.time) == (268.0, 277.0)


def test_the_published_search_is_never_better() -> None:
    draw = random.Random(9)
    for _ in range(60):
        profile = layers_of([draw.choice([1, 2, 3, 5, 8, 13, 20]) for _ in range(draw.randint(3, 9))])
        stages = draw.randint(1, min(5, len(profile)))
        best, published = plan(profile, stages, 1, 1.0), planner_section.memoised_plan(profile, stages)
        assert best is not None and published is not None
        assert best.time <= published.time + 1e-9


def test_too_few_layers_are_refused() -> None:
    with pytest.raises(ValueError, match="2 layers make no 3 stages"):
        certificate([1, 1], 3)


def test_even_cuts_differ_by_one_layer_at_most() -> None:
    cuts = even_cuts(96, 32)
    assert {b - a for a, b in pairwise(cuts)} == {3}
    assert {b - a for a, b in pairwise(even_cuts(10, 4))} == {2, 3}
    assert formula([1, 1, 1, 1], (0, 2, 4)) == 4 + (8 - 2 + 1 - 1) * 2 + 2


def test_histogram_counts_everything_once() -> None:
    shares = planner_section.histogram([0.0, 0.0, 0.005, 0.02, 0.05, 3.0])
    assert [share * 6 for _, share in shares] == pytest.approx([2, 1, 1, 1, 1])


def test_losses_leave_enough_hosts_and_time() -> None:
    draw = random.Random(0)
    for _ in range(50):
        losses = random_losses(draw, 3)
        assert [step for step, _ in losses] == sorted({step for step, _ in losses})
        assert all(0 <= place < HOSTS - index for index, (_, place) in enumerate(losses))
        assert [step for step, _ in regular_losses(draw, 3, 10, True)] == [5, 15, 25]


def test_a_run_is_read_from_its_events() -> None:
    steps = [
        {"kind": "step", "generation": 1, "step": 8, "t": 1.0},
        {"kind": "step", "generation": 1, "step": 9, "t": 2.0},
        {"kind": "step", "generation": 1, "step": 10, "t": 3.5},  # a save before it
        {"kind": "step", "generation": 2, "step": 10, "t": 6.0},
        {"kind": "step", "generation": 2, "step": 11, "t": 6.5},
    ]
    decided = [
        {"kind": "decided", "generation": g, "membership": {"hosts": [0] * n}} for g, n in ((1, 6), (2, 5))
    ]
    events = (decided[0], *steps[:3], decided[1], *steps[3:])
    ran = JobRun("warm restart", 12, events, {}, {})
    assert ran.step_times() == {6: [1.0], 5: [0.5]}
    assert ran.saves() == [1.5]
    assert ran.times()[10] == 3.5
    assert replace(ran, scheme="templates").step_times() == {6: [1.0, 1.5], 5: [0.5]}


def test_when_the_twin_was_done() -> None:
    series = ((0.0, 0.0), (10.0, 5.0), (10.0, 3.0), (20.0, 3.0), (30.0, 13.0))
    result = SimulationResult("x", 30.0, {}, 13.0, 2.0, 1, 1, series)
    assert reached(result, 4.0) == 21.0  # the first time it was taken back
    assert reached(result, 3.0) == 6.0
    assert reached(result, 14.0) == math.inf


def test_the_twin_replays_the_losses_of_a_run() -> None:
    job = Job(6, 0.2, 8e6, 2, 12, 8)
    costs = Costs(detect=0.1, regroup=0.1, regroup_growth=0, start=0.4, replace=1.5, join=0.15)
    costs = replace(costs, storage_bandwidth=80e6, blocking_save=True)
    calibration = Calibration(job, costs, 0.02, {2: 0.6, 3: 0.4, 4: 0.3, 5: 0.25, 6: 0.2})
    steps = [{"kind": "step", "generation": 1, "step": i, "t": 100 + 0.2 * (i + 1)} for i in range(30)]
    lost = {"kind": "injected", "t": 102.5, "place": 3}
    ran = JobRun("templates", 30, (*steps, lost), {}, {})
    result, end = replay(calibration, "templates", ran, back=False)
    assert result.redone == 0 and result.phases["detect"] == 0.1 and result.phases["join"] == 0
    assert 7 < end < 8 and sum(result.phases.values()) == pytest.approx(end)
    taken, _ = replay(calibration, "templates", ran, back=True)
    assert taken.phases["join"] == 0.15
    fewer, later = replay(calibration, "warm restart", ran, back=False)
    assert fewer.redone == 2 and fewer.phases["wait"] == 0 and later > end
    whole, _ = replay(calibration, "warm restart", ran, back=True)
    assert whole.phases["wait"] == 1.5 and whole.phases["slow"] == 0


def test_restart_on_fewer_keeps_saved_steps_and_its_pace() -> None:
    costs = Costs(detect=0, regroup=0, regroup_growth=0, start=10, replace=math.inf, storage_bandwidth=1.0)
    costs = replace(costs, blocking_save=True)
    job = Job(2, 1.0, 0.0)  # saves and loads take no time
    trace = regular(2, 25.5, 1)
    result = simulate(RestartOnFewer(job, costs, 10, {2: 1.0, 1: 2.0}), job, costs, trace, 45.5)
    assert result.steps == 20 + 5 and result.redone == 5
    ours = simulate(GoOnOnFewer(2, 10.0, {2: 1.0, 1: 2.0}), job, costs, trace, 45.5)
    assert ours.steps == 25 + 5 and ours.redone == 0


def test_published_rows() -> None:
    rows = run(("published",))
    assert len(rows) == 2 * len(TRACES)
    headline = next(row for row in rows if "10 min" in row.name and "artifact" in row.name)
    assert headline.emulated == pytest.approx(13.903, abs=0.001) and headline.met
    ours, theirs = twin_runs(TRACES["10 min"][0])
    assert ours.steps > 0 and theirs.steps == 0


def test_sections_are_known() -> None:
    assert list(SECTIONS) == ["planner", "recovery", "rates", "published", "twin", "fidelity"]
    with pytest.raises(UserError, match="is no section"):
        run(("nothing",))


@pytest.mark.slow
def test_planner_rows() -> None:
    rows = run(("planner",), quick=True)
    assert not [row for row in rows if "failed" in row.name]
    assert all(row.met for row in rows if row.target == "all")


@pytest.mark.slow
def test_twin_rows() -> None:
    rows = run(("twin",), quick=True)
    assert rows[0].measured and rows[0].met is None
    assert {"goodput: templates", "goodput: peer memory"} <= {row.name.split(", ", 1)[1] for row in rows}
