"""Attention of a step's queries over the pieces that each reads, merged by log-sum-exp.

A query reads a path: several pieces. A piece that one query reads is done together with all such pieces of
its size in one batched product; a piece that many read is done once for all of them. Every part yields its
output ``o`` and the logarithm ``l`` of the sum of its exponentiated scores; a query's parts are joined as
``sum(o·e^l) / sum(e^l)``. Heads that share keys (grouped queries) are rows of the same product: nothing is
repeated in memory.
"""

from __future__ import annotations

from collections.abc import Sequence as Ordered
from dataclasses import dataclass
from itertools import chain

import torch
from torch import Tensor

from windtunnel.serving.engine.live.segments import Piece, Sequence, Slots

LOG2_E = 1.4426950408889634
BLOCK = 64
"""Queries that read a piece in one product: its scores stay in a cache."""
LOWEST = -1e30  # stands for no score at all: finite, so that the difference of two of them is a number
Seen = list[tuple[int, int, int, int]]
"""Who reads a piece: query, which of the query's parts that is, and the first and the last key, excluded."""


@dataclass(frozen=True, slots=True)
class _Batch:
    """Slots ``begin`` to ``begin + count``, of each the keys ``low`` to ``high``. ``readers`` are queries,
    shape (count · readers of each,); ``to`` is where each one's part goes; ``mask`` is added to the scores,
    shape (count, 1, readers of each, 1, keys), or None."""

    slots: Slots
    begin: int
    count: int
    low: int
    high: int
    readers: Tensor
    to: Tensor
    mask: Tensor | None


class AttentionPass:
    """Writes and reads the pieces of the rows of one pass, in every layer; pieces may not move meanwhile."""

    def __init__(self, rows: Ordered[Sequence], counts: Ordered[int], device: torch.device) -> None:
        """``counts``: tokens of each row; a query is one of these."""
        self._device, self._queries = device, 0
        self._by_window: dict[int | None, tuple[int, list[_Batch]]] = {}
        # of each piece: query, its place counted from the piece's first token, tokens that its path has of it
        self._readers: dict[Piece, list[tuple[int, int, int]]] = {}
        tails: dict[Slots, list[tuple[Piece, int, int]]] = {}
        for row, count in zip(rows, counts, strict=True):
            assert row.tail is not None
            tails.setdefault(row.tail.slots, []).append((row.tail, self._queries, count))
            at = row.depth
            for piece, length in chain(row.path, ((row.tail, row.tail.length + count),)):
                of = self._readers.setdefault(piece, [])
                of += [(self._queries + t, at + t, length) for t in range(count)]
                at -= length
            self._queries += count
        alone: dict[Slots, list[Piece]] = {}
        for piece, readers in self._readers.items():
            if len(readers) == 1:
                alone.setdefault(piece.slots, []).append(piece)
        self._front = {slots: slots.front(pieces) for slots, pieces in alone.items()}
        # where new keys go: queries, slots' numbers and offsets. From here on no piece moves
        self._writes: list[tuple[Slots, int, Tensor]] = []
        for slots, members in tails.items():
            numbers = [
                (first + t, tail.index, tail.length + t)
                for tail, first, count in members
                for t in range(count)
            ]
            self._writes.append((slots, members[0][0].capacity, torch.tensor(numbers, device=device).T))

    def write(self, layer: int, key: Tensor, value: Tensor) -> None:
        """New keys and values: (rows, heads, tokens, dim)."""
        for slots, capacity, (queries, places, offsets) in self._writes:
            for name, new in (("k", key), ("v", value)):
                stored = slots.tensor((name, layer), new, (new.shape[1], capacity, new.shape[3]))
                stored[places, :, offsets] = new.transpose(1, 2).flatten(0, 1)[queries]

    def attend(
        self, layer: int, query: Tensor, scale: float, window: int | None = None,
        softcap: float | None = None, sinks: Tensor | None = None,
    ) -> Tensor:  # fmt: skip
        """(rows, heads, tokens, dim) -> (rows, tokens, heads, dim of values).

        ``window``: so many tokens are seen, the query itself included; ``softcap``: scores s become softcap ·
        tanh(s / softcap); ``sinks``: one more score a head, of a key without value.
        """
        if window not in self._by_window:
            self._by_window[window] = self._batches(window)
        most, batches = self._by_window[window]
        (rows, heads, tokens, _), queries = query.shape, self._queries
        scaled = query.transpose(1, 2).flatten(0, 1)
        scaled = scaled * (scale * LOG2_E if softcap is None else scale / softcap)
        out = sums = None
        for batch in batches:
            span = slice(batch.begin, batch.begin + batch.count)
            keys = batch.slots.tensors["k", layer][span, :, batch.low : batch.high]
            values = batch.slots.tensors["v", layer][span, :, batch.low : batch.high]
            products, logs = _products(scaled[batch.readers], keys, values, batch.mask, softcap)
            if out is None or sums is None:
                out = products.new_empty((queries * most + 1, heads, products.shape[-1]))
                sums = products.new_full((queries * most + 1, heads), LOWEST)
            out[batch.to], sums[batch.to] = products, logs
        assert out is not None and sums is not None  # every query reads at least itself
        parts, logs = out[:-1].view(queries, most, heads, -1), sums[:-1].view(queries, most, heads)
        return _merge(parts, logs, sinks).to(query.dtype).view(rows, tokens, heads, -1)

    def _batches(self, window: int | None) -> tuple[int, list[_Batch]]:
        """The most parts that a query has, and the products to be made."""
        parts = [0] * self._queries
        groups: dict[tuple[Slots, int, int], list[tuple[Piece, Seen]]] = {}
        for piece, readers in self._readers.items():
            visible: Seen = []
            for query, at, length in readers:
                low, high = 0 if window is None else max(0, at - window + 1), min(length, at + 1)
                if low < high:
                    visible.append((query, parts[query], low, high))
                    parts[query] += 1
            place = -1 if len(readers) == 1 else piece.index
            # readers are in the order of their tokens: a block leaves out the keys of those behind it
            for block in range(0, len(visible), BLOCK):
                members = groups.setdefault((piece.slots, place, block), [])
                members.append((piece, visible[block : block + BLOCK]))
        most = max(parts, default=0)
        return most, [self._batch(slots, at, members, most) for (slots, at, _), members in groups.items()]

    def _batch(self, slots: Slots, at: int, members: list[tuple[Piece, Seen]], most: int) -> _Batch:
        begin, count = (0, self._front[slots]) if at < 0 else (at, 1)
        everyone = [span for _, visible in members for span in visible]
        low, high = min(span[2] for span in everyone), max(span[3] for span in everyone)
        each, nowhere = len(members[0][1]), self._queries * most
        rows = torch.tensor([(0, nowhere, low, high)] * (count * each)).view(count, each, 4)
        rows[[piece.index - begin for piece, _ in members]] = torch.tensor(
            [[(query, query * most + part, a, b) for query, part, a, b in visible] for _, visible in members]
        )
        rows = rows.to(self._device)
        mask = None
        if any(span[2:] != (low, high) for span in everyone):
            keys = torch.arange(low, high, device=self._device)
            out = (keys < rows[..., 2, None]) | (keys >= rows[..., 3, None])  # (count, each, keys)
            mask = torch.zeros(out.shape, device=self._device).masked_fill_(out, LOWEST)[:, None, :, None]
        readers, to = rows[..., 0].flatten(), rows[..., 1].flatten()
        return _Batch(slots, begin, count, low, high, readers, to, mask)


