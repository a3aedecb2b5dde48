"""Sparse codecs: the elements of largest magnitude, or random ones; the others wait in the residual.

A code has room for a fixed number of elements, so that the codes of all ranks are of one size: their indices,
then their values; an unused place has the index -1. Codes add up by scatter-*add*, so that an index which
several ranks chose keeps the sum of their values.

*topk* is exact. *threshold* takes what reaches a threshold that a random sample gives (Deep Gradient
Compression, Lin et al., ICLR '18), *dragonn* the same by hashing (Wang et al., ICML '22): each element that
reaches it writes its index to a random place of a table four times as large as the code, where a later one
may overwrite it. That replaces the prefix sum which compaction takes on a parallel device. On a processor
both are one compiled pass that appends: hashing would only cost there. The pass begins at a random element,
so that what finds no room is a different part each time. *randomk* takes the elements that the seed gives,
the same on all ranks, one out of each of as many even slices; only values are sent, and their sums are the
code of the sum.

NaN and infinity are larger than every number: they are chosen, one at least, and sent as they are. Random
elements would miss them: there all values become NaN where the tensor has one.
"""

from __future__ import annotations

import math

import numpy as np
import torch
from torch import Tensor

from windtunnel.training.gradsync.live import kernels

SAMPLED = 4096, 1 << 16
"""Elements in the sample of a threshold: 1 % of the tensor between these, or what `EXPECTED` takes."""
EXPECTED = 32
"""Elements of the sample at least that should reach the threshold: their number varies by its root."""
TABLE = 4
"""Places in the hash table for each in the code, as in DRAGONN's released code."""
MAGNITUDE = 0x7FFFFFFF
WORD = 0xFFFFFFFF


def kept(numel: int, ratio: float) -> int:
    """Elements that a code of ``numel`` has room for."""
    return min(numel, max(1, round(numel * ratio)))


def mix(value: Tensor) -> Tensor:
    """`kernels.mix` of int64 in 0 … 2^32 - 1."""
    value = value ^ (value >> 16)
    value = (value * 0x85EBCA6B) & WORD
    value = value ^ (value >> 13)
    value = (value * 0xC2B2AE35) & WORD
    return value ^ (value >> 16)


def parts(code: Tensor) -> tuple[Tensor, Tensor]:
    """Indices and values, as views."""
    half = code.numel() // 2
    return code[:half].view(torch.int32), code[half:].view(torch.float32)


def encode_largest(gradient: Tensor, seed: int, ratio: float) -> Tensor:
    """Exactly the largest."""
    room = kept(gradient.numel(), ratio)
    if gradient.is_cpu:
        indices = torch.from_numpy(_largest(gradient.numpy().view(np.uint32), room, seed))
    else:
        indices = torch.topk(gradient.abs(), room, sorted=False).indices.int()
    return _joined(indices, gradient)


