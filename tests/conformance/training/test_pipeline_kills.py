"""Real hosts, real kills: what comes out is what one process would have computed, to the last bit."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest
import torch

from training.pipelines.live.pipeline_problems import train
from training.pipelines.live.pipeline_world import PROBLEM, Script, check, expected, layouts, run_job
from windtunnel.training.checkpoint import steps

torch.set_num_threads(1)


@pytest.mark.slow
def test_simple_borrow_merge_and_join(tmp_path: Path) -> None:
    problem = PROBLEM.but(steps=7)
    script = Script(kill_at={0: [6], 1: [0], 2: [4], 3: [3]}, join_at={4: [7]})
    world = run_job(tmp_path, 7, train, problem, script=script)
    check(world, problem)
    assert layouts(world)[0] == ("compose", [[0, 1], [2, 3], [4, 5, 6]], 0)
    assert [how for how, _, _ in layouts(world)] == [
        "compose", "simple", "merge", "borrow", "merge", "search",
    ]  # fmt: skip
    assert sorted(len(pipeline) for pipeline in layouts(world)[-1][1]) == [2, 2]


@pytest.mark.slow
@pytest.mark.parametrize("changes", [{"search": True}, {"max_norm": 0.5}], ids=str)
def test_bits_are_kept(tmp_path: Path, changes: dict[str, Any]) -> None:
    problem = PROBLEM.but(**changes)
    check(run_job(tmp_path, 5, train, problem, script=Script(kill_at={1: [2]}, join_at={2: [5]})), problem)


def test_killed_at_each_point_of_a_step(tmp_path: Path) -> None:
    """Each death leaves the step either discarded or committed for all, and never redone when committed."""
    problem = PROBLEM.but(n0=1, steps=5)
    points = ["before_commit", "after_ack", "before_apply", "step"]
    faults = [f"kill:rank=1,point={point},step={step}" for step, point in enumerate(points)]
    world = run_job(tmp_path, 6, train, problem, script=Script(faults=faults))
    check(world, problem)
    assert [step for _, _, step in layouts(world)] == [0, 0, 2, 3, 4]


@pytest.mark.slow
def test_step_in_doubt_on_every_subset(tmp_path: Path) -> None:
    """The commit is decided, some are told, then a host dies: all survivors apply the step."""
    problem = PROBLEM.but(n0=1)
    untold = [
        ("commit/1/0", {0, 1, 2, 3, 4, 5}, 5),
        ("commit/1/1", set[int](), 4),
        ("commit/1/2", {1, 2}, 3),
        ("commit/1/3", {0}, 2),
        ("commit/1/4", {0, 1}, 1),
    ]
    world = run_job(tmp_path, 6, train, problem, script=Script(untold=untold))
    check(world, problem)
    assert [step for _, _, step in layouts(world)] == [0, 1, 2, 3, 4, 5]


@pytest.mark.slow
def test_step_that_was_not_decided_is_done_again(tmp_path: Path) -> None:
    problem = PROBLEM.but(n0=1)
    said = [(3, "commit/1/1"), (2, "commit/1/3"), (0, "finished")]
    world = run_job(tmp_path, 4, train, problem, script=Script(kill_on_post=said))
    check(world, problem)
    assert [step for _, _, step in layouts(world)] == [0, 1, 3, 6]


def test_recovery_is_hit_too(tmp_path: Path) -> None:
    """Hosts die while the others recover: having regrouped, about to restore, having copied."""
    script = Script(
        faults=["kill:rank=3,point=regrouped,generation=2", "kill:rank=1,point=restoring,generation=3"],
        kill_at={1: [6]},
        kill_on_post=[(5, "restored")],
    )
    problem = PROBLEM.but(n0=1, largest=3)
    world = run_job(tmp_path, 7, train, problem, script=script)
    check(world, problem)
    assert len(world.memberships) == 5
    assert [step for _, _, step in layouts(world)][-1] in (2, 3)


def test_killed_at_any_time(tmp_path: Path) -> None:
    rng = random.Random(1)
    victims = rng.sample(range(6), 4)
    # The moments within a step are as chance has them; two die at once where the copies allow it.
    script = Script(kill_at={step: [victims[step]] for step in range(4)}, join_at={3: [6], 4: [7]})
    problem = PROBLEM.but(n0=1, steps=7)
    check(run_job(tmp_path, 6, train, problem, script=script), problem)


def test_last_copy_is_named(tmp_path: Path) -> None:
    problem = PROBLEM.but(largest=3)
    world = run_job(tmp_path, 3, train, problem, script=Script(kill_at={1: [1]}))
    assert layouts(world)[0][1] == [[0, 1, 2]]
    assert "LayersLost: the last copy of block" in world.errors[0]
    assert "checkpoints: none are configured" in world.errors[0]


@pytest.mark.slow
def test_last_copy_comes_from_storage(tmp_path: Path) -> None:
    """The newest step that can be read whole is taken, by all; then the trajectory is the same."""
    problem = PROBLEM.but(largest=3, checkpoint=str(tmp_path / "kept"), every=1)
    whole = run_job(tmp_path / "a", 3, train, problem, script=Script(kill_at={3: [1]}))
    check(whole, problem)
    assert layouts(whole)[1][2] in (3, 4)
    assert [checkpoint.step for checkpoint in steps(str(tmp_path / "kept"))] == [5, 6]
    # A new job goes on from there; the newest is damaged, so it is the one before.
    (damaged,) = (tmp_path / "kept").glob("steps/*06-*/rank2.*")
    damaged.write_bytes(damaged.read_bytes()[:-1] + b"\xff")
    longer = problem.but(steps=7)
    again = run_job(tmp_path / "b", 4, train, longer)
    assert layouts(again)[0][2] == 5
    assert again.result()["hashes"] == expected(longer)[1]
    assert [checkpoint.step for checkpoint in steps(str(tmp_path / "kept"))][-1] == 7
