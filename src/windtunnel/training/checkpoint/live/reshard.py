"""Which saved pieces a rank needs for its new pieces, when the world or the mesh has changed.

All tensors are known by name and by where their pieces lie in the whole. Equal pieces that lie in several
shards (replicas) are taken from one of them, so that as few shards as possible are fetched; each is fetched
once, and only one is held at a time beside the rank's own new state. A piece that is exactly what was saved
is taken whole.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from windtunnel.base.errors import UserError
from windtunnel.training.checkpoint.live.layout import Entry, Layout
from windtunnel.training.checkpoint.live.state import Want

Box = tuple[tuple[int, ...], tuple[int, ...]]


@dataclass(frozen=True)
class Move:
    """From ``source`` into what is wanted; None: all of it, else (first, size) in each dimension, of both."""

    want: Want
    source: Entry
    overlap: tuple[Box, Box] | None = None


def choose(layouts: Sequence[Layout], wants: Sequence[Want]) -> dict[str, list[Move]]:
    """The moves by shard. ``layouts``: in order of preference, the rank's own shard first.

    Raises:
        UserError: a part of something wanted lies in no shard.
    """
    held: dict[str, list[tuple[str, Entry]]] = {}
    for layout in layouts:
        for entry in layout.entries:
            held.setdefault(entry.name, []).append((layout.shard, entry))
    moves: dict[str, list[Move]] = {}
    several: list[tuple[Want, Box | None, list[tuple[str, Entry]]]] = []
    for want in wants:
        there = held.get(want.name, [])
        if want.start is None or not math.prod(want.shape):
            for shard, entry in there[:1] if want.start is None else ():
                moves.setdefault(shard, []).append(Move(want, entry))
            continue
        same = [(s, e) for s, e in there if (e.start, e.shape) == (want.start, want.shape)]
        if same:
            several.append((want, None, same))
            continue
        pieces: dict[Box, list[tuple[str, Entry]]] = {}
        for shard, entry in there:
            if _overlap(want, entry) is not None:
                pieces.setdefault((entry.start, entry.shape), []).append((shard, entry))
        overlaps = [_overlap(want, holders[0][1]) for holders in pieces.values()]
        covered = sum(math.prod(found[0][1]) for found in overlaps if found is not None)
        if covered != math.prod(want.shape):
            raise UserError(
                f"checkpoint: of {want.name}, from {want.start} of shape {want.shape}, {covered} of "
                f"{math.prod(want.shape)} elements are in it"
            )
        several += [(want, box, holders) for box, holders in pieces.items()]
    order = {layout.shard: number for number, layout in enumerate(layouts)}
    # What only one shard has decides first which shards are fetched; replicas then come from these.
    for want, box, holders in sorted(several, key=lambda item: len(item[2])):
        shard, entry = min(holders, key=lambda holder: (holder[0] not in moves, order[holder[0]]))
        moves.setdefault(shard, []).append(Move(want, entry, None if box is None else _overlap(want, entry)))
    return moves


def view(data: memoryview, entry: Entry) -> torch.Tensor:
    """The tensor of ``entry`` in a shard's data, without a copy."""
    dtype = getattr(torch, entry.dtype)
    if not entry.nbytes:
        return torch.empty(entry.shape, dtype=dtype)
    piece = torch.frombuffer(data, dtype=torch.uint8, count=entry.nbytes, offset=entry.offset)
    return piece.view(dtype).view(entry.shape)


def empty(want: Want) -> torch.Tensor:
    """Room for what is wanted."""
    return torch.empty(want.shape, dtype=getattr(torch, want.dtype))


def move(step: Move, source: torch.Tensor, target: torch.Tensor) -> None:
    """Copy the overlap."""
    if step.overlap is None:
        target.copy_(source)
        return
    (from_start, size), (to_start, _) = step.overlap
    for dim, (a, b, n) in enumerate(zip(from_start, to_start, size, strict=True)):
        source, target = source.narrow(dim, a, n), target.narrow(dim, b, n)
    target.copy_(source)


def _overlap(want: Want, entry: Entry) -> tuple[Box, Box] | None:
    """Where the two pieces meet, as (start, size) inside the saved one and inside the wanted one."""
    assert want.start is not None
    first = tuple(max(a, b) for a, b in zip(want.start, entry.start, strict=True))
    last = tuple(
        min(a + n, b + m) for a, n, b, m in zip(want.start, want.shape, entry.start, entry.shape, strict=True)
    )
    size = tuple(b - a for a, b in zip(first, last, strict=True))
    if any(n <= 0 for n in size):
        return None
    inside = tuple(f - a for f, a in zip(first, entry.start, strict=True))
    target = tuple(f - a for f, a in zip(first, want.start, strict=True))
    return (inside, size), (target, size)
