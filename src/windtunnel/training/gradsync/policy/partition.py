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

import numpy as np
from numpy.typing import NDArray

from windtunnel.base.compiled import jit

Ints = NDArray[np.int64]
ROUNDS = 3


def slice_length(units: int, parts: int) -> int:
    """Of each of ``parts`` equal slices; the last ones may be shorter, or empty."""
    return -(-units // parts)


def keys(units: int, seed: int, *, contiguous: bool = False) -> Ints:
    """What `permute` and its inverse need: units, mask, shift, then (add, odd factor, its inverse) a round.
    ``contiguous``: no round, every unit stays where it is."""
    bits = max(2, (units - 1).bit_length())
    head = [units, (1 << bits) - 1, (bits + 1) // 2]
    rng = np.random.default_rng([seed, units])
    for _ in range(0 if contiguous else ROUNDS):
        add, odd = int(rng.integers(1 << bits)), int(rng.integers(1 << bits)) | 1
        head += [add, odd, pow(odd, -1, 1 << bits)]
    return np.array(head, np.int64)


@jit
def permute(units: Ints, key: Ints) -> Ints:
    """``place(u)`` of each."""
    total, mask, shift = key[0], key[1], key[2]
    found = np.empty(len(units), np.int64)
    for i in range(len(units)):
        x = units[i]
        while True:
            for k in range(3, len(key), 3):
                x = ((x ^ key[k]) * key[k + 1]) & mask
                x ^= x >> shift
            if x < total:
                break
        found[i] = x
    return found


@jit
def unpermute(places: Ints, key: Ints) -> Ints:
    """The inverse: folding with a shift of half the bits undoes itself."""
    total, mask, shift = key[0], key[1], key[2]
    found = np.empty(len(places), np.int64)
    for i in range(len(places)):
        x = places[i]
        while True:
            for k in range(len(key) - 3, 2, -3):
                x ^= x >> shift
                x = ((x * key[k + 2]) & mask) ^ key[k]
            if x < total:
                break
        found[i] = x
    return found


@jit
def buckets(units: Ints, key: Ints, length: int, parts: int) -> tuple[Ints, Ints, Ints]:
    """The units by the slice that they are of: ``order`` (numbers of ``units``), where each slice begins in
    it (parts + 1), and the positions in the slices, in that order. Counted first, then filled: no bucket can
    be too small."""
    places = permute(units, key)
    starts = np.zeros(parts + 1, np.int64)
    for place in places:
        starts[place // length + 1] += 1
    for part in range(parts):
        starts[part + 1] += starts[part]
    filled = starts[:-1].copy()
    order = np.empty(len(units), np.int64)
    positions = np.empty(len(units), np.int64)
    for i in range(len(places)):
        part = places[i] // length
        at = filled[part]
        filled[part] = at + 1
        order[at] = i
        positions[at] = places[i] - part * length
    return order, starts, positions
