"""Random numbers and samples that depend on the step alone."""

from __future__ import annotations

from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from windtunnel.training.elastic import determinism

sizes = st.integers(1, 40)


@given(st.integers(0, 5), sizes, sizes, st.integers(0, 6))
def test_a_step_is_a_block_of_the_epochs(seed: int, count: int, batch: int, step: int) -> None:
    everything = [i for s in range(step + 1) for i in determinism.samples(seed, count, s * batch, batch)]
    assert len(everything) == (step + 1) * batch
    for begin in range(0, len(everything) - count + 1, count):
        assert sorted(everything[begin : begin + count]) == list(range(count))  # each exactly once
    assert max(Counter(everything).values()) - len(everything) // count <= 1


def test_refused() -> None:
    with pytest.raises(ValueError, match="size=0"):
        determinism.samples(0, 5, 0, 0)


def test_seeds_differ_and_stay() -> None:
    seeds = {determinism.seed_for(run, step, m) for run in range(5) for step in range(20) for m in range(5)}
    assert len(seeds) == 500 and all(0 <= seed < 1 << 63 for seed in seeds)
    assert determinism.seed_for(1, 23, 4) != determinism.seed_for(12, 3, 4)
    assert determinism.seed_for(0, 0, 0) == 759540517790923586  # in each version alike
