"""Attention of a step's queries over the pieces that each reads, merged by log-sum-exp.

A query reads a path: several pieces. A piece that one query reads is done together with all such pieces of
its size in one batched product; a piece that many read is done once for all of them. Every part yields its
output ``o`` and, where a query has several, the logarithm ``l`` of the sum of its exponentiated scores; these
are joined as ``sum(o·e^l) / sum(e^l)``. Heads that share keys (grouped queries) are rows of the same product:
nothing is repeated in memory.
"""

from __future__ import annotations

from collections.abc import Mapping
from collections.abc import Sequence as Ordered
from dataclasses import dataclass
from itertools import chain

import torch
from torch import Tensor

from windtunnel.serving.engine.live.segments import Piece, Sequence, Slots

BLOCK = 64
"""Queries that read a piece in one product: its scores stay in a cache."""
LOWEST = -1e30  # stands for no score at all: finite, so that the difference of two of them is a number
Spans = list[tuple[int, int, int]]
"""Who reads a piece: query, and the first and the last key that it sees, excluded."""


@dataclass(frozen=True, slots=True)
class _Batch:
    """``places``: some of the slots, of each the keys ``low`` to ``high``. ``readers`` are queries, shape
    (slots · readers of each,); ``mask`` is added to the scores, shape (slots, 1, readers of each, 1, keys),
    or None."""

    slots: Slots
    places: slice
    low: int
    high: int
    readers: Tensor
    mask: Tensor | None


@dataclass(frozen=True, slots=True)
class _Batches:
    """All products. ``parts``: where each query's are among the readers, shape (queries, most parts);
    ``lacking``: those that a query has not, or None where each has as many."""

    batches: list[_Batch]
    parts: Tensor
    lacking: Tensor | None


