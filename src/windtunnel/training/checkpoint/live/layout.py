"""What lies where in a shard, as a text that travels beside it, and which saved pieces a rank needs of it.

A shard's data are tensors' bytes one after the other, each aligned to 64 bytes; before those of a rank's own
shard comes a small area with what is not a tensor (RNG states, scheduler, cursor). The layout says for every
tensor its name, type, place in the shard, and, since a tensor may be a piece of a larger one, the shape of
the whole and where the piece begins. Names and global offsets are all that a load needs, so it may be into
another world or mesh. A digest of the layout stands in every slot's header.

Equal pieces that lie in several shards (replicas) are taken from one of them, so that as few shards as
possible are fetched; each is fetched once, and only one is held at a time beside the rank's own new state. A
piece that is exactly what was saved is taken whole.
"""

from __future__ import annotations

import json
import math
from collections.abc import Hashable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
import xxhash

from windtunnel.base.errors import UserError
from windtunnel.base.plain import from_plain

VERSION = 3
ALIGNMENT = 64
FORMAT = "windtunnel checkpoint layout"


@dataclass(frozen=True)
class TensorEntry:
    """One tensor, or this rank's piece of it: ``shape`` of what is here, ``offset`` and ``nbytes`` in the
    shard's data, ``whole`` the shape of all of it, ``start`` where the piece begins in it.

    Tied tensors have one offset.
    """

    name: str
    dtype: str
    shape: tuple[int, ...]
    offset: int
    nbytes: int
    whole: tuple[int, ...]
    start: tuple[int, ...]


@dataclass(frozen=True)
class ShardLayout:
    """One shard: ``shard`` its name, ``nbytes`` its size, ``tail`` how much of its beginning is for objects
    (bytes), their names, and its tensors."""

    shard: str
    nbytes: int
    tail: int
    entries: tuple[TensorEntry, ...]
    objects: tuple[str, ...] = ()

    def blob(self) -> bytes:
        """The layout as text; equal layouts give equal bytes."""
        rows = [_row(entry) for entry in self.entries]
        plain = {"format": FORMAT, "version": VERSION, **vars(self), "entries": rows}
        return json.dumps(plain, separators=(",", ":")).encode()

    @staticmethod
    def of(blob: bytes) -> ShardLayout:
        """The inverse of `blob`.

        Raises:
            UserError: it is truncated, of another version, or no layout at all.
        """
        try:
            plain = json.loads(blob)
            stands = plain.pop("format"), plain.pop("version")
            if stands != (FORMAT, VERSION):
                raise ValueError(f"{stands[0]} {stands[1]}; {FORMAT} {VERSION} is accepted")
            entries = tuple(_entry(row) for row in plain.pop("entries"))
            layout = replace(from_plain(ShardLayout, plain | {"entries": []}), entries=entries)
        except (TypeError, ValueError, KeyError, AttributeError) as error:
            raise UserError(
                f"checkpoint layout: {len(blob)} bytes that are not understood, perhaps truncated ({error})"
            ) from error
        for entry in entries:
            if entry.offset < layout.tail or entry.offset + entry.nbytes > layout.nbytes:
                raise UserError(
                    f"checkpoint layout: entry {entry.name} is bytes {entry.offset} .. "
                    f"{entry.offset + entry.nbytes} of shard {layout.shard}, whose tensors are bytes "
                    f"{layout.tail} .. {layout.nbytes}"
                )
        return layout


def arrange(
    shard: str, entries: list[tuple[TensorEntry, Hashable]], tail: int, objects: tuple[str, ...]
) -> ShardLayout:
    """The layout of a shard with these tensors; those of one identity (tied ones) lie once."""
    at = aligned(tail)
    offsets: dict[Hashable, int] = {}
    placed = []
    for entry, identity in entries:
        if identity not in offsets:
            offsets[identity] = at
            at = aligned(at + entry.nbytes)
        placed.append(replace(entry, offset=offsets[identity]))
    nbytes = max(at, ALIGNMENT)
    return ShardLayout(shard, nbytes, aligned(tail), tuple(placed), objects)


def digest(blob: bytes) -> str:
    """xxh3_128 of a layout, hexadecimal."""
    return xxhash.xxh3_128_hexdigest(blob)


