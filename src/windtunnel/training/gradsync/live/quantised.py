"""Dense codecs: every element in 8, 4, 2 or 1 bits, beside scales.

All are one form: an element's bits name an entry of a small table, which times a scale is its value. int8
and QSGD (Alistarh et al., NeurIPS '17) round to even steps of the largest magnitude of each block of
`BLOCK` elements, int8 to the nearest, QSGD at random so that the mean is true; TernGrad (Wen et al.,
NeurIPS '17) is QSGD of one step, its clipping by layers replaced by blocks, which bound the steps as well.
fp8 is e4m3 of each block over its scale. Sign (EF-SignSGD, Karimireddy et al., ICML '19) and one-bit SGD
(Seide et al., Interspeech '14) send the sign and the mean magnitude of all elements, or of those above and
below zero.

A block (for one bit: the tensor) with NaN or infinity in it decodes as NaN or infinities throughout: its
scale is none.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn.functional import pad

from windtunnel.base.compiled import jit, jit_inline

Floats = NDArray[np.float32]
Bytes = NDArray[np.uint8]
BLOCK = 512
FLOAT8, FLOAT8_MOST = torch.float8_e4m3fn, 448.0
LEAST = 1e-30
"""A block whose largest magnitude is below is sent as zeros: a scale below could not be divided by."""


def room(numel: int, width: int) -> int:
    """Bytes of so many elements of ``width`` bits, in whole words of four."""
    return -(-numel * width // 32) * 4


def scales_of(numel: int) -> int:
    return -(-numel // BLOCK)


def block_bytes(numel: int, width: int) -> int:
    return 4 * scales_of(numel) + room(numel, width)


def levels_table(levels: int, width: int) -> Tensor:
    return torch.arange(2**width, dtype=torch.float32) - levels


def float8_table() -> Tensor:
    return torch.arange(256, dtype=torch.uint8).view(FLOAT8).float()


def encode_levels(row: Tensor, seed: int, levels: int, width: int, random: bool) -> Tensor:
    """``2 * levels + 1`` even steps; ``random``: rounded so that the mean is true, by ``seed``."""
    if not row.is_cpu:
        return levels_by_torch(row, seed, levels, width, random)
    code, split = np.zeros(block_bytes(len(row), width), np.uint8), 4 * scales_of(len(row))
    drawn = seed & 0x7FFFFFFF if random else -1
    to_levels(row.numpy(), levels, width, drawn, code[:split].view(np.float32), code[split:])
    return torch.from_numpy(code)


def levels_by_torch(row: Tensor, seed: int, levels: int, width: int, random: bool) -> Tensor:
    """`encode_levels` on any device; other random numbers of the same kind."""
    blocks, largest = _blocks(row)
    inverse = torch.where(largest < LEAST, 0.0, levels / largest.clamp(min=LEAST))
    scales = torch.where(largest < LEAST, 0.0, largest / levels)
    shift: Tensor | float = 0.5
    if random:
        generator = torch.Generator(row.device).manual_seed(seed)
        shift = torch.rand(blocks.shape, generator=generator, device=row.device)
    steps = (blocks * inverse[:, None] + levels + shift).nan_to_num(levels, levels, levels)
    level = steps.clamp(0, 2 * levels).to(torch.uint8)
    return _joined(scales + largest * 0.0, level.view(-1)[: len(row)], width)


def encode_float8(row: Tensor, seed: int) -> Tensor:
    """Each element over the scale of its block as e4m3."""
    blocks, largest = _blocks(row)
    scales = largest.clamp(min=LEAST) / FLOAT8_MOST
    bits = (blocks / scales[:, None]).to(FLOAT8).view(torch.uint8)
    return _joined(scales + largest * 0.0, bits.view(-1)[: len(row)], 8)


def encode_signs(row: Tensor, seed: int, two: bool) -> Tensor:
    """A bit an element, after the values that a cleared and a set one stand for: the mean magnitude, negated
    and not, or ``two`` means, of the elements with the sign and of those without."""
    above, magnitude = ~torch.signbit(row), torch.linalg.vector_norm(row, 1)
    high = magnitude / len(row)
    low = -high
    if two:
        count, total = torch.count_nonzero(above), row.sum()
        high = (magnitude + total) / 2 / count.clamp(min=1)
        low = (total - magnitude) / 2 / (len(row) - count).clamp(min=1)
    return _joined(torch.stack([low, high]), above, 1)


def add_blocks(code: Tensor, out: Tensor, seed: int, alpha: float, table: Tensor, width: int) -> None:
    """Adds ``alpha`` times what a code of blocks stands for."""
    split = 4 * scales_of(len(out))
    add_table(code[split:], width, table, code[:split].view(torch.float32), BLOCK, out, alpha)


def add_signs(code: Tensor, out: Tensor, seed: int, alpha: float) -> None:
    """Adds ``alpha`` times what a code of signs stands for."""
    one = torch.ones(1, device=code.device)
    add_table(code[8:], 1, code[:8].view(torch.float32), one, 8 * (len(code) - 8), out, alpha)


def add_table(
    packed: Tensor, width: int, table: Tensor, scales: Tensor, block: int, out: Tensor, alpha: float
) -> None:
    """Adds ``alpha`` times the scale of its block times the entry of ``table`` that each element names."""
    if out.is_cpu:
        arrays = packed.numpy(), table.numpy(), scales.numpy(), out.numpy()
        add_entries(*arrays, width, block, float(alpha))
    else:
        add_by_torch(packed, width, table, scales, block, out, alpha)


def add_by_torch(
    packed: Tensor, width: int, table: Tensor, scales: Tensor, block: int, out: Tensor, alpha: float
) -> None:
    """`add_table` on any device."""
    shifts = torch.arange(0, 8, width, device=packed.device, dtype=torch.uint8)
    level = (packed[:, None] >> shifts) & (2**width - 1)
    values = table.to(packed.device)[level.view(-1)[: len(out)].int()]
    out.add_(values * scales.repeat_interleave(block)[: len(out)], alpha=alpha)


def _blocks(row: Tensor) -> tuple[Tensor, Tensor]:
    """The elements in rows of `BLOCK`, the last filled up with zeros, and the largest magnitude of each."""
    blocks = pad(row, (0, -len(row) % BLOCK)).view(-1, BLOCK)
    return blocks, torch.linalg.vector_norm(blocks, torch.inf, dim=1)


def _joined(scales: Tensor, level: Tensor, width: int) -> Tensor:
    """A code: ``scales``, then elements of ``width`` bits, the first in the lowest bits of its byte."""
    if width == 1 and level.is_cpu:
        packed = torch.from_numpy(np.packbits(level.numpy(), bitorder="little"))
    else:
        per = 8 // width
        shifts = torch.arange(0, 8, width, device=level.device, dtype=torch.uint8)
        filled = pad(level.to(torch.uint8), (0, -len(level) % per)).view(-1, per)
        packed = (filled << shifts).sum(1, dtype=torch.uint8)
    return torch.cat([scales.view(torch.uint8), pad(packed, (0, -len(packed) % 4))])


@jit_inline
def mix(value: Any) -> Any:
    """MurmurHash3's finaliser of 32 bits."""
    value = np.uint32(value ^ (value >> np.uint32(16)))
    value = np.uint32(value * np.uint32(0x85EBCA6B))
    value = np.uint32(value ^ (value >> np.uint32(13)))
    value = np.uint32(value * np.uint32(0xC2B2AE35))
    return np.uint32(value ^ (value >> np.uint32(16)))


