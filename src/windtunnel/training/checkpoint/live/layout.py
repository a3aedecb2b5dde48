"""What lies where in a shard, as a text that travels beside it.

A shard's data are tensors' bytes one after the other, each aligned to 64 bytes; before those of a rank's own
shard comes a small area with what is not a tensor (RNG states, scheduler, cursor). The layout says for every
tensor its name, type, place in the shard, and, since a tensor may be a piece of a larger one, the shape of
the whole and where the piece begins. Names and global offsets are all that a load needs, so it may be into
another world or mesh. A digest of the layout stands in every slot's header.
"""

from __future__ import annotations

import json
from collections.abc import Hashable
from dataclasses import dataclass, replace
from typing import Any

import xxhash

from windtunnel.base.errors import UserError

VERSION = 1
ALIGNMENT = 64
FORMAT = "windtunnel checkpoint layout"


@dataclass(frozen=True)
class Entry:
    """One tensor, or this rank's piece of it: ``shape`` of what is here, ``offset`` and ``nbytes`` in the
    shard's data, ``whole`` the shape of all of it, ``start`` where the piece begins in it.

    ``placements`` and ``mesh`` (its shape) tell how it was cut, () where it was not. Tied tensors have one
    offset.
    """

    name: str
    dtype: str
    shape: tuple[int, ...]
    offset: int
    nbytes: int
    whole: tuple[int, ...]
    start: tuple[int, ...]
    placements: tuple[str, ...] = ()
    mesh: tuple[int, ...] = ()


@dataclass(frozen=True)
class Layout:
    """One shard: ``shard`` its name, ``world`` the job's size, ``nbytes`` its size, ``tail`` how much of its
    beginning is for objects (bytes), their names, and its tensors.

    ``shared``: whether a shard ``"shared"`` belongs to the same checkpoint.
    """

    shard: str
    world: int
    shared: bool
    nbytes: int
    tail: int
    entries: tuple[Entry, ...]
    objects: tuple[str, ...] = ()

    def blob(self) -> bytes:
        """The layout as text; equal layouts give equal bytes."""
        plain = {
            "format": FORMAT,
            "version": VERSION,
            "shard": self.shard,
            "world": self.world,
            "shared": self.shared,
            "nbytes": self.nbytes,
            "tail": self.tail,
            "objects": self.objects,
            "entries": [_row(entry) for entry in self.entries],
        }
        return json.dumps(plain, separators=(",", ":")).encode()

    @staticmethod
    def of(blob: bytes) -> Layout:
        """The inverse of `blob`.

        Raises:
            UserError: it is truncated, of another version, or no layout at all.
        """
        try:
            plain = json.loads(blob)
        except ValueError as error:
            raise UserError(
                f"checkpoint layout: {len(blob)} bytes that are not JSON (truncated?); the text of a layout "
                "is accepted"
            ) from error
        if not isinstance(plain, dict) or plain.get("format") != FORMAT:
            raise UserError(f"checkpoint layout: field format is missing or another; {FORMAT!r} is accepted")
        if plain.get("version") != VERSION:
            raise UserError(
                f"checkpoint layout: field version is {plain.get('version')!r}; {VERSION} is accepted"
            )
        fields = {"shard": str, "world": int, "shared": bool, "nbytes": int, "tail": int, "objects": list}
        for field, kind in {**fields, "entries": list}.items():
            if not isinstance(plain.get(field), kind):
                raise UserError(
                    f"checkpoint layout: field {field} is {plain.get(field)!r}, not {kind.__name__}"
                )
        try:
            entries = tuple(_entry(row) for row in plain["entries"])
        except (TypeError, ValueError) as error:
            raise UserError(f"checkpoint layout: field entries is not understood ({error!r})") from error
        values = {field: plain[field] for field in fields}
        layout = Layout(**{**values, "objects": tuple(plain["objects"])}, entries=entries)
        for entry in entries:
            if entry.offset < layout.tail or entry.offset + entry.nbytes > layout.nbytes:
                raise UserError(
                    f"checkpoint layout: entry {entry.name} is bytes {entry.offset} .. "
                    f"{entry.offset + entry.nbytes} of shard {layout.shard}, whose tensors are bytes "
                    f"{layout.tail} .. {layout.nbytes}"
                )
        return layout


def arrange(
    shard: str,
    world: int,
    shared: bool,
    entries: list[tuple[Entry, Hashable]],
    tail: int,
    objects: tuple[str, ...],
) -> Layout:
    """The layout of a shard with these tensors; those of one identity (tied ones) lie once."""
    at = aligned(tail)
    offsets: dict[Hashable, int] = {}
    placed = []
    for entry, identity in entries:
        if identity not in offsets:
            offsets[identity] = at
            at = aligned(at + entry.nbytes)
        placed.append(replace(entry, offset=offsets[identity]))
    return Layout(shard, world, shared, max(at, ALIGNMENT), aligned(tail), tuple(placed), objects)


def digest(blob: bytes) -> str:
    """xxh3_128 of a layout, hexadecimal."""
    return xxhash.xxh3_128_hexdigest(blob)


def aligned(at: int) -> int:
    """The next offset at which a tensor may begin."""
    return (at + ALIGNMENT - 1) // ALIGNMENT * ALIGNMENT


def _row(e: Entry) -> list[Any]:
    row: list[Any] = [e.name, e.dtype, e.shape, e.offset, e.nbytes]
    if e.whole != e.shape or e.placements:
        row += [e.whole, e.start, e.placements, e.mesh]
    return row


def _entry(row: list[Any]) -> Entry:
    name, dtype, shape, offset, nbytes = row[:5]
    if not isinstance(name, str) or not isinstance(dtype, str) or min(offset, nbytes, *shape, 0) < 0:
        raise ValueError(f"entry {row[:5]}")
    shape = tuple(shape)
    whole, start, placements, mesh = row[5:] if len(row) > 5 else (shape, (0,) * len(shape), (), ())
    return Entry(
        name, dtype, shape, offset, nbytes, tuple(whole), tuple(start), tuple(placements), tuple(mesh)
    )
