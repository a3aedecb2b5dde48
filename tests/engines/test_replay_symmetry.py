"""Classes of like ranks against refinement by brute force."""

from __future__ import annotations

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from windtunnel.engines.replay import colour

seeds = st.integers(0, 2**32 - 1)


def csr(rows: list[list[int]]) -> tuple[np.ndarray, np.ndarray]:
    return np.cumsum([0] + [len(row) for row in rows]), np.array([x for row in rows for x in row], np.int64)


def colours_by_force(key: list[int], slots: list[list[int]], group_key: list[int]) -> list[int]:
    """Refine with the full multisets as dictionary keys, as the definition says."""
    colours = list(key)
    while True:
        groups: dict[int, list[tuple[int, int]]] = {}
        for r, row in enumerate(slots):
            for slot, g in enumerate(row):
                groups.setdefault(g, []).append((colours[r], slot))
        numbers: dict[object, int] = {}
        finer = []
        for r, row in enumerate(slots):
            signature = (colours[r], tuple((group_key[g], tuple(sorted(groups[g]))) for g in row))
            finer.append(numbers.setdefault(signature, len(numbers)))
        if len(numbers) == len(set(colours)):
            return finer
        colours = finer


@settings(max_examples=150, deadline=None)
@given(seeds, st.integers(1, 14), st.integers(1, 8), st.integers(1, 3))
def test_colour_is_the_coarsest_equitable_partition(seed: int, ranks: int, groups: int, keys: int) -> None:
    rng = np.random.default_rng(seed)
    key = rng.integers(0, keys, ranks).tolist()
    slots = [rng.integers(0, groups, int(rng.integers(0, 4))).tolist() for _ in range(ranks)]
    group_key = rng.integers(0, 2, groups).tolist()
    colours = colour(np.array(key), *csr(slots), np.array(group_key))
    assert colours.tolist() == colours_by_force(key, slots, group_key)


def test_colour_of_a_path_and_of_a_ring() -> None:
    """Messages to the next rank: a ring has one class; in a pipeline every stage is its own."""
    n = 50
    ring = [[r, (r - 1) % n] for r in range(n)]
    assert set(colour(np.zeros(n, np.int64), *csr(ring)).tolist()) == {0}
    path = [([r] if r < n - 1 else []) + ([r - 1] if r else []) for r in range(n)]
    assert len(set(colour(np.zeros(n, np.int64), *csr(path)).tolist())) == n
