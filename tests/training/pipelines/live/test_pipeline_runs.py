"""Real machines, real kills: what comes out is what one process would have computed."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from pipeline_problems import Problem, plain, train
from pipeline_world import Script, World, fly

torch.set_num_threads(1)
PROBLEM = Problem()


@pytest.fixture(scope="module")
def expected() -> tuple[dict[int, float], dict[str, str]]:
    return plain(PROBLEM)


def check(world: World, expected: tuple[dict[int, float], dict[str, str]]) -> None:
    assert world.result()["hashes"] == expected[1]
    assert world.steps() == expected[0]


def layouts(world: World) -> list[tuple[str, list[list[int]]]]:
    return [(event["how"], event["pipelines"]) for event in world.of_kind("layout")]


def test_two_pipelines_are_one_process(tmp_path: Path, expected: object) -> None:
    world = fly(tmp_path, 4, train, PROBLEM)
    check(world, expected)
    assert layouts(world) == [("compose", [[0, 1], [2, 3]])]
