"""Gradients as units: what of them is not zero, in which form it came, and as messages.

A message is the number of units (int64; below zero: a bitmap follows), their values, zeros up to a multiple
of four bytes, and positions (int32 each, or a bit for every position of the part that they are of); it has no
bytes where it has no units.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from windtunnel.training.gradsync.policy.bytes import COUNT
from windtunnel.training.gradsync.policy.sparse import BLOCK, INDEX

Unit = Literal["row", "element"]


@dataclass(frozen=True)
class Units:
    """Non-zero units of a gradient: their numbers [k], ascending, of ``total``, and values [k, width]."""

    indices: Tensor
    values: Tensor
    total: int

    @property
    def width(self) -> int:
        return self.values.shape[1]


def units_of(tensor: Tensor, unit: Unit) -> Units:
    """The units of a gradient with any elements that are there (COO) or not zero (dense)."""
    if tensor.layout == torch.strided:
        rows = tensor.shape[0] if unit == "row" and tensor.dim() > 0 else tensor.numel()
        return nonzero_units(tensor.detach().reshape(rows, -1))
    tensor = tensor.detach().coalesce()
    shape = tensor.shape[: tensor.sparse_dim()]
    indices = torch.zeros(tensor._nnz(), dtype=torch.int64, device=tensor.device)
    total = 1
    for place, length in enumerate(shape):
        indices = indices * length + tensor.indices()[place]
        total *= length
    width = max(1, tensor.shape[tensor.sparse_dim() :].numel())
    values = tensor.values().reshape(len(indices), width)
    if unit == "row" or width == 1:
        return Units(indices, values, total)
    row, column = values.nonzero(as_tuple=True)
    return Units(indices[row] * width + column, values[row, column, None], total * width)


def nonzero_units(whole: Tensor) -> Units:
    """The rows of a matrix that are not all zero."""
    indices = (whole != 0).any(1).nonzero()[:, 0]
    return Units(indices, whole[indices], len(whole))


def dense(units: Units) -> Tensor:
    """The matrix that they are of [total, width]."""
    whole = units.values.new_zeros(units.total, units.width)
    whole[units.indices] = units.values
    return whole


def as_came(total: Units, tensor: Tensor) -> Tensor:
    """In the form of ``tensor``: dense, or COO without duplicates; the units may be in any order."""
    if tensor.layout == torch.strided:
        return dense(total).reshape(tensor.shape)
    order = total.indices.argsort()
    indices, values = total.indices[order], total.values[order]
    row_shape = tensor.shape[tensor.sparse_dim() :]
    width = max(1, row_shape.numel())
    if total.width < width:  # elements: back into rows
        rows, where = torch.unique_consecutive(indices // width, return_inverse=True)
        filled = values.new_zeros(len(rows), width)
        filled[where, indices % width] = values[:, 0]
        indices, values = rows, filled
    places = []
    for length in reversed(tensor.shape[: tensor.sparse_dim()]):
        places.append(indices % length)
        indices = indices // length
    shaped = values.reshape(len(values), *row_shape)
    stacked = torch.stack(places[::-1])
    return torch.sparse_coo_tensor(stacked, shaped, tensor.shape, is_coalesced=True, check_invariants=False)


def to_blocks(units: Units) -> Units:
    """`BLOCK` elements each, of which any belongs to a unit that is there."""
    columns = torch.arange(units.width, device=units.indices.device)
    elements = (units.indices[:, None] * units.width + columns).reshape(-1)
    blocks, where = torch.unique_consecutive(elements // BLOCK, return_inverse=True)
    values = units.values.new_zeros(len(blocks), BLOCK)
    values[where, elements % BLOCK] = units.values.reshape(-1)
    return Units(blocks, values, -(-units.total * units.width // BLOCK))


def from_blocks(blocks: Units, total: int, width: int) -> Units:
    """The units in them that are not all zero."""
    where, column = (blocks.values != 0).nonzero(as_tuple=True)
    elements = blocks.indices[where] * BLOCK + column
    order = elements.argsort()
    elements = elements[order]
    rows, place = torch.unique_consecutive(elements // width, return_inverse=True)
    values = blocks.values.new_zeros(len(rows), width)
    values[place, elements % width] = blocks.values[where, column][order]
    return Units(rows, values, total)


def pack(positions: Tensor, values: Tensor, size: int, *, bitmaps: bool) -> Tensor:
    """The message of these units of a part of ``size`` (see above); `policy.bytes` says how long it is."""
    count = len(positions)
    if count == 0:
        return torch.empty(0, dtype=torch.uint8, device=values.device)
    bitmap = bitmaps and -(-size // 8) < INDEX * count
    if bitmap:
        there = torch.zeros(-(-size // 8) * 8, dtype=torch.uint8, device=values.device)
        there[positions] = 1
        order = positions.argsort()
        values = values[order]
        bits = there.view(-1, 8)
        index = bits[:, 0].clone()
        for bit in range(1, 8):
            index |= bits[:, bit] << bit
    else:
        index = positions.to(torch.int32).view(torch.uint8)
    head = torch.tensor([-count if bitmap else count], dtype=torch.int64).view(torch.uint8)
    body = values.contiguous().reshape(-1).view(torch.uint8)
    padding = body.new_zeros(-len(body) % INDEX)
    return torch.cat([head.to(values.device), body, padding, index])


def unpack(message: Tensor, like: Tensor) -> tuple[Tensor, Tensor]:
    """Positions (int64) and values of a message of units as wide as those of ``like``."""
    if len(message) == 0:
        return torch.empty(0, dtype=torch.int64, device=like.device), like.new_empty(0, like.shape[1])
    count = int(message[:COUNT].view(torch.int64))
    nbytes = abs(count) * like.shape[1] * like.element_size()
    values = message[COUNT : COUNT + nbytes].view(like.dtype).reshape(abs(count), -1)
    index = message[COUNT + nbytes + -nbytes % INDEX :]
    if count > 0:
        return index.view(torch.int32).long(), values
    bits = torch.arange(8, dtype=torch.uint8, device=message.device)
    return ((index[:, None] >> bits) & 1).reshape(-1).nonzero()[:, 0], values
