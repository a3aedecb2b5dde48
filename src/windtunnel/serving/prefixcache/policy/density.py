"""How soon nodes of a kind are used again, by how long they were not: LHD's hit density (Beckmann et al.,
NSDI '18).

What happens to nodes at which age is counted: they are used, or they go. The density at an age is the hits to
be expected from then on, over the time that the bytes will be taken until a hit or the end. Groups of nodes
that live differently are counted apart; counts of long ago fade.
"""

from __future__ import annotations

import math

import numpy as np
from numpy.typing import NDArray

GROUPS, BUCKETS = 8, 48
FIRST, STEPS = 0.25, 3
"""Ages are counted in buckets: to a quarter of a second, and three to each doubling beyond."""
EVERY, FADE = 256, 0.9
EDGES = np.concatenate([[0.0], FIRST * 2.0 ** (np.arange(1, BUCKETS + 1) / STEPS)])


class Ages:
    """Counts of what happened, and the densities that follow from them; before any, one over the age."""

    def __init__(self) -> None:
        self._hits, self._ends = np.zeros((GROUPS, BUCKETS)), np.zeros((GROUPS, BUCKETS))
        self._count = 0
        self._table = np.tile(1 / (1 + EDGES[:-1]), (GROUPS, 1))

    def of(self, group: NDArray[np.int64], ages: NDArray[np.float64]) -> NDArray[np.float64]:
        """Hits a second to be expected of nodes of these groups that were not used for so many seconds."""
        densities: NDArray[np.float64] = self._table[group, np.searchsorted(EDGES[1:-1], ages, "right")]
        return densities

    def note(self, group: int, age: float, hit: bool) -> None:
        bucket = 0 if age < EDGES[1] else min(BUCKETS - 1, int(STEPS * math.log2(age / FIRST)))
        (self._hits if hit else self._ends)[group, bucket] += 1
        self._count += 1
        if self._count % EVERY == 0:
            for counted in np.flatnonzero((self._hits + self._ends).sum(1)).tolist():
                self._table[counted] = self._densities(counted)
            self._hits *= FADE
            self._ends *= FADE

    def _densities(self, group: int) -> NDArray[np.float64]:
        hits, both = self._hits[group], self._hits[group] + self._ends[group]
        beyond = both[::-1].cumsum()[::-1] + 0.02  # a little of everything may happen at any age
        durations = (beyond * np.diff(EDGES))[::-1].cumsum()[::-1]
        densities: NDArray[np.float64] = (hits[::-1].cumsum()[::-1] + 0.02) / durations
        return densities
