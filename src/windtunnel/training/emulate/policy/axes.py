"""The axes of a world: the few families whose indices together say which rank is meant.

A rank of a TP x PP x DP job is known by its places in three families; the world group, or a flattened
data-and-context group, adds nothing. Axes that carry point-to-point messages are *positional*: the first and
the last stage of a pipeline are expected to do different things. Along the others ranks are expected to be
alike, which is checked by witnesses.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from windtunnel.training.emulate.graph import EventKind, Slice
from windtunnel.training.emulate.policy.digest import POINT_TO_POINT
from windtunnel.training.emulate.policy.families import Families, Family

Point = tuple[int, ...]


@dataclass(frozen=True)
class Axis:
    """``index[rank]``: the place of every rank on this axis, 0 to ``size - 1``."""

    name: str
    size: int
    positional: bool
    index: NDArray[np.int32]


@dataclass(frozen=True)
class Axes:
    """The axes of a world, and the way from a point (an index for each axis) to its rank."""

    axes: list[Axis]
    world_size: int

    def point(self, rank: int) -> Point:
        return tuple(int(axis.index[rank]) for axis in self.axes)

    def rank(self, point: Point) -> int:
        """The rank at ``point``; where the world is no full grid, the nearest one (the lowest of several)."""
        distance = np.zeros(self.world_size, np.int64)
        for axis, wanted in zip(self.axes, point, strict=True):
            distance += np.abs(axis.index - wanted)
        return int(np.argmin(distance))


def find_axes(slice_: Slice, families: Families) -> Axes:
    """Choose axes by what rank ``slice_.rank`` uses.

    A family becomes an axis when it covers the world and every place in it occurs with every place on the
    axes before it, so that the axes span a grid. Used families come first, then small ones, then the latest
    made (a mesh after the default group). Ranks that no axis tells apart, such as replicas that never
    communicate, get a last axis of their own, ``"replica"``.
    """
    family_of = families.of_slice(slice_)
    used = {family_of[row.group] for row in slice_.collectives}
    order = sorted(
        (f for f, family in enumerate(families.families) if family.covers and family.size > 1),
        key=lambda f: (f not in used, families.families[f].size, -f),
    )
    chosen: list[Family] = []
    cell = np.zeros(families.world_size, np.int64)
    cells = 1
    for f in order:
        family = families.families[f]
        finer, count = _number(cell * family.size + family.index_of)
        if count == cells * family.size:
            chosen, cell, cells = [*chosen, family], finer, count
    indices = [(family.name, family.size, family.index_of) for family in chosen]
    if cells < families.world_size:
        place = _place_in_cell(cell)
        indices.append(("replica", int(place.max()) + 1, place))
    moved = _axes_of_messages(slice_, [index for _, _, index in indices])
    indices_moved = zip(indices, moved, strict=True)
    axes = [Axis(name, size, far, index) for (name, size, index), far in indices_moved if size > 1]
    return Axes(axes, families.world_size)


def _axes_of_messages(slice_: Slice, indices: list[NDArray[np.int32]]) -> list[bool]:
    sent = slice_.events[slice_.events["kind"] == EventKind.COLLECTIVE]["ref"]
    rows = [slice_.collectives[row] for row in np.unique(sent)]
    peers = {row.peer for row in rows if row.kind in POINT_TO_POINT}
    return [any(index[peer] != index[slice_.rank] for peer in peers) for index in indices]


def _number(codes: NDArray[np.int64]) -> tuple[NDArray[np.int64], int]:
    unique, inverse = np.unique(codes, return_inverse=True)
    return inverse.astype(np.int64), len(unique)


def _place_in_cell(cell: NDArray[np.int64]) -> NDArray[np.int32]:
    order = np.argsort(cell, kind="stable")
    ordered = cell[order]
    starts = np.flatnonzero(np.concatenate([[True], ordered[1:] != ordered[:-1]]))
    run = np.searchsorted(starts, np.arange(len(cell)), side="right") - 1
    place = np.empty(len(cell), np.int32)
    place[order] = np.arange(len(cell)) - starts[run]
    return place
