"""Random numbers and samples that depend on the step alone."""

from __future__ import annotations

import random
from collections import Counter

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from windtunnel.training.survive.live import determinism

sizes = st.integers(1, 40)


@given(st.integers(0, 5), sizes, sizes, st.integers(0, 6))
def test_a_step_is_a_block_of_the_epochs(seed: int, count: int, batch: int, step: int) -> None:
    everything = [i for s in range(step + 1) for i in determinism.samples(seed, count, batch, s)]
    assert len(everything) == (step + 1) * batch
    for begin in range(0, len(everything) - count + 1, count):
        assert sorted(everything[begin : begin + count]) == list(range(count))  # each exactly once
    assert max(Counter(everything).values()) - len(everything) // count <= 1


@given(st.lists(st.integers(0, 5), min_size=1, max_size=6))
def test_shares_make_up_the_step(parts: list[int]) -> None:
    indices = list(range(sum(parts)))
    assert [i for part in range(len(parts)) for i in determinism.share(indices, parts, part)] == indices


def test_refused() -> None:
    with pytest.raises(ValueError, match="batch=0"):
        determinism.samples(0, 5, 0, 0)
    with pytest.raises(ValueError, match="do not make up 4"):
        determinism.share([1, 2, 3, 4], [1, 2], 0)


def test_seeds_differ_and_stay() -> None:
    seeds = {determinism.seed_for(run, step, m) for run in range(5) for step in range(20) for m in range(5)}
    assert len(seeds) == 500 and all(0 <= seed < 1 << 63 for seed in seeds)
    assert determinism.seed_for(1, 23, 4) != determinism.seed_for(12, 3, 4)
    assert determinism.seed_for(0, 0, 0) == 759540517790923586  # in each version alike
    draws = [torch.rand(4, generator=determinism.generator_for(1, 2, 3)) for _ in range(2)]
    assert torch.equal(*draws)


def test_generators_go_on_where_they_were() -> None:
    before = determinism.capture()

    def draw() -> tuple[list[float], list[float], list[float]]:
        return torch.rand(3).tolist(), np.random.rand(3).tolist(), [random.gauss(0, 1) for _ in range(3)]

    first = draw()
    assert draw() != first
    determinism.restore(before)
    assert draw() == first
