"""The published formula beside the 1F1B schedule that it stands for."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pipeline_oracles import makespan, pipeline_time

from windtunnel.training.pipelines.policy.planner import iteration_time

stages = st.lists(st.integers(1, 9), min_size=1, max_size=6)


@pytest.mark.parametrize("count", [1, 2, 5])
@pytest.mark.parametrize("microbatches", [1, 3, 8, 20])
def test_equal_stages_are_exact(count: int, microbatches: int) -> None:
    exact = (microbatches + count - 1) * 4.0
    assert makespan([1.0] * count, [3.0] * count, microbatches) == exact
    assert pipeline_time([4.0] * count, microbatches) == exact
    assert iteration_time([4.0] * count, microbatches) == exact


def test_the_formula_by_hand() -> None:
    # Stages of 22, 3, 21 seconds, 12 microbatches; the slowest is the first: 46 + (12 - 3 + 0 - 1) 22 + 46.
    assert iteration_time([22.0, 3.0, 21.0], 12) == 268.0
    # Of equally slow stages the last one counts: 9 + (4 - 3 + 2 - 1) 4 + 4.
    assert iteration_time([4.0, 1.0, 4.0], 4) == 21.0


def schedule(times: list[int], microbatches: int) -> float:
    return makespan([t / 4 for t in times], [3 * t / 4 for t in times], microbatches)


@given(stages, st.integers(1, 30))
@settings(max_examples=300, deadline=None, derandomize=True)
def test_the_schedule_is_no_faster_than_any_of_its_stages(times: list[int], microbatches: int) -> None:
    bound = max(sum(times[:s]) + microbatches * times[s] for s in range(len(times)))
    truth = schedule(times, microbatches)
    assert bound <= truth + 1e-9
    assert iteration_time(times, microbatches) <= pipeline_time(times, microbatches) + 1e-9


@given(stages)
@settings(max_examples=500, deadline=None, derandomize=True)
def test_both_estimates_are_near_with_four_microbatches_a_stage(times: list[int]) -> None:
    n = 4 * len(times)
    truth = schedule(times, n)
    assert 0.75 * truth <= iteration_time(times, n) <= truth + 1e-9
    assert truth - 1e-9 <= pipeline_time(times, n) <= 1.15 * truth


def test_one_microbatch_passes_all_stages_twice() -> None:
    assert makespan([1, 2, 3], [4, 5, 6], 1) == 21
