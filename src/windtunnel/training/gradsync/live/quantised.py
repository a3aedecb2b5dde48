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

import numpy as np
import torch
from torch import Tensor

from windtunnel.training.gradsync.live import kernels

BLOCK = 512
FLOAT8 = torch.float8_e4m3fn
FLOAT8_MOST = 448.0
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


def encode_levels(gradient: Tensor, seed: int, levels: int, width: int, random: bool) -> Tensor:
    """``2 * levels + 1`` even steps; ``random``: rounded so that the mean is true, by ``seed``."""
    if not gradient.is_cpu:
        return levels_by_torch(gradient, seed, levels, width, random)
    numel = gradient.numel()
    code = np.zeros(block_bytes(numel, width), np.uint8)
    values, split = gradient.numpy(), 4 * scales_of(numel)
    kernels.to_levels(
        values, values.view(np.uint32), BLOCK, levels, width, seed & 0x7FFFFFFF if random else -1, LEAST,
        code[:split].view(np.float32), code[split:],
    )  # fmt: skip
    return torch.from_numpy(code)


def levels_by_torch(gradient: Tensor, seed: int, levels: int, width: int, random: bool) -> Tensor:
    """`encode_levels` on any device; other random numbers of the same kind."""
    blocks, largest = _blocks(gradient)
    inverse = torch.where(largest < LEAST, 0.0, levels / largest.clamp(min=LEAST))
    scales = torch.where(largest < LEAST, 0.0, largest / levels)
    shift: Tensor | float = 0.5
    if random:
        generator = torch.Generator(gradient.device).manual_seed(seed)
        shift = torch.rand(blocks.shape, generator=generator, device=gradient.device)
    steps = (blocks * inverse[:, None] + levels + shift).nan_to_num(levels, levels, levels)
    level = steps.clamp(0, 2 * levels).to(torch.uint8)
    return _joined(scales + largest * 0.0, _pack(level.view(-1), width), gradient.numel(), width)


def encode_float8(gradient: Tensor, seed: int) -> Tensor:
    """Each element over the scale of its block as e4m3."""
    blocks, largest = _blocks(gradient)
    scales = largest.clamp(min=LEAST) / FLOAT8_MOST
    bits = (blocks / scales[:, None]).to(FLOAT8).view(torch.uint8)
    return _joined(scales + largest * 0.0, bits.view(-1), gradient.numel(), 8)


def encode_signs(gradient: Tensor, seed: int, two: bool) -> Tensor:
    """A bit an element, after the values that a cleared and a set one stand for: the mean magnitude, negated
    and not, or ``two`` means, of the elements with the sign and of those without."""
    numel = gradient.numel()
    magnitude = torch.linalg.vector_norm(gradient, 1)
    if gradient.is_cpu:
        bits = torch.empty(room(numel, 1), dtype=torch.uint8)
        used = -(-numel // 8)
        bits[used:] = 0
        above: Tensor | int = kernels.to_signs(gradient.numpy().view(np.uint32), bits.numpy()[:used])
    else:
        bits, above = signs_by_torch(gradient)
    if two:
        total = gradient.sum()
        high = (magnitude + total) / 2 / max(above, 1)
        low = (total - magnitude) / 2 / max(numel - above, 1)
    else:
        high = magnitude / numel
        low = -high
    values = torch.stack([low, high]).view(torch.uint8)
    return torch.cat([values, bits])


def signs_by_torch(gradient: Tensor) -> tuple[Tensor, int]:
    """The bits, and how many are set."""
    level = (~torch.signbit(gradient)).to(torch.uint8)
    above = int(level.sum())
    padding = 8 * room(gradient.numel(), 1) - gradient.numel()
    return _pack(torch.nn.functional.pad(level, (0, padding)), 1), above


def add_blocks(code: Tensor, out: Tensor, alpha: float, table: Tensor, width: int) -> None:
    """Adds ``alpha`` times what a code of blocks stands for."""
    split = 4 * scales_of(out.numel())
    _add(code[split:], width, table, code[:split].view(torch.float32), BLOCK, out, alpha)


def add_signs(code: Tensor, out: Tensor, alpha: float) -> None:
    """Adds ``alpha`` times what a code of signs stands for."""
    one = torch.ones(1, device=code.device)
    _add(code[8:], 1, code[:8].view(torch.float32), one, 8 * (code.numel() - 8), out, alpha)


def _add(
    packed: Tensor, width: int, table: Tensor, scales: Tensor, block: int, out: Tensor, alpha: float
) -> None:
    if out.is_cpu:
        kernels.add_table(
            packed.numpy(), width, table.numpy(), scales.numpy(), block, out.numpy(), float(alpha)
        )
    else:
        add_by_torch(packed, width, table, scales, block, out, alpha)


def add_by_torch(
    packed: Tensor, width: int, table: Tensor, scales: Tensor, block: int, out: Tensor, alpha: float
) -> None:
    """`kernels.add_table` on any device."""
    shifts = torch.arange(0, 8, width, device=packed.device, dtype=torch.uint8)
    level = (packed[:, None] >> shifts) & (2**width - 1)
    values = table.to(packed.device)[level.view(-1)[: out.numel()].int()]
    out.add_(values * scales.repeat_interleave(block)[: out.numel()], alpha=alpha)


def _blocks(gradient: Tensor) -> tuple[Tensor, Tensor]:
    """The elements in rows of `BLOCK`, the last filled up with zeros, and the largest magnitude of each."""
    numel = gradient.numel()
    padded = torch.nn.functional.pad(gradient, (0, scales_of(numel) * BLOCK - numel))
    blocks = padded.view(-1, BLOCK)
    return blocks, torch.linalg.vector_norm(blocks, torch.inf, dim=1)


def _pack(level: Tensor, width: int) -> Tensor:
    """Elements of ``width`` bits (as many as fill bytes), the first in the lowest bits."""
    shifts = torch.arange(0, 8, width, device=level.device, dtype=torch.uint8)
    return (level.view(-1, 8 // width) << shifts).sum(1, dtype=torch.uint8)


def _joined(scales: Tensor, packed: Tensor, numel: int, width: int) -> Tensor:
    return torch.cat([scales.view(torch.uint8), packed[: room(numel, width)]])
