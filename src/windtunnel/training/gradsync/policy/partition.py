"""Which rank adds up which unit of a sparse gradient (an element, or a row of a table), and where it lies.

The units are put in an order that looks random, which all ranks know from a seed, and that order is cut into
slices of equal length: unit u is of rank ``place(u) // length``, at ``place(u) % length``. So every rank gets
about as many units of any gradient as any other, however its indices are skewed, and nothing is agreed on or
sent for that (first level of ZEN's hierarchical hashing, OSDI '25, section 3). The order is a permutation
that is computed, forwards and backwards: no unit is lost or doubled, and no table of all units is kept.

The permutation is of k bits, the fewest that number all units: multiply by an odd number, fold the upper half
onto the lower, three times over; what falls outside of the units is permuted again until it does not.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

Ints = NDArray[np.int64]
ROUNDS = 3


def slice_length(units: int, parts: int) -> int:
    """Of each of ``parts`` equal slices; the last ones may be shorter, or empty."""
    return -(-units // parts)


@dataclass(frozen=True)
class Order:
    """An order of ``units``: by ``seed``, or, where it is None, as they are. Its methods take int64 arrays of
    NumPy or torch, on any device, and give new ones."""

    units: int
    seed: int | None

    def places(self, units: Any) -> Any:
        """``place(u)`` of each."""
        mask, shift, rounds = self._keys()

        def once(x: Any) -> Any:
            for add, odd, _ in rounds:
                x = ((x ^ add) * odd) & mask
                x ^= x >> shift
            return x

        return self._inside(units, once)

    def units_at(self, places: Any) -> Any:
        """The inverse: folding with a shift of half the bits undoes itself."""
        mask, shift, rounds = self._keys()

        def once(x: Any) -> Any:
            for add, _, inverse in rounds[::-1]:
                x = (((x ^ (x >> shift)) * inverse) & mask) ^ add
            return x

        return self._inside(places, once)

    def _keys(self) -> tuple[int, int, list[tuple[int, int, int]]]:
        bits = max(2, (self.units - 1).bit_length())
        if self.seed is None:
            return 0, 0, []
        rng = np.random.default_rng([self.seed, self.units])
        rounds = []
        for _ in range(ROUNDS):
            add, odd = int(rng.integers(1 << bits)), int(rng.integers(1 << bits)) | 1
            rounds.append((add, odd, pow(odd, -1, 1 << bits)))
        return (1 << bits) - 1, (bits + 1) // 2, rounds

    def _inside(self, x: Any, once: Callable[[Any], Any]) -> Any:
        x = once(x)
        while (outside := x >= self.units).any():
            x[outside] = once(x[outside])
        return x


def growth_of(sets: Sequence[Ints]) -> tuple[float, ...]:
    """Densification over 2, 4, 8 … ranks (neighbours, as *hierarchy* adds them up), from the index sets of
    the ranks, or from samples of these."""
    world = len(sets)
    mean = sum(map(len, sets)) / world
    growth, step = list[float](), 2
    while mean and step <= world:
        groups = [sets[begin : begin + step] for begin in range(0, world - step + 1, step)]
        growth.append(sum(len(np.unique(np.concatenate(group))) for group in groups) / len(groups) / mean)
        step *= 2
    return tuple(growth)
