"""The sparse codec: the elements of largest magnitude, the others wait in the residual.

A code has room for a fixed number of elements, so that the codes of all ranks are of one size: their indices,
then their values; an unused place has the index -1. Codes add up by scatter-*add*, so that an index which
several ranks chose keeps the sum of their values.

What reaches a threshold is taken that a sample gives (Deep Gradient Compression, Lin et al., ICLR '18), by
hashing (DRAGONN, Wang et al., ICML '22): each element that reaches it writes its index to a random place of
a table four times as large as the code, where a later one may overwrite it. That replaces the prefix sum
which compaction takes on a parallel device. A processor has one compiled pass instead that appends: hashing
would only cost there. The pass begins at a random place, so that what finds no room is a different part each
time.

A magnitude is compared by its bits as an integer: they order as magnitudes do, with infinity above all
numbers and NaN above infinity. So both are chosen, one at least, and sent as they are.
"""

from __future__ import annotations

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from windtunnel.base.compiled import jit

SAMPLED, EXPECTED = 4096, 32
"""Elements in the sample of a threshold, and of it that should reach the threshold: both at least. Their
number varies by its root."""
Words = NDArray[np.uint32]
TABLE = 4
"""Places in the hash table for each in the code, as in DRAGONN's released code."""
BLOCK = 64
"""Elements that the pass skips at once where none reaches the threshold."""
MAGNITUDE, INFINITE = 0x7FFFFFFF, 0x7F800000


def room_of(numel: int, ratio: float) -> int:
    """Elements that a code of ``numel`` has room for."""
    return min(numel, max(1, round(numel * ratio)))


def parts(code: Tensor) -> tuple[Tensor, Tensor]:
    """Indices and values, as views."""
    half = code.numel() // 2
    return code[:half].view(torch.int32), code[half:].view(torch.float32)


def encode(row: Tensor, seed: int, ratio: float) -> Tensor:
    """The code of those that reach the sampled threshold."""
    code = torch.empty(8 * room_of(len(row), ratio), dtype=torch.uint8, device=row.device)
    indices, values = parts(code)
    if row.is_cpu:
        least = int(_enough(row, len(indices), seed))
        bits = row.numpy().view(np.uint32)
        append(bits, least, seed % len(row), indices.numpy(), values.numpy().view(np.uint32))
    else:
        indices.copy_(chosen_by_hash(row, len(indices), seed))
        values.copy_(torch.where(indices >= 0, row[indices.clamp(min=0)], 0.0))
    return code


def _enough(row: Tensor, room: int, seed: int) -> Tensor:
    """The bits of a magnitude that about ``room`` elements reach; zeros never do, NaN and infinity always."""
    bits, numel = row.view(torch.int32), len(row)
    if room == numel:
        return torch.ones((), dtype=torch.int32, device=row.device)
    # one of so many, from a random one on; odd, so that it goes through all columns of most matrices
    stride = max(1, numel // max(SAMPLED, EXPECTED * numel // room)) - 1 | 1
    bits = bits[seed % stride :: stride]
    rank = max(1, round(len(bits) * room / numel))
    return torch.topk(bits & MAGNITUDE, rank).values[-1].clamp(1, INFINITE)


@jit
def append(bits: Words, least: int, start: int, indices: NDArray[np.int32], words: Words) -> None:
    """Elements whose magnitude is ``least`` or more, going around from ``start`` until there is no room
    (of one place at least). Unused places get -1 and 0. What is no number takes the first
    place where it comes when there is no room.

    Within a block that has any, each index is written, and its place kept if it was wanted: a loop without a
    branch takes as long for any density.
    """
    mask, enough, infinite = np.uint32(MAGNITUDE), np.uint32(least), np.uint32(INFINITE)
    count, room = 0, len(words)
    for begin, end in ((start, len(bits)), (0, start)):
        for first in range(begin, end, BLOCK):
            block = bits[first : min(first + BLOCK, end)]
            top = infinite
            if len(block) == BLOCK:
                top = np.uint32(0)
                for i in range(BLOCK):
                    top = max(top, np.uint32(block[i] & mask))
            if top < enough:
                continue
            scanned, before = 0, count
            if count < room:
                for i in range(len(block)):
                    indices[count] = first + i
                    count += int(np.uint32(block[i] & mask) >= enough)
                    scanned = i + 1
                    if count == room:
                        break
                for place in range(before, count):
                    words[place] = bits[indices[place]]
            if top >= infinite:
                for i in range(scanned, len(block)):
                    if np.uint32(block[i] & mask) >= infinite:
                        indices[0], words[0] = first + i, block[i]
    indices[count:] = -1
    words[count:] = 0


def chosen_by_hash(row: Tensor, room: int, seed: int) -> Tensor:
    """On any device and without waiting for it: indices of those that reach the threshold, -1 behind them, in
    ``room`` places. Of those that meet in one place of the table one is chosen, and the prefix sum goes over
    the table only."""
    magnitude = row.view(torch.int32) & MAGNITUDE
    numbers = torch.arange(len(row), device=row.device)
    generator = torch.Generator(row.device).manual_seed(seed)
    places = torch.randint(TABLE * room, row.shape, generator=generator, device=row.device)
    # those that do not reach it all meet in one place more, which is then left out
    places = torch.where(magnitude >= _enough(row, room, seed), places, TABLE * room)
    numbers = numbers.new_full((TABLE * room + 1,), -1).scatter_(0, places, numbers)[:-1]
    reached = numbers >= 0
    upto, first = reached.cumsum(0), seed % len(row) % len(reached)
    place = (upto - 1 - upto[first] + reached[first].long()) % upto[-1].clamp(min=1)
    place = torch.where(reached & (place < room), place, room)
    indices = numbers.new_full((room + 1,), -1).scatter_(0, place, numbers)[:room].int()
    worst = magnitude.argmax()
    missing = (magnitude[worst] >= INFINITE) & ~(indices == worst).any()
    indices[0] = torch.where(missing, worst, indices[0])
    return indices


def add(code: Tensor, out: Tensor, alpha: float) -> None:
    """Adds ``alpha`` times each value at its index."""
    indices, values = parts(code)
    out.index_add_(0, indices.clamp(min=0), torch.where(indices >= 0, values, 0.0), alpha=alpha)
