"""The bench of pipelines: its second exact method, its arithmetic, and the rows that cost little."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import replace
from itertools import pairwise

import pytest

from benchmarks.training.pipelines import SECTIONS, run
from benchmarks.training.pipelines import planner as planner_section
from benchmarks.training.pipelines.measured import random_losses, regular_losses
from benchmarks.training.pipelines.planner import brute_force, certificate, even_cuts, formula
from benchmarks.training.pipelines.runs import HOSTS, JobRun
from windtunnel.base.errors import UserError
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


def test_sections_are_known() -> None:
    assert list(SECTIONS) == ["planner", "recovery", "rates"]
    with pytest.raises(UserError, match="is no section"):
        run(("nothing",))


@pytest.mark.slow
def test_planner_rows() -> None:
    rows = run(("planner",), quick=True)
    assert not [row for row in rows if "failed" in row.name]
    assert all(row.met for row in rows if row.target == "all")
