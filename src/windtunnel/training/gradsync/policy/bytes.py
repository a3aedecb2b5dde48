"""The bytes that each rank sends and receives in a sparse sum, exactly, from the ranks' index sets.

What `policy.sparse.traffic` estimates from a few figures is counted here message by message, as the live
schemes send them; so index sets that were recorded from a few ranks, or drawn for more than there are, say
what any scheme would move.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from windtunnel.training.gradsync.policy import partition
from windtunnel.training.gradsync.policy.sparse import BLOCK, INDEX, found

Ints = NDArray[np.int64]
COUNT = 8
"""Bytes of the number of units that begins a message."""
LENGTH = 8
"""Bytes that announce a message."""


def message_bytes(count: Ints, size: int, unit_bytes: int, *, bitmaps: bool) -> Ints:
    """Of messages of ``count`` units each, of a part of ``size``; a message without units has none."""
    index = np.minimum(INDEX * count, -(-size // 8)) if bitmaps else INDEX * count
    return np.where(count > 0, COUNT + -(-count * unit_bytes // INDEX) * INDEX + index, 0)


def exactly(
    scheme: str, sets: Sequence[Ints], units: int, width: int, itemsize: int, seed: int = 0
) -> tuple[Ints, Ints]:
    """Bytes that each rank sends, and that each receives, with what announces them. ``sets[r]``: the units of
    rank r, ascending; of ``width`` elements of ``itemsize`` bytes.

    Raises:
        UserError: an unknown scheme.
    """
    design, world = found(scheme), len(sets)
    if design.index == "none":
        each = np.full(world, 2 * (world - 1) * units * width * itemsize // world)
        return each, each
    if design.index == "block":
        return _parts(blocks_of(sets, width), -(-units * width // BLOCK), BLOCK * itemsize, None)
    if design.partition == "split":
        return _parts(sets, units, width * itemsize, seed if design.balanced else None)
    if design.aggregation == "one-shot":
        mine = message_bytes(_counts(sets), units, width * itemsize, bitmaps=False)
        return (world - 1) * (LENGTH + mine), (world - 1) * LENGTH + mine.sum() - mine
    return _doubling(sets, units, width * itemsize)


def blocks_of(sets: Sequence[Ints], width: int) -> list[Ints]:
    """The blocks of `BLOCK` elements that the rows touch."""
    columns = np.arange(width)
    return [np.unique((one[:, None] * width + columns) // BLOCK) for one in sets]


def pushed_and_pulled(sets: Sequence[Ints], units: int, seed: int | None) -> tuple[Ints, Ints]:
    """Units that each rank has for each part [ranks, parts], and those of each part that any rank has.
    ``seed``: None for contiguous parts."""
    world = len(sets)
    key = partition.keys(units, seed or 0, contiguous=seed is None)
    length = partition.slice_length(units, world)
    owners = [partition.permute(one, key) // length for one in sets]
    pushed = np.array([np.bincount(one, minlength=world) for one in owners])
    union = np.unique(np.concatenate(sets))
    return pushed, np.bincount(partition.permute(union, key) // length, minlength=world)


def imbalance(sets: Sequence[Ints], units: int, seed: int | None) -> tuple[float, float]:
    """Fullest over mean part: of what a rank pushes (the worst rank's), and of what is pulled."""
    pushed, pulled = pushed_and_pulled(sets, units, seed)
    sums = np.maximum(1, pushed.sum(axis=1))
    return float((pushed.max(axis=1) * len(sets) / sums).max()), float(pulled.max() / max(1.0, pulled.mean()))


def overlap(sets: Sequence[Ints], units: int) -> tuple[tuple[float, ...], float]:
    """Densification over 2, 4, 8 … ranks (neighbours, as *hierarchy* adds them up), and the skew of what all
    ranks have together, from their index sets or samples of these."""
    world = len(sets)
    mean = sum(map(len, sets)) / world
    if mean == 0:
        return (), 1.0
    growth, step = [], 2
    while step <= world:
        groups = [sets[begin : begin + step] for begin in range(0, world - step + 1, step)]
        growth.append(sum(len(np.unique(np.concatenate(one))) for one in groups) / len(groups) / mean)
        step *= 2
    slices = np.concatenate(sets) // partition.slice_length(units, world)
    counts = np.bincount(slices, minlength=world)
    return tuple(growth), float(counts.max() / counts.mean())


def _counts(sets: Sequence[Ints]) -> Ints:
    return np.array([len(one) for one in sets], np.int64)


def _parts(sets: Sequence[Ints], units: int, unit_bytes: int, seed: int | None) -> tuple[Ints, Ints]:
    world = len(sets)
    length = partition.slice_length(units, world)
    pushed, pulled = pushed_and_pulled(sets, units, seed)
    bitmaps = seed is not None
    push = message_bytes(pushed, length, unit_bytes, bitmaps=bitmaps)
    np.fill_diagonal(push, 0)
    pull = message_bytes(pulled, length, unit_bytes, bitmaps=bitmaps)
    announced = 2 * (world - 1) * LENGTH
    sent = announced + push.sum(axis=1) + (world - 1) * pull
    return sent, announced + push.sum(axis=0) + pull.sum() - pull


def _doubling(sets: Sequence[Ints], units: int, unit_bytes: int) -> tuple[Ints, Ints]:
    world = len(sets)
    even = 1 << (world.bit_length() - 1)
    have = list(sets)
    sent, received = np.zeros(world, np.int64), np.zeros(world, np.int64)

    def trade(one: int, other: int, *, back: bool = True) -> None:
        for source, to, real in ((one, other, True), (other, one, back)):
            count = np.array([len(have[source]) if real else 0])
            nbytes = LENGTH + int(message_bytes(count, units, unit_bytes, bitmaps=False)[0])
            sent[source] += nbytes
            received[to] += nbytes

    for rank in range(even, world):
        trade(rank, rank - even, back=False)
        have[rank - even] = np.union1d(have[rank - even], have[rank])
    step = 1
    while step < even:
        for rank in range(even):
            if not rank & step:
                trade(rank, rank ^ step)
        for rank in range(0, even, 2 * step):  # all of a group have the same by now
            have[rank : rank + 2 * step] = [np.union1d(have[rank], have[rank + step])] * (2 * step)
        step *= 2
    for rank in range(even, world):
        trade(rank - even, rank, back=False)
    return sent, received