def _products(
    query: Tensor, keys: Tensor, values: Tensor, mask: Tensor | None, softcap: float | None
) -> tuple[Tensor, Tensor]:
    """``query``, (readers, heads, dim), over all keys of a batch, (count, shared heads, keys, dim): outputs,
    (readers, heads, dim of values), and logarithms of the sums, (readers, heads)."""
    (readers, heads, dim), (count, shared) = query.shape, keys.shape[:2]
    each, group = readers // count, heads // shared
    tensor = query.view(count, each, shared, group, dim).transpose(1, 2)
    tensor = tensor.reshape(count * shared, each * group, dim)
    scores = torch.bmm(tensor, keys.flatten(0, 1).transpose(1, 2)).float()
    if softcap is not None:
        scores = scores.tanh_().mul_(softcap * LOG2_E)
    if mask is not None:
        scores.view(count, shared, each, group, -1).add_(mask)
    top = scores.amax(-1, keepdim=True)
    weights = scores.sub_(top).exp2_()
    total = weights.sum(-1, keepdim=True)
    products = torch.bmm(weights.to(values.dtype), values.flatten(0, 1)).float().div_(total)
    products = products.view(count, shared, each, group, -1).transpose(1, 2)
    logs = top.add_(total.log2_()).view(count, shared, each, group).transpose(1, 2)
    return products.reshape(readers, heads, -1), logs.reshape(readers, heads)


def _merge(out: Tensor, sums: Tensor, sinks: Tensor | None) -> Tensor:
    if out.shape[1] == 1 and sinks is None:
        return out[:, 0]
    top = sums.amax(1, keepdim=True)
    weights = (sums - top).exp2_()
    total = weights.sum(1)
    merged = torch.einsum("qph,qphd->qhd", weights, torch.where(weights[..., None] > 0, out, 0.0))
    if sinks is not None:
        total = total + (sinks * LOG2_E - top[:, 0]).exp2_()
    return merged / total[..., None]
