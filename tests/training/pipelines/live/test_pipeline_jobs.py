"""Pipelines of real hosts compute what one process does, and end with a sentence where they cannot."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from training.pipelines.live.pipeline_problems import train
from training.pipelines.live.pipeline_world import PROBLEM, Script, check, expected, layouts, run_job

torch.set_num_threads(1)


def test_two_pipelines_compute_what_one_process_does(tmp_path: Path) -> None:
    world = run_job(tmp_path, 4, train, PROBLEM)
    check(world)
    assert layouts(world) == [("compose", [[0, 1], [2, 3]], 0)]


def test_three_stages_beside_two(tmp_path: Path) -> None:
    world = run_job(tmp_path, 5, train, PROBLEM)
    check(world)
    assert layouts(world) == [("compose", [[0, 1], [2, 3, 4]], 0)]


def test_plain_floats_stay_close(tmp_path: Path) -> None:
    problem = PROBLEM.but(reduction="float")
    world = run_job(tmp_path, 4, train, problem, script=Script(kill_at={2: [3]}))
    losses, _ = expected(problem)
    assert world.steps() == pytest.approx(losses, rel=1e-4)
    world.result()


def test_too_few_hosts(tmp_path: Path) -> None:
    world = run_job(tmp_path, 2, train, PROBLEM, script=Script(kill_at={1: [1]}))
    assert "1 hosts are left; the model needs 2" in world.errors[0]


def test_too_large_for_fixed_point(tmp_path: Path) -> None:
    world = run_job(tmp_path, 2, train, PROBLEM.but(scale=2.0**62))
    assert "OverflowError: step 0: a gradient is too large for fixed-point sums" in world.errors[0]


def test_no_number(tmp_path: Path) -> None:
    problem = PROBLEM.but(poison=3, steps=4)
    world = run_job(tmp_path / "a", 2, train, problem)
    assert "FloatingPointError: step" in world.errors[0]
    for reduction in ("fixed", "float"):
        problem = problem.but(nonfinite="skip", reduction=reduction)
        world = run_job(tmp_path / reduction, 2, train, problem)
        skipped = [event["skipped"] for event in world.of_kind("step")]
        assert skipped.count(True) == 1
        assert world.result()["steps"] == 4
