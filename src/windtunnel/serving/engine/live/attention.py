"""Attention of a step's queries over the pieces that each reads, merged by log-sum-exp.

A query reads a path: several pieces. A piece that one query reads is done together with all such pieces of
its size in one batched product; a piece that many read is done once for all of them. Every part yields its
output ``o`` and the logarithm ``l`` of the sum of its exponentiated scores; a query's parts are joined as
``sum(o·e^l) / sum(e^l)``. Heads that share keys (grouped queries) are rows of the same product: nothing is
repeated in memory.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Protocol

import torch
from torch import Tensor

from windtunnel.serving.engine.live.segments import Piece, Slots

LOG2_E = 1.4426950408889634
LOWEST = -1e30  # stands for no score at all: finite, so that the difference of two of them is a number


Path = tuple[tuple[Piece, int], ...]  # pieces and how many tokens of each are read


class Row(Protocol):
    """A sequence: its frozen pieces, its growing tail, and how many tokens it has read."""

    path: Path
    tail: Piece | None
    depth: int


@dataclass(frozen=True, slots=True)
class Read:
    """Query ``query``, which stands at ``position``, reads ``length`` tokens of ``piece``, whose first one
    has the position ``begin``."""

    query: int
    position: int
    piece: Piece
    begin: int
    length: int


@dataclass(frozen=True, slots=True)
class Batch:
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


class Plan:
    """What the queries of one step read. Made once a step, used by every layer; pieces may not move
    meanwhile."""

    def __init__(self, reads: Sequence[Read], queries: int, device: torch.device) -> None:
        self.queries, self.device = queries, device
        self._by_window: dict[int | None, tuple[int, list[Batch]]] = {}
        shared: dict[Piece, list[Read]] = {}
        for read in reads:
            shared.setdefault(read.piece, []).append(read)
        self._shared = list(shared.values())
        alone: dict[Slots, list[Piece]] = {}
        for piece, readers in shared.items():
            if len(readers) == 1:
                alone.setdefault(piece.slots, []).append(piece)
        self._front = {
            slots: slots.front([piece.place for piece in pieces]) for slots, pieces in alone.items()
        }

    def batches(self, window: int | None) -> tuple[int, list[Batch]]:
        """The most parts that a query has, and the products to be made; with a ``window`` a query sees so
        many tokens, itself included."""
        made = self._by_window.get(window)
        if made is None:
            made = self._by_window[window] = self._make(window)
        return made

    def _make(self, window: int | None) -> tuple[int, list[Batch]]:
        parts = [0] * self.queries
        groups: dict[tuple[Slots, int], list[tuple[Piece, list[tuple[int, int, int, int]]]]] = {}
        for reads in self._shared:
            piece = reads[0].piece
            seen = []
            for read in reads:
                low = 0 if window is None else max(0, read.position - window + 1 - read.begin)
                high = min(read.length, read.position - read.begin + 1)
                if low < high:
                    seen.append((read.query, parts[read.query], low, high))
                    parts[read.query] += 1
            if seen:
                first = 0 if len(reads) == 1 else piece.place.index
                groups.setdefault((piece.slots, -1 if len(reads) == 1 else first), []).append((piece, seen))
        most = max(parts, default=0)
        return most, [self._batch(slots, begin, members, most) for (slots, begin), members in groups.items()]

    def _batch(
        self, slots: Slots, at: int, members: list[tuple[Piece, list[tuple[int, int, int, int]]]], most: int
    ) -> Batch:
        begin, count = (0, self._front[slots]) if at < 0 else (at, 1)
        each = len(members[0][1])
        low = min(seen[2] for _, all_seen in members for seen in all_seen)
        high = max(seen[3] for _, all_seen in members for seen in all_seen)
        nowhere = self.queries * most
        rows = torch.tensor([(0, nowhere, low, high)] * (count * each)).view(count, each, 4)
        at_slots = [piece.place.index - begin for piece, _ in members]
        rows[at_slots] = torch.tensor(
            [[(q, q * most + part, a, b) for q, part, a, b in seen] for _, seen in members]
        )
        rows = rows.to(self.device)
        mask = None
        lows, highs = rows[..., 2, None], rows[..., 3, None]
        if any(seen[2] > low or seen[3] < high for _, all_seen in members for seen in all_seen):
            keys = torch.arange(low, high, device=self.device)
            out = (keys < lows) | (keys >= highs)  # (count, each, keys)
            mask = torch.zeros(out.shape, device=self.device).masked_fill_(out, LOWEST)[:, None, :, None]
        return Batch(slots, begin, count, low, high, rows[..., 0].flatten(), rows[..., 1].flatten(), mask)


class Step:
    """Writes and reads the pieces of the rows of one pass."""

    def __init__(self, rows: Sequence[Row], counts: Sequence[int], device: torch.device) -> None:
        """``counts``: tokens of each row; a query is one of these."""
        reads: list[Read] = []
        by_slots: dict[Slots, list[tuple[Piece, int, int]]] = {}
        queries = 0
        for row, count in zip(rows, counts, strict=True):
            assert row.tail is not None
            by_slots.setdefault(row.tail.slots, []).append((row.tail, queries, count))
            begin = 0
            for piece, length in chain(row.path, ((row.tail, len(row.tail.tokens) + count),)):
                reads += [Read(queries + t, row.depth + t, piece, begin, length) for t in range(count)]
                begin += length
            queries += count
        self.plan = Plan(reads, queries, device)
        # Where new keys go: queries, slots' numbers and offsets. From here on no piece moves.
        self.writes: list[tuple[Slots, int, Tensor]] = []
        for slots, members in by_slots.items():
            numbers = [
                (first + t, tail.place.index, len(tail.tokens) + t)
                for tail, first, count in members
                for t in range(count)
            ]
            self.writes.append((slots, members[0][0].capacity, torch.tensor(numbers, device=device).T))

    def write(self, layer: int, key: Tensor, value: Tensor) -> None:
        """New keys and values: (rows, heads, tokens, dim)."""
        for slots, capacity, (queries, places, offsets) in self.writes:
            for name, new in (("k", key), ("v", value)):
                held = slots.tensor((name, layer), new, (new.shape[1], capacity, new.shape[3]))
                held[places, :, offsets] = new.transpose(1, 2).flatten(0, 1)[queries]

    def attend(
        self,
        layer: int,
        query: Tensor,
        scale: float,
        window: int | None,
        softcap: float | None,
        sinks: Tensor | None,
    ) -> Tensor:
        """(rows, heads, tokens, dim) -> (rows, tokens, heads, dim of values)."""
        rows, heads, count, _ = query.shape
        asked = query.transpose(1, 2).flatten(0, 1)
        return attend(self.plan, layer, asked, scale, window, softcap, sinks).view(rows, count, heads, -1)


def attend(
    plan: Plan,
    layer: int,
    query: Tensor,
    scale: float,
    window: int | None = None,
    softcap: float | None = None,
    sinks: Tensor | None = None,
) -> Tensor:
    """The attention of ``query``, shape (queries, heads, dim), by ``plan``: shape (queries, heads, dim of
    values).

    ``softcap``: scores s become softcap · tanh(s / softcap); ``sinks``: one more score a head, of a key
    without value.
    """
    queries, heads, dim = query.shape
    most, batches = plan.batches(window)
    query = query * (scale * LOG2_E if softcap is None else scale / softcap)
    out = sums = None
    for batch in batches:
        span = slice(batch.begin, batch.begin + batch.count)
        keys = batch.slots.tensors["k", layer][span, :, batch.low : batch.high]
        values = batch.slots.tensors["v", layer][span, :, batch.low : batch.high]
        count, shared = batch.count, keys.shape[1]
        each, group = len(batch.readers) // count, heads // shared
        asked = query[batch.readers].view(count, each, shared, group, dim).transpose(1, 2)
        asked = asked.reshape(count * shared, each * group, dim)
        scores = torch.bmm(asked, keys.flatten(0, 1).transpose(1, 2)).float()
        if softcap is not None:
            scores = scores.tanh_().mul_(softcap * LOG2_E)
        if batch.mask is not None:
            scores.view(count, shared, each, group, -1).add_(batch.mask)
        top = scores.amax(-1, keepdim=True)
        weights = scores.sub_(top).exp2_()
        total = weights.sum(-1, keepdim=True)
        found = torch.bmm(weights.to(values.dtype), values.flatten(0, 1)).float().div_(total)
        if out is None or sums is None:
            out = found.new_empty((queries * most + 1, heads, found.shape[-1]))
            sums = found.new_full((queries * most + 1, heads), LOWEST)
        found = found.view(count, shared, each, group, -1).transpose(1, 2)
        out[batch.to] = found.reshape(count * each, heads, -1)
        logs = top.add_(total.log2_()).view(count, shared, each, group).transpose(1, 2)
        sums[batch.to] = logs.reshape(count * each, heads)
    assert out is not None and sums is not None  # every query reads at least itself
    parts, logs = out[:-1].view(queries, most, heads, -1), sums[:-1].view(queries, most, heads)
    return _merge(parts, logs, sinks).to(query.dtype)


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
