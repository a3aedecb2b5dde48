"""Dense codecs: every element in 8 bits or 1, beside scales.

int8 rounds to even steps of the largest magnitude of each block of `BLOCK` elements. Sign (EF-SignSGD,
Karimireddy et al., ICML '19) sends the sign of each element and the mean magnitude of all.

A block (for signs: the tensor) with NaN or infinity in it decodes as NaN or infinities throughout: its scale
is none.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor
from torch.nn.functional import pad

BLOCK = 512
STEPS = 127
"""Of int8, to either side of zero."""
CHUNK = 1 << 16
"""Elements that a processor works on at once: what lies in between stays in its caches."""
LEAST = 1e-30
"""A block whose largest magnitude is below is sent as zeros: a scale below could not be divided by."""


def block_bytes(numel: int) -> int:
    """Of a code of int8: a scale a block, then a byte an element, in whole words of four."""
    return 4 * (-(-numel // BLOCK) + -(-numel // 4))


def sign_bytes(numel: int) -> int:
    """Of a code of signs: two values, then a bit an element, in whole words of four."""
    return 8 + 4 * -(-numel // 32) if numel else 0


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