@jit
def to_levels(values: Floats, levels: int, width: int, seed: int, scales: Floats, packed: Bytes) -> None:
    """Each element as one of ``2 * levels + 1`` even steps of its block's largest magnitude, in ``width``
    bits. ``seed``: rounds up with the probability that leaves the mean as it is; negative: rounds to the
    nearest. The scale of a block with NaN or infinity is NaN."""
    per = 8 // width
    level = np.empty(BLOCK, np.uint8)
    bits, word = values.view(np.uint32), np.zeros(1, np.uint32)
    for one in range(len(scales)):
        begin = one * BLOCK
        block, magnitude = values[begin : begin + BLOCK], bits[begin : begin + BLOCK]
        # as integers magnitudes are in the same order, and nothing is above infinity but NaN
        top = np.uint32(0)
        for i in range(len(block)):
            top = max(top, np.uint32(magnitude[i] & np.uint32(0x7FFFFFFF)))
        word[0] = top
        most = word.view(np.float32)[0]
        level[:] = levels
        level[len(block) :] = 0
        scales[one] = np.nan if top >= np.uint32(0x7F800000) else np.float32(0.0)
        if LEAST <= most < np.inf:
            scales[one] = most / np.float32(levels)
            inverse = np.float32(levels) / most
            for i in range(len(block)):
                step = block[i] * inverse + np.float32(levels)
                if seed >= 0:
                    drawn = mix(np.uint32(begin + i) ^ np.uint32(seed)) >> np.uint32(8)
                    step += np.float32(drawn) * np.float32(2**-24)
                else:
                    step += np.float32(0.5)
                level[i] = np.uint8(min(step, np.float32(2 * levels)))
        for byte in range((len(block) + per - 1) // per):
            value = 0
            for j in range(per):
                value |= level[byte * per + j] << (j * width)
            packed[begin // per + byte] = value


@jit
def add_entries(
    packed: Bytes, table: Floats, scales: Floats, out: Floats, width: int, block: int, alpha: float
) -> None:
    """`add_table` in one pass on a processor."""
    per, mask = 8 // width, (1 << width) - 1
    for one in range(len(scales)):
        factor = np.float32(alpha) * scales[one]
        end = min((one + 1) * block, len(out))
        if width == 8:
            for i in range(one * block, end):
                out[i] += factor * table[packed[i]]
        else:
            for byte in range(one * block // per, (end + per - 1) // per):
                value = packed[byte]
                for i in range(byte * per, min(byte * per + per, end)):
                    out[i] += factor * table[value & mask]
                    value >>= width
