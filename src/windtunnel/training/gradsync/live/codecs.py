"""Codecs at work: how codes of each format (`formats`) are made and read, on any device.

**NaN and infinity** are never hidden: where one rank's gradient has any, what the codes decode to has NaN
or infinity on all ranks, at its own place (none, fp16, bf16; dragonn: one at least), throughout its block
(int8), or throughout the tensor (sign). The tensor is what is encoded at once: of a plan's group all
parameters, or a rank's slice of them; of several that have NaN dragonn may show one.

*int8* rounds to even steps of the largest magnitude of each block of `BLOCK` elements. *sign* (EF-SignSGD,
Karimireddy et al., ICML '19) sends the sign of each element and the mean magnitude of all. A block (for
signs: the tensor) with NaN or infinity in it decodes as such throughout: its scale is none.

*dragonn* sends the elements of largest magnitude. A code has room for a fixed number of them; codes add up by
scatter-*add*, so that an index which several ranks chose keeps the sum of their values. What reaches a
threshold is taken that a sample gives (Deep Gradient Compression, Lin et al., ICLR '18), by hashing (DRAGONN,
Wang et al., ICML '22): each element that reaches it writes its index to a random place of a table four times
as large as the code, where a later one may overwrite it. That replaces the prefix sum which compaction takes
on a parallel device. A processor has one compiled pass instead that appends: hashing would only cost there.
The pass begins at a random place, so that what finds no room is a different part each time. A magnitude is
compared by its bits as an integer: they order as magnitudes do, with infinity above all numbers and NaN above
infinity. So both are chosen, one at least, and sent as they are.

**Seeds**: `seed_of` gives the same on every host.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn.functional import pad

from windtunnel.base.compiled import jit
from windtunnel.training.gradsync.formats import (
    BLOCK,
    CodeFormat,
    block_bytes,
    format_of,
    room_of,
    sign_bytes,
)


@dataclass(frozen=True, kw_only=True)
class Codec(CodeFormat):
    """A format with the functions that make and read its codes."""

    _encode: Callable[[Tensor, int], Tensor]
    _add: Callable[[Tensor, Tensor, float], None]

    def encode(self, gradient: Tensor, seed: int) -> Tensor:
        """The code of a gradient of any shape, strides and floating dtype, which is not changed; the code may
        share its memory where the codec is lossless."""
        row = gradient.detach().reshape(-1)
        if not self.lossless:
            row = row.float().contiguous()
        if len(row) == 0:
            return row.to(torch.float32 if self.summable else torch.uint8)
        return self._encode(row, seed)

    def add(self, code: Tensor, out: Tensor, alpha: float = 1.0) -> None:
        """``out``, 1-D of any floating dtype, += ``alpha`` x decoded; alpha = -1 leaves the residual."""
        out = out.detach()
        if self.lossless or out.dtype == torch.float32:
            if len(out):
                self._add(code, out, alpha)
        else:
            total = torch.zeros(out.shape, device=out.device)
            self.add(code, total, alpha)
            out.add_(total)

    def decode(self, code: Tensor, out: Tensor) -> None:
        """``out`` = decoded."""
        self.add(code, out.zero_())


def seed_of(seed: int, step: int, index: int, rank: int = 0) -> int:
    """Of the ``index``-th tensor or group in a step: 62 bits. ``rank``: 0 on all where codes are summed."""
    digest = hashlib.blake2b(f"{seed} {step} {index} {rank}".encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little") >> 2


def find(spec: str) -> Codec:
    """The codec of a spec such as ``dragonn:0.01``.

    Raises:
        UserError: there is none.
    """
    code_format = format_of(spec)
    match spec:
        case "none":
            encode, add = _as_is, _add_up
        case "fp16":
            encode, add = partial(_cast, torch.float16), _add_up
        case "bf16":
            encode, add = partial(_cast, torch.bfloat16), _add_up
        case "int8":
            encode, add = encode_blocks, add_blocks
        case "sign":
            encode, add = encode_signs, add_signs
        case _:
            encode, add = partial(encode_largest, ratio=code_format.ratio), add_largest
    return Codec(**vars(code_format), _encode=encode, _add=add)


def _as_is(row: Tensor, seed: int) -> Tensor:
    return row


def _cast(dtype: torch.dtype, row: Tensor, seed: int) -> Tensor:
    return row.to(dtype)


def _add_up(code: Tensor, out: Tensor, alpha: float) -> None:
    out.add_(code, alpha=alpha)


STEPS = 127
"""Of int8, to either side of zero."""
CHUNK = 1 << 16
"""Elements that a processor works on at once: what lies in between stays in its caches."""
LEAST = 1e-30
"""A block whose largest magnitude is below is sent as zeros: a scale below could not be divided by."""


def encode_blocks(row: Tensor, seed: int) -> Tensor:
    """Each element as the nearest of ``2 * STEPS + 1`` even steps of its block's largest magnitude."""
    code = torch.zeros(block_bytes(len(row)), dtype=torch.uint8, device=row.device)
    scales, steps = _parts(code, len(row))
    for part, scale, step in _chunks(row, scales, steps):
        blocks = _blocks(part)
        largest = blocks.abs().amax(1)
        small = largest < LEAST
        scale.copy_(torch.where(small, 0.0, largest / STEPS).add_(largest * 0.0))
        inverse = torch.where(small, 0.0, STEPS / largest.clamp_(min=LEAST))
        level = (blocks * inverse[:, None]).round_().view(-1)[: len(part)].to(torch.int8)
        step.copy_(level.view(torch.uint8)).add_(STEPS)  # which wraps around
    return code


