"""Process groups: their families, the axes of the world that these span, and what is called in them.

A job of 8,192 ranks has thousands of groups, but they were made by a few series of calls: all tensor-parallel
groups, all pipeline groups, and so on. Groups of one series have one label and one size and share no rank, so
a *family* is a (partial) partition of the world, and "my group in this family, and my place in it" is what
one rank's graph must be told to become another's.

The *axes* are the few families whose indices together say which rank is meant. A rank of a TP x PP x DP job
is known by its places in three families; the world group, or a flattened data-and-context group, adds
nothing. Axes that carry point-to-point messages are *positional*: the first and the last stage of a pipeline
are expected to do different things. Along the others ranks are expected to be alike, which is checked by
witnesses.

A *channel* is where calls meet in order: the collectives of a group, or the messages to (from) one peer in a
group. Call number k of a channel meets call number k of the others' side. The peer of a message is its
distance in the group, round the end, and a root its place in the group, so one table serves all members.
Where calls do not meet the job would hang: `Deadlock`, and the words that all its messages use.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from windtunnel.base import ranges as stretches
from windtunnel.base.errors import HangError
from windtunnel.training.emulate.graph import Collective, EventKind, Group, Slice

Index = NDArray[np.int32]
COLLECTIVE, SEND, RECV = 0, 1, 2
Channel = tuple[int, int, int]
"""Family, direction (one of the three above), distance of the peer (0 for none)."""
Point = tuple[int, ...]
POINT_TO_POINT = ("send", "recv")


@dataclass(frozen=True)
class Family:
    """Groups of one series.

    ``members[g, i]``: the rank at place i of group g. ``group_of[rank]`` and ``index_of[rank]``: the rank's
    group (row of ``members``) and its place in it, -1 where the rank is in no group of the family.
    ``covers``: every rank is in some group.
    """

    label: str
    size: int
    members: Index
    group_of: Index
    index_of: Index
    covers: bool

    @property
    def name(self) -> str:
        return self.label or "unnamed"

    def group(self, rank: int) -> Index:
        """The ranks of the rank's group, in its order."""
        index: Index = self.members[self.group_of[rank]]
        return index

    def peer(self, rank: int, distance: int) -> int:
        """The rank at that distance in the rank's group, round the end."""
        return int(self.group(rank)[(self.index_of[rank] + distance) % self.size])


@dataclass(frozen=True)
class Families:
    """All families of a world. ``family_of[g]`` is that of the world's g-th group."""

    world_size: int
    families: list[Family]
    family_of: Index

    def sent(self, channel: Channel) -> Channel:
        """The sender's channel of the messages of ``channel``: a receive at distance d is a send at distance
        -d of the other side."""
        family, direction, distance = channel
        return (family, SEND, distance if direction == SEND else -distance % self.families[family].size)

    def of_slice(self, slice_: Slice) -> list[int]:
        """For each of the slice's groups, its family.

        Groups are found by name and, where names differ between ranks, by label and ranks. Raises
        `ValueError` for a group that is not among the world's.
        """
        families = []
        for group in slice_.groups:  # a few, of thousands in the world
            place = _place(group, slice_.world_groups)
            if place < 0:
                raise ValueError(
                    f"group {group.name!r} of rank {slice_.rank} is not among the world's groups"
                )
            families.append(int(self.family_of[place]))
        return families


def _place(group: Group, groups: list[Group]) -> int:
    """The place of ``group`` among ``groups``, -1 where it is not there."""
    if group in groups:
        return groups.index(group)
    alike = (
        i
        for i, candidate in enumerate(groups)
        if candidate.label == group.label and candidate.ranks == group.ranks
    )
    return next(alike, -1)


def find_families(groups: Sequence[Group], world_size: int) -> Families:
    """Sort the world's groups, in the order of their making, into families.

    A group joins the first family of its label and size with which it shares no rank; two meshes over the
    same ranks thus make two families. The cost is the total number of members (33,000 for 8,192 ranks in four
    dimensions) in NumPy, and one Python step a group.
    """
    open_: dict[tuple[str, int], list[int]] = {}
    rows: list[list[int]] = []
    members_of_family: list[NDArray[np.bool_]] = []
    family_of = np.full(len(groups), -1, np.int32)
    arrays = [np.array(group.ranks, np.int32) for group in groups]
    for i, group in enumerate(groups):
        candidates = open_.setdefault((group.label, len(group.ranks)), [])
        place = next((f for f in candidates if not members_of_family[f][arrays[i]].any()), -1)
        if place < 0:
            place = len(rows)
            candidates.append(place)
            rows.append([])
            members_of_family.append(np.zeros(world_size, np.bool_))
        family_of[i] = place
        rows[place].append(i)
        members_of_family[place][arrays[i]] = True
    families = [_family(groups, arrays, chosen, world_size) for chosen in rows]
    return Families(world_size, families, family_of)


