"""Gradients of rows with copies: from host to host in the ranks' order, and the end of it to all copies."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from windtunnel.data.embeddings.layout import RowLayout
from windtunnel.data.embeddings.live.wire import Wire
from windtunnel.data.embeddings.policy import ReplicationRequest

Sums = list[tuple[Tensor, Tensor]]
"""Of each table places [n] and gradients [n, dim]."""


def over_hosts(wire: Wire, exchange: ReplicationRequest, own: Sums) -> Sums:
    """Sums of gradients of rows with copies, from those of this host's ranks, one after the other: each
    host adds to what it gets from the one before it; the last one's go back through all."""
    stripes, dims = exchange.stripes, torch.tensor([table.dim for table in exchange.tables])
    before = wire.rank - wire.devices if wire.host > 0 else None
    after = wire.rank + wire.devices if wire.host < exchange.hosts - 1 else None
    sending: list[Any] = []
    sums = []
    for stripe in range(stripes):
        mine = [
            (places[places % stripes == stripe], tensor[places % stripes == stripe]) for places, tensor in own
        ]
        if before is not None:
            mine = joined(_receive(wire, dims, before), mine)
        sums.append([fold(*tensors) for tensors in mine])
        if after is not None:
            sending += _send(wire, after, sums[stripe])
    for stripe in range(stripes):
        if after is not None:
            sums[stripe] = _receive(wire, dims, after)
        if before is not None:
            sending += _send(wire, before, sums[stripe])
    wire.finish(sending)
    return joined(*sums)


def _send(wire: Wire, rank: int, sums: Sums) -> list[Any]:
    counts = torch.tensor([len(places) for places, _ in sums])
    places = torch.cat([tensor for tensor, _ in sums]).int()
    values = torch.cat([tensor.flatten() for _, tensor in sums])
    messages = (("counts", counts), ("sums", places), ("sums", values))
    return [wire.send(phase, rank, tensor) for phase, tensor in messages]


def _receive(wire: Wire, dims: Tensor, rank: int) -> Sums:
    counts = wire.receive("counts", rank, len(dims), torch.long)
    places = wire.receive("sums", rank, int(counts.sum()), torch.int).long().split(counts.tolist())
    values = wire.receive("sums", rank, int((counts * dims).sum()), torch.float)
    segments = values.split((counts * dims).tolist())
    return [
        (place, some.view(-1, dim)) for place, some, dim in zip(places, segments, dims.tolist(), strict=True)
    ]


def to_copies(wire: Wire, layouts: Sequence[RowLayout], sums: Sums) -> Sums:
    """With the sums of hot rows that the host's other ranks have."""
    near = torch.arange(wire.host * wire.devices, (wire.host + 1) * wire.devices)
    others = near[near != wire.rank]
    ranks, places, values = [], [], []
    for layout, (own, tensor) in zip(layouts, sums, strict=True):
        hot = own < layout.hot
        ranks.append(others.repeat_interleave(int(hot.sum())))
        places.append(own[hot].repeat(len(others)))
        values.append(tensor[hot].repeat(len(others), 1))
    came = wire.deliver("copies", ranks, places, values, near=True)
    return joined(sums, list(zip(came.places, came.values, strict=True)))


def fold(rows: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
    """Of each of ``rows`` [n], ascending, the sum of its ``values`` [n, dim] in their order. (What torch's
    ``coalesce`` sums is in no fixed order: the sort in it is not stable from 17 values on.)"""
    distinct, inverse = torch.unique(rows, return_inverse=True)
    return distinct, values.new_zeros(len(distinct), values.shape[1]).index_add_(0, inverse, values)


def joined(*parts: Sums) -> Sums:
    """Of each table all rows of all parts, one after the other."""
    return [
        (torch.cat([places for places, _ in copies]), torch.cat([vectors for _, vectors in copies]))
        for copies in zip(*parts, strict=True)
    ]