def aligned(at: int) -> int:
    """The next offset at which a tensor may begin."""
    return (at + ALIGNMENT - 1) // ALIGNMENT * ALIGNMENT


def _row(e: TensorEntry) -> list[Any]:
    row: list[Any] = [e.name, e.dtype, e.shape, e.offset, e.nbytes]
    if e.whole != e.shape:
        row += [e.whole, e.start]
    return row


def _entry(row: list[Any]) -> TensorEntry:
    name, dtype, shape, offset, nbytes = row[:5]
    if not isinstance(name, str) or not isinstance(dtype, str) or min(offset, nbytes, *shape, 0) < 0:
        raise ValueError(f"entry {row[:5]}")
    shape = tuple(shape)
    whole, start = row[5:7] if len(row) > 5 else (shape, (0,) * len(shape))
    return TensorEntry(name, dtype, shape, offset, nbytes, tuple(whole), tuple(start))


@dataclass(frozen=True)
class Want:
    """A tensor that the present state needs: piece ``start``, ``shape`` of a tensor of shape ``whole``.

    ``start`` None: whatever the rank's own shard holds under this name.
    """

    name: str
    dtype: str = ""
    whole: tuple[int, ...] = ()
    start: tuple[int, ...] | None = None
    shape: tuple[int, ...] = ()


Box = tuple[tuple[int, ...], tuple[int, ...]]


@dataclass(frozen=True)
class Move:
    """From ``source`` into what is wanted; None: all of it, else (first, size) in each dimension, of both."""

    want: Want
    source: TensorEntry
    overlap: tuple[Box, Box] | None = None


def choose_moves(layouts: Sequence[ShardLayout], wants: Sequence[Want]) -> dict[str, list[Move]]:
    """The moves by shard. ``layouts``: in order of preference, the rank's own shard first.

    Raises:
        UserError: a part of something wanted lies in no shard.
    """
    entries_of: dict[str, list[tuple[str, TensorEntry]]] = {}
    for layout in layouts:
        for entry in layout.entries:
            entries_of.setdefault(entry.name, []).append((layout.shard, entry))
    moves: dict[str, list[Move]] = {}
    several: list[tuple[Want, Box | None, list[tuple[str, TensorEntry]]]] = []
    for want in wants:
        there = entries_of.get(want.name, [])
        if want.start is None or not math.prod(want.shape):
            for shard, entry in there[:1] if want.start is None else ():
                moves.setdefault(shard, []).append(Move(want, entry))
            continue
        same = [(s, e) for s, e in there if (e.start, e.shape) == (want.start, want.shape)]
        if same:
            several.append((want, None, same))
            continue
        pieces: dict[Box, list[tuple[str, TensorEntry]]] = {}
        for shard, entry in there:
            if _overlap(want, entry) is not None:
                pieces.setdefault((entry.start, entry.shape), []).append((shard, entry))
        overlaps = [_overlap(want, holders[0][1]) for holders in pieces.values()]
        covered = sum(math.prod(overlap[0][1]) for overlap in overlaps if overlap is not None)
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


def view_of(data: memoryview, entry: TensorEntry) -> torch.Tensor:
    """The tensor of ``entry`` in a shard's data, without a copy."""
    dtype = getattr(torch, entry.dtype)
    if not entry.nbytes:
        return torch.empty(entry.shape, dtype=dtype)
    piece = torch.frombuffer(data, dtype=torch.uint8, count=entry.nbytes, offset=entry.offset)
    return piece.view(dtype).view(entry.shape)


def room_for(want: Want) -> torch.Tensor:
    """Room for what is wanted."""
    return torch.empty(want.shape, dtype=getattr(torch, want.dtype))


def copy_overlap(move: Move, source: torch.Tensor, target: torch.Tensor) -> None:
    """Copy the overlap."""
    if move.overlap is None:
        target.copy_(source)
        return
    (from_start, size), (to_start, _) = move.overlap
    for dim, (a, b, n) in enumerate(zip(from_start, to_start, size, strict=True)):
        source, target = source.narrow(dim, a, n), target.narrow(dim, b, n)
    target.copy_(source)


def _overlap(want: Want, entry: TensorEntry) -> tuple[Box, Box] | None:
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
