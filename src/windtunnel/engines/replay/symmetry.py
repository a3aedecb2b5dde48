"""Ranks that cannot be told apart: one of each kind has the times of all.

Two ranks that run the same program at the same speed, and whose k-th joins are with ranks that are alike in
turn, do everything at the same instants, because a time is a maximum and a sum over times of their peers.
Classes of such ranks are the coarsest equitable partition of ranks and groups, found by colour refinement
(Weisfeiler and Leman 1968; Cardon and Crochemore 1982): start from what is given of each rank, and split
for as long as the colours of its groups' members differ. A colour is a 64-bit hash while it is refined.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from windtunnel.base.compiled import jit
from windtunnel.engines.replay.layout import Ints, Longs

Hashes = NDArray[np.uint64]


def colour(rank_key: Longs, rank_group_ptr: Longs, rank_group: Longs, group_key: Longs | None = None) -> Ints:
    """The coarsest classes of ranks that cannot be told apart.

    Args:
        rank_key: shape (R,), equal where ranks are alike by themselves (program, speed).
        rank_group_ptr, rank_group: the groups of rank r, slot by slot, are
            ``rank_group[rank_group_ptr[r]:rank_group_ptr[r+1]]``. A group's members are the ranks that list
            it.
        group_key: shape (G,), equal where groups are alike by themselves (placement, cost); all alike if
            None.

    Returns:
        Shape (R,): dense colours, numbered in the order of their first rank. Two ranks have the same colour
        if and only if their keys are equal and, slot by slot, so are the keys of their groups and the
        multisets of (colour, slot) of these groups' members.
    """
    if not len(rank_key):
        return np.zeros(0, np.int32)
    groups = int(rank_group.max(initial=-1)) + 1
    if group_key is None:
        group_key = np.zeros(groups, np.int64)
    ptr = np.ascontiguousarray(rank_group_ptr, np.int64)
    group = np.ascontiguousarray(rank_group, np.int64)
    keys = np.ascontiguousarray(group_key, np.int64).view(np.uint64)
    colours, count = _dense(np.asarray(rank_key))
    while True:
        finer, finer_count = _dense(
            _rank_hashes(colours, ptr, group, _group_hashes(colours, ptr, group, keys))
        )
        if finer_count == count:
            return finer
        colours, count = finer, finer_count


def _dense(values: NDArray[Any]) -> tuple[Ints, int]:
    """Number equal values alike, in the order of their first appearance."""
    _, first, inverse = np.unique(values, return_index=True, return_inverse=True)
    place = np.empty(len(first), np.int32)
    place[np.argsort(first)] = np.arange(len(first), dtype=np.int32)
    return place[inverse.reshape(-1)], len(first)


@jit
def _mix(word: np.uint64) -> np.uint64:
    """SplitMix64's finaliser (Steele et al., OOPSLA 2014)."""
    word = (word ^ (word >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    word = (word ^ (word >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return word ^ (word >> np.uint64(31))


@jit
def _group_hashes(colours: Ints, ptr: Longs, group: Longs, keys: Hashes) -> Hashes:
    """Hash of each group's key and its multiset of (member's colour, member's slot)."""
    hashes = np.zeros(len(keys), np.uint64)
    for r in range(len(colours)):
        own = _mix(np.uint64(colours[r]) + np.uint64(0x9E3779B97F4A7C15))
        for k in range(ptr[r], ptr[r + 1]):
            hashes[group[k]] += _mix(own + np.uint64(k - ptr[r]))
    for g in range(len(keys)):
        hashes[g] = _mix(hashes[g] ^ _mix(keys[g] + np.uint64(0x632BE59BD9B4E019)))
    return hashes


@jit
def _rank_hashes(colours: Ints, ptr: Longs, group: Longs, hashes: Hashes) -> Hashes:
    """Hash of each rank's colour and the hashes of its groups, slot by slot."""
    buffer = np.empty(len(colours), np.uint64)
    for r in range(len(colours)):
        word = _mix(np.uint64(colours[r]) + np.uint64(0xD1B54A32D192ED03))
        for k in range(ptr[r], ptr[r + 1]):
            word = _mix(word * np.uint64(3) + hashes[group[k]])
        buffer[r] = word
    return buffer
