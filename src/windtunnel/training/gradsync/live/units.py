"""Gradients as units: what of them is not zero, in which form it came, and as messages.

A message is the number of units (int64; below zero: a bitmap follows), their values, zeros up to a multiple
of four bytes, and positions (int32 each, or a bit for every position of the part that they are of); it has no
bytes where it has no units.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from windtunnel.training.gradsync.policy.sparse import INDEX

COUNT = 8
"""Bytes of the number of units that begins a message."""


@dataclass(frozen=True)
class Units:
    """Units of a gradient that are there: numbers [k], ascending, of ``total``, and values [k, width]."""

    indices: Tensor
    values: Tensor
    total: int

    @property
    def width(self) -> int:
        return self.values.shape[1]


def units_of(tensor: Tensor) -> Units:
    """The rows of a gradient that are there (COO) or have any element that is not zero (dense)."""
    if tensor.layout == torch.strided:
        rows = len(tensor) if tensor.dim() else 1
        return nonzero_units(tensor.detach().reshape(rows, -1))
    tensor = tensor.detach().coalesce()
    indices = torch.zeros(tensor._nnz(), dtype=torch.int64, device=tensor.device)
    total = 1
    for place, length in enumerate(tensor.shape[: tensor.sparse_dim()]):
        indices = indices * length + tensor.indices()[place]
        total *= length
    width = tensor.shape[tensor.sparse_dim() :].numel()
    return Units(indices, tensor.values().reshape(len(indices), width), total)


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
    """In the form of ``tensor``: dense, or COO without duplicates."""
    if tensor.layout == torch.strided:
        return dense(total).reshape(tensor.shape)
    row_shape = tensor.shape[tensor.sparse_dim() :]
    indices, places = total.indices, []
    for length in reversed(tensor.shape[: tensor.sparse_dim()]):
        places.append(indices % length)
        indices = indices // length
    shaped, stacked = total.values.reshape(-1, *row_shape), torch.stack(places[::-1])
    return torch.sparse_coo_tensor(stacked, shaped, tensor.shape, is_coalesced=True, check_invariants=False)


def add_up(parts: Sequence[Units]) -> Units:
    """What is there in any part, and the sums of values in the order of the parts."""
    like = parts[0]
    there = torch.zeros(like.total, dtype=torch.bool, device=like.values.device)
    for part in parts:
        there[part.indices] = True
    summed = there.nonzero()[:, 0]
    place = there.cumsum(0, dtype=torch.int32) - 1
    total = like.values.new_zeros(len(summed), like.width)
    for part in parts:
        total[place[part.indices]] += part.values
    return Units(summed, total, like.total)


def pack(units: Units, *, bitmap: bool = False) -> Tensor:
    """Their message (see above); ``bitmap``: where it is shorter than positions."""
    count, values = len(units.indices), units.values
    if count == 0:
        return torch.empty(0, dtype=torch.uint8, device=values.device)
    bitmap = bitmap and -(-units.total // 8) < INDEX * count
    if bitmap:
        there = torch.zeros(-(-units.total // 8) * 8, dtype=torch.uint8, device=values.device)
        there[units.indices] = 1
        index = (there.view(-1, 8) << _BITS.to(values.device)).sum(1, dtype=torch.uint8)
    else:
        index = units.indices.to(torch.int32).view(torch.uint8)
    head = torch.tensor([-count if bitmap else count]).view(torch.uint8)
    body = values.contiguous().reshape(-1).view(torch.uint8)
    return torch.cat([head.to(values.device), body, body.new_zeros(-len(body) % INDEX), index])


def unpack(message: Tensor, like: Units) -> Units:
    """The units of a message, of as many and as wide ones as ``like`` has."""
    if len(message) == 0:
        return Units(like.indices[:0], like.values[:0], like.total)
    count = int(message[:COUNT].view(torch.int64))
    end = COUNT + abs(count) * like.width * like.values.element_size()
    values = message[COUNT:end].view(like.values.dtype).reshape(abs(count), -1)
    index = message[end + (COUNT - end) % INDEX :]
    if count > 0:
        return Units(index.view(torch.int32).long(), values, like.total)
    there = (index[:, None] >> _BITS.to(message.device)) & 1
    return Units(there.reshape(-1).nonzero()[:, 0], values, like.total)


_BITS = torch.arange(8, dtype=torch.uint8)