class AttentionPass:
    """Writes and reads the pieces of the rows of one pass, in every layer; pieces may not move meanwhile."""

    def __init__(self, rows: Ordered[Sequence], counts: Ordered[int], device: torch.device) -> None:
        """``counts``: tokens of each row; a query is one of these."""
        self._device, self._queries = device, sum(counts)
        self._by_window: dict[int | None, _Batches] = {}
        # of each piece: query, its place counted from the piece's first token, tokens that its path has of it
        self._readers: dict[Piece, list[tuple[int, int, int]]] = {}
        tails: dict[Slots, list[tuple[Piece, int, int]]] = {}
        query = 0
        for row, count in zip(rows, counts, strict=True):
            assert row.tail is not None
            tails.setdefault(row.tail.slots, []).append((row.tail, query, count))
            at = row.depth
            for piece, length in chain(row.path, ((row.tail, row.tail.length + count),)):
                of = self._readers.setdefault(piece, [])
                of += [(query + t, at + t, length) for t in range(count)]
                at -= length
            query += count
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
        for name, new in (("k", key), ("v", value)):
            flat = new.transpose(1, 2).flatten(0, 1)
            for slots, capacity, (queries, places, offsets) in self._writes:
                stored = slots.tensor((name, layer), new, (new.shape[1], capacity, new.shape[3]))
                stored[places, :, offsets] = flat if len(self._writes) == 1 else flat[queries]

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
        batched, (rows, heads, tokens, _) = self._by_window[window], query.shape
        scaled = query.transpose(1, 2).flatten(0, 1) * (scale if softcap is None else scale / softcap)
        several = batched.parts.shape[1] > 1 or sinks is not None
        products = [_products(scaled, layer, batch, softcap, several) for batch in batched.batches]
        out, logs = (torch.cat(each) if len(each) > 1 else each[0] for each in zip(*products, strict=True))
        merged = _merge(out, logs, batched, sinks) if several else out[batched.parts[:, 0]]
        return merged.to(query.dtype).view(rows, tokens, heads, -1)

    def _batches(self, window: int | None) -> _Batches:
        """The products to be made."""
        groups: dict[tuple[Slots, int, int], list[tuple[Piece, Spans]]] = {}
        for piece, readers in self._readers.items():
            spans: Spans = []
            for query, at, length in readers:
                low, high = 0 if window is None else max(0, at - window + 1), min(length, at + 1)
                if low < high:
                    spans.append((query, low, high))
            place = -1 if len(readers) == 1 else piece.index
            # readers are in the order of their tokens: a block leaves out the keys of those behind it
            for block in range(0, len(spans), BLOCK):
                members = groups.setdefault((piece.slots, place, block), [])
                members.append((piece, spans[block : block + BLOCK]))
        batches: list[_Batch] = []
        parts: list[list[int]] = [[] for _ in range(self._queries)]
        total = 0
        for (slots, place, _), members in groups.items():
            begin, count = (0, self._front[slots]) if place < 0 else (place, 1)
            rows = {piece.index - begin: spans for piece, spans in members}
            each = len(members[0][1])
            for row, spans in rows.items():
                for number, (query, _, _) in enumerate(spans, total + row * each):
                    parts[query].append(number)
            total += count * each
            batches.append(self._batch(slots, slice(begin, begin + count), rows))
        most = max(map(len, parts))
        numbers = [(*places, *(-1,) * (most - len(places))) for places in parts]
        tensor = torch.tensor(numbers, device=self._device)
        return _Batches(batches, tensor, tensor < 0 if any(len(places) < most for places in parts) else None)

    def _batch(self, slots: Slots, places: slice, spans: Mapping[int, Spans]) -> _Batch:
        """``spans``: who reads each of the slots, if anybody does; as many each."""
        everyone = list(chain.from_iterable(spans.values()))
        low, high = min(span[1] for span in everyone), max(span[2] for span in everyone)
        nobody = [(0, low, high)] * (len(everyone) // len(spans))
        rows = torch.tensor(
            [spans.get(row, nobody) for row in range(places.stop - places.start)], device=self._device
        )
        mask = None
        if any(span[1:] != (low, high) for span in everyone):
            keys = torch.arange(low, high, device=self._device)
            out = (keys < rows[..., 1, None]) | (keys >= rows[..., 2, None])  # (count, each, keys)
            mask = torch.where(out, LOWEST, 0.0)[:, None, :, None]
        return _Batch(slots, places, low, high, rows[..., 0].flatten(), mask)


def _products(
    query: Tensor, layer: int, batch: _Batch, softcap: float | None, several: bool
) -> tuple[Tensor, Tensor]:
    """``query``, (queries, heads, dim), over the keys of a batch, (count, shared heads, keys, dim): outputs
    of its readers, (readers, heads, dim of values), and with ``several`` the logarithms of the sums,
    (readers, heads)."""
    keys, values = (
        batch.slots.tensors[name, layer][batch.places, :, batch.low : batch.high] for name in ("k", "v")
    )
    (_, heads, dim), (count, shared), readers = query.shape, keys.shape[:2], len(batch.readers)
    each, group = readers // count, heads // shared
    tensor = query[batch.readers].view(count, each, shared, group, dim).transpose(1, 2)
    tensor = tensor.reshape(count * shared, each * group, dim)
    scores = torch.bmm(tensor, keys.flatten(0, 1).transpose(1, 2)).float()
    if softcap is not None:
        scores = scores.tanh_().mul_(softcap)
    if batch.mask is not None:
        scores.view(count, shared, each, group, -1).add_(batch.mask)
    top = scores.amax(-1, keepdim=True)
    # divided afterwards: shares of many keys are too small for 16 bits, up to one they are not
    weights = scores.sub_(top).exp_()
    total = weights.sum(-1, keepdim=True)
    products = torch.bmm(weights.to(values.dtype), values.flatten(0, 1)).float().div_(total)
    products = products.view(count, shared, each, group, -1).transpose(1, 2).reshape(readers, heads, -1)
    if not several:
        return products, products
    logs = top.add_(total.log_())
    return products, logs.view(count, shared, each, group).transpose(1, 2).reshape(readers, heads)


def _merge(out: Tensor, logs: Tensor, batched: _Batches, sinks: Tensor | None) -> Tensor:
    """Each query's parts as one."""
    out, logs = out[batched.parts], logs[batched.parts]
    if batched.lacking is not None:
        logs.masked_fill_(batched.lacking[..., None], LOWEST)
    top = logs.amax(1, keepdim=True)
    weights = (logs - top).exp_()
    total = weights.sum(1)
    merged = torch.einsum("qph,qphd->qhd", weights, torch.where(weights[..., None] > 0, out, 0.0))
    if sinks is not None:
        total = total + (sinks - top[:, 0]).exp_()
    return merged / total[..., None]