def _family(groups: Sequence[Group], arrays: list[Index], chosen: list[int], world_size: int) -> Family:
    members = np.stack([arrays[i] for i in chosen])
    group_of = np.full(world_size, -1, np.int32)
    index_of = np.full(world_size, -1, np.int32)
    group_of[members] = np.arange(len(chosen), dtype=np.int32)[:, None]
    index_of[members] = np.arange(members.shape[1], dtype=np.int32)
    covers = bool((group_of >= 0).all())
    label = groups[chosen[0]].label
    return Family(label, members.shape[1], members, group_of, index_of, covers)


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
        for axis, place in zip(self.axes, point, strict=True):
            distance += np.abs(axis.index - place)
        return int(np.argmin(distance))


@dataclass(frozen=True)
class FamilyShape:
    """A family that covers the world, in short: the place of rank r is ``r // stride % size``, or
    ``places[r]`` where there is no such ``stride`` (it then is 0). ``used``: the first rank calls in it."""

    label: str
    size: int
    used: bool
    stride: int
    places: tuple[int, ...] = ()

    def index(self, world_size: int) -> Index:
        """The place of every rank."""
        if self.stride:
            return (np.arange(world_size, dtype=np.int32) // self.stride % self.size).astype(np.int32)
        return np.array(self.places, np.int32)


def family_shapes(slice_: Slice, families: Families) -> tuple[FamilyShape, ...]:
    """The families that could be an axis, as rank ``slice_.rank`` knows and uses them."""
    family_of = families.of_slice(slice_)
    used = {family_of[row.group] for row in slice_.collectives}
    shapes = []
    for number, family in enumerate(families.families):
        if not family.covers or family.size == 1:
            continue
        stride = int(np.argmax(family.index_of == 1))
        shape = FamilyShape(family.name, family.size, number in used, stride)
        if not stride or not np.array_equal(shape.index(families.world_size), family.index_of):
            shape = FamilyShape(family.name, family.size, number in used, 0, tuple(family.index_of.tolist()))
        shapes.append(shape)
    return tuple(shapes)


def message_peers(slice_: Slice) -> tuple[int, ...]:
    """The ranks to which or from which ``slice_`` has messages."""
    sent = slice_.events[slice_.events["kind"] == EventKind.COLLECTIVE]["ref"]
    rows = [slice_.collectives[row] for row in np.unique(sent)]
    return tuple(sorted({row.peer for row in rows if row.kind in POINT_TO_POINT}))


def find_axes(world_size: int, rank: int, families: Sequence[FamilyShape], peers: Sequence[int]) -> Axes:
    """Choose axes by what ``rank`` uses, which sends to or receives from ``peers``.

    A family becomes an axis when every place in it occurs with every place on the axes before it, so that the
    axes span a grid. Used families come first, then small ones, then the latest made (a mesh after the
    default group). Ranks that no axis tells apart, such as replicas that never communicate, get a last axis
    of their own, ``"replica"``.
    """
    order = sorted(range(len(families)), key=lambda f: (not families[f].used, families[f].size, -f))
    chosen: list[tuple[str, int, Index]] = []
    cell = np.zeros(world_size, np.int64)
    cells = 1
    for f in order:
        family = families[f]
        index = family.index(world_size)
        finer, count = _number(cell * family.size + index)
        if count == cells * family.size:
            chosen, cell, cells = [*chosen, (family.label, family.size, index)], finer, count
    if cells < world_size:
        place = _place_in_cell(cell)
        chosen.append(("replica", int(place.max()) + 1, place))
    axes = [
        Axis(name, size, any(index[peer] != index[rank] for peer in peers), index)
        for name, size, index in chosen
        if size > 1
    ]
    return Axes(axes, world_size)


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


@dataclass(frozen=True)
class CallRow:
    """A row of a slice's collective table: where it goes, and what both sides must agree on."""

    channel: Channel
    agreed: tuple[str | int, ...]


@dataclass(frozen=True)
class ClassCalls:
    """All calls of a class, in issue order.

    ``event[n]``: position in the slice's events. ``row[n]``: row of its collective table. ``rows``: what each
    row of the table means.
    """

    slice: Slice
    event: NDArray[np.int64]
    row: NDArray[np.int32]
    rows: list[CallRow]

    @cached_property
    def channels(self) -> dict[Channel, NDArray[np.int64]]:
        """The calls (positions in ``event``) of each channel."""
        by_channel: dict[Channel, list[int]] = {}
        for position, row in enumerate(self.row.tolist()):
            by_channel.setdefault(self.rows[row].channel, []).append(position)
        return {channel: np.array(positions) for channel, positions in by_channel.items()}

    def agreed(self, channel: Channel) -> tuple[tuple[str | int, ...], ...]:
        """What each call of ``channel`` must agree on with its counterparts, in order."""
        return tuple(self.rows[self.row[position]].agreed for position in self.channels.get(channel, ()))

    def channel(self, position: int) -> Channel:
        return self.rows[int(self.row[position])].channel

    def collective(self, position: int) -> Collective:
        return self.slice.collectives[int(self.row[position])]


def read_calls(slice_: Slice, families: Families, steady: bool) -> ClassCalls:
    """The calls of a slice; with ``steady`` only those of its steady step, numbered from its start."""
    begin, end = slice_.steady if steady else (0, len(slice_.events))
    event = np.flatnonzero(slice_.events["kind"][begin:end] == EventKind.COLLECTIVE) + begin
    row = slice_.events["ref"][event].astype(np.int32)
    return ClassCalls(slice_, event, row, call_rows(slice_, families))


def call_rows(slice_: Slice, families: Families) -> list[CallRow]:
    """What each row of the slice's collective table means."""
    family_of = families.of_slice(slice_)
    return [_row(row, slice_.rank, family_of[row.group], families) for row in slice_.collectives]


def _row(row: Collective, rank: int, family_number: int, families: Families) -> CallRow:
    family = families.families[family_number]
    place = int(family.index_of[row.peer]) if row.peer >= 0 else -1
    if row.kind in POINT_TO_POINT:
        distance = (place - int(family.index_of[rank])) % family.size
        nbytes = row.in_bytes if row.kind == "send" else row.out_bytes
        return CallRow((family_number, SEND if row.kind == "send" else RECV, distance), (nbytes,))
    agreed: tuple[str | int, ...] = (row.kind, row.backend, place)
    if row.kind in ("all_reduce", "reduce_scatter", "reduce"):
        agreed += (row.in_bytes, row.dtype)
    elif row.kind == "all_gather":
        agreed += (row.out_bytes,)
    elif row.kind == "broadcast":
        agreed += (max(row.in_bytes, row.out_bytes),)
    return CallRow((family_number, COLLECTIVE, 0), agreed)


class Deadlock(HangError):
    """The ranks of the user's program do not meet: it would hang on a real cluster. Exit status 1."""


def call_site(slice_: Slice, event: int) -> str:
    """Where in the user's script event number ``event`` was called from, ``"train.py:88"``; "" if unknown."""
    calls = np.flatnonzero(slice_.events["kind"][: event + 1] == EventKind.CALL)
    if not len(calls):
        return ""
    row = int(slice_.events["ref"][calls[-1]])
    return slice_.call_sites[row] if 0 <= row < len(slice_.call_sites) else ""


def at(slice_: Slice, event: int) -> str:
    """``" at train.py:88"``, or nothing where the call site is unknown."""
    site = call_site(slice_, event)
    return f" at {site}" if site else ""


def ranges(ranks: Iterable[int], most: int = 4) -> str:
    """``"0-3, 8, 12-15"``; after ``most`` ranges the rest is told by its number."""
    spans = stretches.spans(ranks)
    words = ", ".join(str(first) if first == last else f"{first}-{last}" for first, last in spans[:most])
    rest = sum(last - first + 1 for first, last in spans[most:])
    return f"{words} and {rest} more" if rest else words or "none"


def ranks_words(ranks: Iterable[int], most: int = 4) -> str:
    """``"rank 3"`` or ``"ranks 0-2, 7"``."""
    listed = list(ranks)
    return f"{'rank' if len(listed) == 1 else 'ranks'} {ranges(listed, most)}"


def call_words(row: Collective) -> str:
    """What a call is, for a message: kind, bytes and dtype."""
    nbytes = max(row.in_bytes, row.out_bytes)
    return f"{row.kind} of {nbytes} bytes ({row.dtype})" if nbytes else row.kind