def add_blocks(code: Tensor, out: Tensor, alpha: float) -> None:
    """Adds ``alpha`` times what a code of blocks stands for."""
    for part, scale, step in _chunks(out, *_parts(code, len(out))):
        values = _blocks(step.float().sub_(STEPS)).mul_(scale[:, None])
        part.add_(values.view(-1)[: len(part)], alpha=alpha)


def encode_signs(row: Tensor, seed: int) -> Tensor:
    """A bit an element, set unless below zero, after the values that a cleared and a set one stand for."""
    code = torch.zeros(sign_bytes(len(row)), dtype=torch.uint8, device=row.device)
    high = torch.linalg.vector_norm(row, 1) / len(row)
    code[:8].view(torch.float32).copy_(torch.stack([-high, high]))
    weights = 2.0 ** torch.arange(8, device=row.device)
    for part, packed in zip(row.split(_chunk(row)), code[8:].split(_chunk(row) // 8), strict=True):
        bits = pad((~torch.signbit(part)).float(), (0, 8 * len(packed) - len(part)))
        packed.copy_(bits.view(-1, 8) @ weights)
    return code


def add_signs(code: Tensor, out: Tensor, alpha: float) -> None:
    """Adds ``alpha`` times what a code of signs stands for."""
    low, high = code[:8].view(torch.float32)
    bits = torch.arange(256, device=out.device)[:, None] >> torch.arange(8, device=out.device) & 1
    values = torch.where(
        bits.bool(), high, low
    )  # of the eight elements in a byte, first that of its lowest bit
    for part, packed in zip(out.split(_chunk(out)), code[8:].split(_chunk(out) // 8), strict=True):
        part.add_(values[packed.int()].view(-1)[: len(part)], alpha=alpha)


def _chunk(like: Tensor) -> int:
    return CHUNK if like.is_cpu else max(32, len(like) + -len(like) % 32)


def _chunks(row: Tensor, scales: Tensor, steps: Tensor) -> Iterator[tuple[Tensor, Tensor, Tensor]]:
    size = _chunk(row)
    yield from zip(row.split(size), scales.split(-(-size // BLOCK)), steps.split(size), strict=True)


def _parts(code: Tensor, numel: int) -> tuple[Tensor, Tensor]:
    """The scales of blocks, and a byte for each element."""
    split = 4 * -(-numel // BLOCK)
    return code[:split].view(torch.float32), code[split : split + numel]


def _blocks(row: Tensor) -> Tensor:
    """The elements in rows of `BLOCK`, the last filled up with zeros."""
    return pad(row, (0, -len(row) % BLOCK)).view(-1, BLOCK)


SAMPLED, EXPECTED = 4096, 32
"""Elements in the sample of a threshold, and of it that should reach the threshold: both at least. Their
number varies by its root."""
Words = NDArray[np.uint32]
TABLE = 4
"""Places in the hash table for each in the code, as in DRAGONN's released code."""
SKIPPED = 64
"""Elements that the pass skips at once where none reaches the threshold."""
MAGNITUDE, INFINITE = 0x7FFFFFFF, 0x7F800000


def parts(code: Tensor) -> tuple[Tensor, Tensor]:
    """Indices and values, as views."""
    half = code.numel() // 2
    return code[:half].view(torch.int32), code[half:].view(torch.float32)


def encode_largest(row: Tensor, seed: int, ratio: float) -> Tensor:
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
        for first in range(begin, end, SKIPPED):
            block = bits[first : min(first + SKIPPED, end)]
            top = infinite
            if len(block) == SKIPPED:
                top = np.uint32(0)
                for i in range(SKIPPED):
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


def add_largest(code: Tensor, out: Tensor, alpha: float) -> None:
    """Adds ``alpha`` times each value at its index."""
    indices, values = parts(code)
    out.index_add_(0, indices.clamp(min=0), torch.where(indices >= 0, values, 0.0), alpha=alpha)
