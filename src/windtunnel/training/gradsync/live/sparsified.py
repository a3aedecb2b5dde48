"""Sparse codecs: the elements of largest magnitude, or random ones; the others wait in the residual.

A code has room for a fixed number of elements, so that the codes of all ranks are of one size: their indices,
then their values; an unused place has the index -1. Codes add up by scatter-*add*, so that an index which
several ranks chose keeps the sum of their values.

*topk* is exact. *threshold* takes what reaches a threshold that a sample gives (Deep Gradient Compression,
Lin et al., ICLR '18), *dragonn* the same by hashing (Wang et al., ICML '22): each element that reaches it
writes its index to a random place of a table four times as large as the code, where a later one may
overwrite it. That replaces the prefix sum which compaction takes on a parallel device. On a processor
both are one compiled pass that appends: hashing would only cost there. The pass begins at a random place,
so that what finds no room is a different part each time. *randomk* takes the elements that the seed gives,
the same on all ranks, one out of each of as many even slices; only values are sent, and their sums are the
code of the sum.

A magnitude is compared by its bits as an integer: they order as magnitudes do, with infinity above all
numbers and NaN above infinity. So both are chosen, one at least, and sent as they are. Random elements would
miss them: there all values become NaN where the tensor has one.
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


def kept(numel: int, ratio: float) -> int:
    """Elements that a code of ``numel`` has room for."""
    return min(numel, max(1, round(numel * ratio)))


def parts(code: Tensor) -> tuple[Tensor, Tensor]:
    """Indices and values, as views."""
    half = code.numel() // 2
    return code[:half].view(torch.int32), code[half:].view(torch.float32)


def encode_largest(row: Tensor, seed: int, ratio: float) -> Tensor:
    """Exactly the largest. On a processor, what reaches a threshold of half as many again are candidates,
    almost always enough and few; else all elements are."""
    room = kept(len(row), ratio)
    indices, values = None, row
    if row.is_cpu and 4 * room < len(row):
        count, code = _appended(row, room + room // 2, seed, 3 * room)
        if room <= count < 3 * room:
            indices, values = (one[:count] for one in parts(code))
    largest = torch.topk(values.abs(), room, sorted=False).indices
    chosen = largest.int() if indices is None else indices[largest]
    return _joined(chosen, values[largest])


def encode_reached(row: Tensor, seed: int, ratio: float, hashed: bool) -> Tensor:
    """Those that reach the sampled threshold; ``hashed`` matters where the device is parallel."""
    room = kept(len(row), ratio)
    if row.is_cpu:
        return _appended(row, room, seed, room)[1]
    indices = chosen_by_torch(row, room, seed, hashed)
    return _joined(indices, torch.where(indices >= 0, row[indices.clamp(min=0)], 0.0))


def _joined(indices: Tensor, values: Tensor) -> Tensor:
    return torch.cat([indices.view(torch.uint8), values.view(torch.uint8)])


def _appended(row: Tensor, wanted: int, seed: int, room: int) -> tuple[int, Tensor]:
    """How many of about ``wanted`` there are, up to ``room``, and their code."""
    code = torch.empty(8 * room, dtype=torch.uint8)
    bits, least = row.numpy().view(np.uint32), int(_enough(row, wanted, seed))
    indices, values = parts(code)
    return append(bits, least, seed % len(row), indices.numpy(), values.numpy().view(np.uint32)), code


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
def append(bits: Words, least: int, start: int, indices: NDArray[np.int32], found: Words) -> int:
    """Elements whose magnitude is ``least`` or more, going around from ``start`` until there is no room
    (of one place at least); how many. Unused places get -1 and 0. What is no number takes the first
    place where it comes when there is no room.

    Within a block that has any, each index is written, and its place kept if it was wanted: a loop without a
    branch takes as long for any density.
    """
    mask, enough, infinite = np.uint32(MAGNITUDE), np.uint32(least), np.uint32(INFINITE)
    count, room = 0, len(found)
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
            seen, before = 0, count
            if count < room:
                for i in range(len(block)):
                    indices[count] = first + i
                    count += int(np.uint32(block[i] & mask) >= enough)
                    seen = i + 1
                    if count == room:
                        break
                for place in range(before, count):
                    found[place] = bits[indices[place]]
            if top >= infinite:
                for i in range(seen, len(block)):
                    if np.uint32(block[i] & mask) >= infinite:
                        indices[0], found[0] = first + i, block[i]
    indices[count:] = -1
    found[count:] = 0
    return count


def chosen_by_torch(row: Tensor, room: int, seed: int, hashed: bool) -> Tensor:
    """The same on any device and without waiting for it: indices of those that reach the threshold, -1 behind
    them, in ``room`` places. ``hashed``: of those that meet in one place of the table one is chosen, and the
    prefix sum goes over the table only."""
    magnitude = row.view(torch.int32) & MAGNITUDE
    reached, numbers = magnitude >= _enough(row, room, seed), torch.arange(len(row), device=row.device)
    if hashed:
        generator = torch.Generator(row.device).manual_seed(seed)
        places = torch.randint(TABLE * room, row.shape, generator=generator, device=row.device)
        # those that do not reach it all meet in one place more, which is then left out
        places = torch.where(reached, places, TABLE * room)
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


def add_chosen(code: Tensor, out: Tensor, seed: int, alpha: float) -> None:
    """Adds ``alpha`` times each value at its index."""
    indices, values = parts(code)
    out.index_add_(0, indices.clamp(min=0), torch.where(indices >= 0, values, 0.0), alpha=alpha)


def drawn(numel: int, room: int, seed: int, device: torch.device) -> Tensor:
    """Of each of ``room`` even slices one index, ascending; the same for a ``seed`` on every device."""
    ends = torch.arange(room + 1) * numel // room
    share = torch.rand(room, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    return (ends[:-1] + (share * ends.diff()).long()).to(device)


def encode_drawn(row: Tensor, seed: int, ratio: float) -> Tensor:
    """Values at random indices, the same for the same seed: a tensor of float32 that ranks may add up."""
    indices = drawn(len(row), kept(len(row), ratio), seed, row.device)
    return row[indices] + row.sum() * 0.0


def add_drawn(code: Tensor, out: Tensor, seed: int, alpha: float) -> None:
    """Adds ``alpha`` times the values of the (summed) code."""
    out.index_add_(0, drawn(len(out), len(code), seed, out.device), code, alpha=alpha)