def _largest(bits: kernels.Words, room: int, seed: int) -> kernels.Ints:
    """Indices, ascending. What reaches a threshold of half as many again are candidates, almost always
    enough and few; else all elements are."""
    if 4 * room < len(bits) and len(bits) > SAMPLED[0]:
        found = np.empty(3 * room, np.int32)
        count = kernels.select(bits, _reached(bits, room + room // 2, seed), 0, found)
        if room <= count < len(found):
            found = found[:count]
            chosen = np.argpartition(bits[found] & kernels.MAGNITUDE, count - room)[count - room :]
            return np.sort(found[chosen])
    if room == len(bits):
        return np.arange(room, dtype=np.int32)
    chosen = np.argpartition(bits & kernels.MAGNITUDE, len(bits) - room)[len(bits) - room :]
    return np.sort(chosen.astype(np.int32))


def encode_reached(gradient: Tensor, seed: int, ratio: float, hashed: bool) -> Tensor:
    """Those that reach the sampled threshold; ``hashed`` matters where the device is parallel."""
    room = kept(gradient.numel(), ratio)
    if not gradient.is_cpu:
        chosen = by_hash(gradient, room, seed) if hashed else by_prefix_sum(gradient, room, seed)
        return _joined(chosen, gradient)
    code = torch.empty(8 * room, dtype=torch.uint8)
    indices, values = parts(code)
    bits = gradient.numpy().view(np.uint32)
    count = kernels.select(bits, _reached(bits, room, seed), seed % len(bits), indices.numpy())
    indices[count:] = -1
    # what is no number reaches any threshold, but may come after there was no room; one pass that only reads
    if count == room and not math.isfinite(float(gradient.sum())):
        _with_worst(indices, gradient.view(torch.int32) & MAGNITUDE)
    kernels.gather(gradient.numpy(), indices.numpy(), values.numpy())
    return code


def _reached(bits: kernels.Words, room: int, seed: int) -> int:
    """The bits of a magnitude that about ``room`` elements reach; zeros never do, NaN and infinity always."""
    numel = len(bits)
    size = _sample_size(numel, room)
    found = np.empty(size, np.uint32)
    if size == numel:
        np.bitwise_and(bits, kernels.MAGNITUDE, out=found)
    else:
        kernels.sample(bits, seed & WORD, found)
    rank = size - _rank(size, room, numel)
    return min(max(int(np.partition(found, rank)[rank]), 1), int(kernels.INFINITE))


def _sample_size(numel: int, room: int) -> int:
    size = min(max(numel // 100, SAMPLED[0]), SAMPLED[1])
    # where all may be sent, the least of a sample would keep some back
    return numel if room == numel else min(numel, max(size, EXPECTED * numel // room))


def _rank(size: int, room: int, numel: int) -> int:
    return min(max(round(size * room / numel), 1), size)


def _enough(magnitude: Tensor, room: int, seed: int) -> Tensor:
    """`_reached` as a tensor; ``magnitude``: bits as int32."""
    numel = magnitude.numel()
    size = _sample_size(numel, room)
    places = torch.arange(size, device=magnitude.device)
    drawn = magnitude if size == numel else magnitude[(mix(places ^ (seed & WORD)) * numel) >> 32]
    least = torch.topk(drawn, _rank(size, room, numel), sorted=True).values[-1]
    return least.clamp(1, int(kernels.INFINITE))


def by_prefix_sum(gradient: Tensor, room: int, seed: int) -> Tensor:
    """Indices of those that reach the threshold, -1 behind them, in ``room`` places, on any device and
    without waiting for it."""
    magnitude = gradient.view(torch.int32) & MAGNITUDE
    reached = magnitude >= _enough(magnitude, room, seed)
    numbers = torch.arange(gradient.numel(), device=gradient.device)
    return _with_worst(_compacted(reached, numbers, room, seed), magnitude)


def by_hash(gradient: Tensor, room: int, seed: int) -> Tensor:
    """As `by_prefix_sum`, which here goes over the table only. Of those that reach the threshold and meet in
    one place of the table, one is chosen."""
    magnitude = gradient.view(torch.int32) & MAGNITUDE
    reached = magnitude >= _enough(magnitude, room, seed)
    numbers = torch.arange(gradient.numel(), device=gradient.device)
    size = TABLE * room
    # those that do not reach it all meet in one place more, which is then left out
    places = torch.where(reached, mix(numbers ^ (seed & WORD)) % size, size)
    table = numbers.new_full((size + 1,), -1).scatter_(0, places, numbers)[:size]
    return _with_worst(_compacted(table >= 0, table, room, seed), magnitude)


def _compacted(wanted: Tensor, numbers: Tensor, room: int, seed: int) -> Tensor:
    """The ``numbers`` that are wanted, going around from a random one until ``room`` are found."""
    upto = wanted.cumsum(0)
    before = upto[seed % len(upto)]
    place = (upto - 1 - before) % upto[-1].clamp(min=1)
    place = torch.where(wanted & (place < room), place, room)
    return numbers.new_full((room + 1,), -1).scatter_(0, place, numbers)[:room].int()


def _with_worst(indices: Tensor, magnitude: Tensor) -> Tensor:
    """``indices`` with one element that is no number, where there are any; without waiting for a device."""
    worst = magnitude.argmax()
    missing = (magnitude[worst] >= int(kernels.INFINITE)) & ~(indices == worst).any()
    indices[0] = torch.where(missing, worst, indices[0])
    return indices


def _joined(indices: Tensor, gradient: Tensor) -> Tensor:
    values = torch.where(indices >= 0, gradient[indices.clamp(min=0)], 0.0)
    return torch.cat([indices.view(torch.uint8), values.view(torch.uint8)])


def add_chosen(code: Tensor, out: Tensor, alpha: float) -> None:
    """Adds ``alpha`` times each value at its index."""
    indices, values = parts(code)
    if out.is_cpu:
        kernels.scatter_add(indices.numpy(), values.numpy(), out.numpy(), float(alpha))
    else:
        add_by_torch(indices, values, out, alpha)


def add_by_torch(indices: Tensor, values: Tensor, out: Tensor, alpha: float) -> None:
    """`kernels.scatter_add` on any device."""
    out.index_add_(0, indices.clamp(min=0), torch.where(indices >= 0, values, 0.0), alpha=alpha)


def drawn(numel: int, room: int, seed: int, device: torch.device) -> Tensor:
    """Of each of ``room`` even slices one index, by ``seed``, ascending."""
    places = torch.arange(room, device=device)
    begin = places * numel // room
    width = (places + 1) * numel // room - begin
    return begin + mix(mix(places) ^ (seed & WORD)) % width


def encode_drawn(gradient: Tensor, seed: int, ratio: float) -> Tensor:
    """Values at random indices, the same for the same seed: a tensor of float32 that ranks may add up."""
    indices = drawn(gradient.numel(), kept(gradient.numel(), ratio), seed, gradient.device)
    return gradient[indices] + gradient.sum() * 0.0


def add_drawn(code: Tensor, out: Tensor, seed: int, alpha: float) -> None:
    """Adds ``alpha`` times the values of the (summed) code."""
    out.index_add_(0, drawn(out.numel(), code.numel(), seed, out.device), code, alpha=alpha)
