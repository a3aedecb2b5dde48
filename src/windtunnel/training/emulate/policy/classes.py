"""Classes of ranks that did the same, each with the slice that stands for all of its members.

Two slices are alike when their events are equal after every name that belongs to one rank has been replaced
by one that does not: a group by its family, the peer of a message by its distance in the group (round the
end), a root by its place in the group, streams, blocks, event records and work handles by the order in which
they first appear. Left out is what changes neither time nor messages: module paths and call sites, plain
numbers among an operator's arguments (the first index of a rank's part of the vocabulary), and the places of
frees, which come early or late with Python's garbage collector. Such a slice can stand for all ranks that are
like it.
"""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import numpy as np
from numpy.typing import NDArray

from windtunnel.training.emulate.graph import (
    COMM_STREAM,
    Category,
    Collective,
    EventKind,
    Note,
    NoteKind,
    Operator,
    Slice,
)
from windtunnel.training.emulate.policy.groups import (
    POINT_TO_POINT,
    Axes,
    Deadlock,
    Families,
    FamilySeen,
    find_families,
    ranges,
    ranks_words,
    seen_families,
    seen_peers,
)
from windtunnel.training.emulate.policy.search import (
    CAPTURE_LIMIT,
    Capture,
    Decision,
    Known,
    Observation,
    decide,
)

Longs = NDArray[np.int64]
Events = np.ndarray[Any, np.dtype[Any]]

_BLOCKS = (EventKind.ALLOC, EventKind.RECORD_STREAM)
_HANDLES = (EventKind.COLLECTIVE, EventKind.WORK_WAIT)


def digest(slice_: Slice, families: Families) -> str:
    """A name of what the rank did: equal for two ranks exactly when one can stand for the other."""
    columns = canonical(slice_, families)
    return hashlib.blake2b(columns.tobytes(), digest_size=16).hexdigest()


def canonical(slice_: Slice, families: Families) -> Longs:
    """The events that count, one row each, in names that belong to no rank; int64[n, 6]."""
    events = _counted(slice_)
    kind = events["kind"]
    ref = events["ref"].astype(np.int64)
    value = np.zeros(len(events), np.int64)

    out_ref = np.zeros(len(events), np.int64)
    operators = kind == EventKind.OP
    if operators.any():
        names = np.array([_hash(_operator_text(operator)) for operator in slice_.operators], np.int64)
        out_ref[operators] = names[ref[operators]]
    collectives = kind == EventKind.COLLECTIVE
    if collectives.any():
        out_ref[collectives] = _collective_names(slice_, families)[ref[collectives]]
    _rename(np.isin(kind, _BLOCKS), ref, out_ref)
    synced = kind == EventKind.SYNC
    _rename(np.isin(kind, (EventKind.RECORD, EventKind.WAIT)) | (synced & (ref >= 0)), ref, out_ref)
    out_ref[synced & (ref < 0)] = ref[synced & (ref < 0)]
    _rename(np.isin(kind, _HANDLES) | (synced & (ref == -3)), events["value"], value)
    allocated = kind == EventKind.ALLOC
    value[allocated] = events["value"][allocated]

    category = np.zeros(len(events), np.int64)
    default = int(Category.TEMPORARY)
    category[allocated] = [slice_.block_category.get(block, default) for block in ref[allocated].tolist()]
    columns = (kind, events["phase"], _streams(events), out_ref, value, category)
    return np.stack([np.asarray(column, np.int64) for column in columns], axis=1)


def difference(one: Slice, other: Slice, families: Families) -> str:
    """In a few words, what ``other`` does that ``one`` does not, for a reader who wants to know why."""
    ours, theirs = _parameter_bytes(one), _parameter_bytes(other)
    if ours != theirs:
        size = "smaller" if theirs < ours else "larger"
        return f"a {size} shard ({theirs / 2**20:.2f} MiB of parameters instead of {ours / 2**20:.2f} MiB)"
    a, b = canonical(one, families), canonical(other, families)
    shared = min(len(a), len(b))
    unequal = np.flatnonzero((a[:shared] != b[:shared]).any(axis=1))
    if not len(unequal):
        return f"{len(b)} events instead of {len(a)}"
    return f"another graph ({_words(other, int(unequal[0]))} instead of {_words(one, int(unequal[0]))})"


def _counted(slice_: Slice) -> Events:
    return slice_.events[~np.isin(slice_.events["kind"], (EventKind.CALL, EventKind.FREE))]


def _operator_text(operator: Operator) -> str:
    inputs = ["number" if type(arg) in (int, float) else arg for arg in operator.inputs]
    return repr((operator.name, inputs, operator.outputs, operator.region))


def _words(slice_: Slice, position: int) -> str:
    event = _counted(slice_)[position]
    kind, ref = EventKind(int(event["kind"])), int(event["ref"])
    if kind == EventKind.OP:
        return slice_.operators[ref].name
    if kind == EventKind.COLLECTIVE:
        row = slice_.collectives[ref]
        return f"{row.kind} of {max(row.in_bytes, row.out_bytes)} bytes"
    if kind == EventKind.ALLOC:
        return f"{int(event['value']) / 2**20:.2f} MiB of memory"
    return kind.name.lower().replace("_", " ")


def _parameter_bytes(slice_: Slice) -> int:
    events = slice_.events[slice_.events["kind"] == EventKind.ALLOC]
    kept = [slice_.block_category.get(block) == Category.PARAMETER for block in events["ref"].tolist()]
    return int(events["value"][np.array(kept, np.bool_)].sum())


def _collective_names(slice_: Slice, families: Families) -> Longs:
    family_of = families.of_slice(slice_)

    def name(row: Collective) -> int:
        family = families.families[family_of[row.group]]
        peer = -1
        if row.peer >= 0:
            peer = int(family.index_of[row.peer])
            if row.kind in POINT_TO_POINT:
                peer = (peer - int(family.index_of[slice_.rank])) % family.size
        traits = (row.kind, family_of[row.group], row.in_bytes, row.out_bytes, row.dtype, row.backend, peer)
        return _hash(repr(traits))

    return np.array([name(row) for row in slice_.collectives], np.int64)


def _hash(text: str) -> int:
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "little", signed=True)


def _first_appearance(names: Longs) -> Longs:
    _, first, inverse = np.unique(names, return_index=True, return_inverse=True)
    order = np.empty(len(first), np.int64)
    order[np.argsort(first)] = np.arange(len(first))
    return order[inverse]


def _rename(where: NDArray[np.bool_], names: Longs, out: Longs) -> None:
    out[where] = _first_appearance(names[where])


def _streams(events: Events) -> Longs:
    stream = events["stream"].astype(np.int64)
    # Stream 0 keeps its meaning, and a process group's stream is never taken for a user's.
    return np.where(stream == 0, 0, 2 * _first_appearance(stream) + 2 + (stream >= COMM_STREAM))


@dataclass(frozen=True)
class RankClass:
    """Ranks with one graph.

    ``name``: ``"pp=0"``, or ``"all"``. ``members``: their global ranks, ascending. ``captured``: those that
    were captured; ``slice`` is of the first. ``note``: why the class was split from its neighbours, or "".
    """

    name: str
    slice: Slice
    members: Longs
    captured: tuple[int, ...]
    note: str = ""


@dataclass(frozen=True)
class Classes:
    """A partition of the world. ``rank_class[rank]`` is the row in ``classes``.

    ``assumed``: ranks for which no captured rank stands by right, but only the nearest; ``notes`` says so.
    """

    world_size: int
    classes: list[RankClass]
    families: Families
    axes: Axes
    rank_class: NDArray[np.int32]
    assumed: Longs
    notes: list[Note] = field(default_factory=list)

    @property
    def captured(self) -> list[int]:
        return sorted(rank for cls in self.classes for rank in cls.captured)


@dataclass
class Seen:
    """What has been captured so far: a digest for each rank, and one slice for each distinct digest."""

    world_size: int
    digest_of: dict[int, str] = field(default_factory=dict)
    slice_of: dict[str, Slice] = field(default_factory=dict)
    families: Families = field(init=False)
    _groups: list[tuple[int, ...]] = field(init=False, repr=False)

    def add(self, slice_: Slice) -> None:
        """Take in one slice. Raises `Deadlock` when it made other process groups than the first one."""
        if self.slice_of and [group.ranks for group in slice_.world_groups] != self._groups:
            raise Deadlock(
                f"ranks {self.first.rank} and {slice_.rank} made different process groups: every rank must"
                " call new_group (init_device_mesh) for all groups, in the same order"
            )
        if not self.slice_of:
            self.families = find_families(slice_.world_groups, self.world_size)
            self._groups = [group.ranks for group in slice_.world_groups]
        name = digest(slice_, self.families)
        self.digest_of[slice_.rank] = name
        self.slice_of.setdefault(name, slice_)

    @property
    def first(self) -> Slice:
        return next(iter(self.slice_of.values()))

    @cached_property
    def _of_the_first(self) -> tuple[tuple[FamilySeen, ...], tuple[int, ...]]:
        return seen_families(self.first, self.families), seen_peers(self.first)

    def observe(self, ranks: str, limit: int) -> Observation:
        """What the policy is told."""
        if not self.slice_of:
            return Observation(self.world_size, ranks, limit)
        number = {name: row for row, name in enumerate(self.slice_of)}
        captured = {rank: number[name] for rank, name in self.digest_of.items()}
        return Observation(self.world_size, ranks, limit, captured, *self._of_the_first)

    @cached_property
    def axes(self) -> Axes:
        return self.observe("", 0).axes


Slices = Callable[[list[int]], Sequence[Slice]]


def slice_world(
    capture: Slices, world_size: int, ranks: str | Sequence[int] = "auto", limit: int = CAPTURE_LIMIT,
    choose: Callable[[Observation], Decision] = decide,
) -> Classes:  # fmt: skip
    """Capture what is needed and sort all ``world_size`` ranks into classes.

    ``capture(ranks)`` returns a slice for each of ``ranks``, in any order; it may run them in parallel.
    ``ranks`` is ``"auto"``, ``"all"``, or the ranks that the user chose: then no other rank is captured, and
    those that play a part nobody was captured for get the nearest captured one and a note. ``choose`` asks
    the policy; a caller may write down what it said.

    Raises:
        UserError: a rank that the world does not have.
        Deadlock: two ranks made different process groups.
    """
    named = ranks if isinstance(ranks, str) else ",".join(map(str, ranks))
    seen = Seen(world_size)
    while isinstance(decision := choose(seen.observe(named, limit)), Capture):
        _take(seen, capture, list(decision.ranks))
    return _classes(seen, _stand_ins(seen, decision))


def _take(seen: Seen, capture: Slices, ranks: list[int]) -> None:
    slices = {slice_.rank: slice_ for slice_ in capture(ranks)}
    for rank in ranks:
        if rank not in slices:
            raise RuntimeError(f"capture returned no slice of rank {rank}")
        seen.add(slices[rank])


def _stand_ins(seen: Seen, decision: Known) -> Longs:
    """For every rank the one at the first corner of its cell, or itself."""
    if decision.starts is None:
        return np.arange(seen.world_size)
    axes = seen.axes
    starts = [np.array(places) for places in decision.starts]
    cell = np.zeros(seen.world_size, np.int64)
    for axis, places in zip(axes.axes, starts, strict=True):
        segment = np.searchsorted(places, axis.index, side="right") - 1
        cell = cell * len(places) + segment
    _, first, inverse = np.unique(cell, return_index=True, return_inverse=True)
    corners = []
    for rank in first.tolist():
        point = tuple(
            int(places[np.searchsorted(places, i, side="right") - 1])
            for places, i in zip(starts, axes.point(rank), strict=True)
        )
        corners.append(axes.rank(point))
    return np.array(corners, np.int64)[inverse]


def _classes(seen: Seen, stand_in: Longs) -> Classes:
    """Classes in which every rank has the graph of its stand-in, or of the nearest captured rank."""
    captured = np.array(sorted(seen.digest_of), np.int64)
    stand_in[captured] = captured
    unknown = ~np.isin(stand_in, captured)
    doubts, assumed = _assume(seen, stand_in, np.flatnonzero(unknown), captured)

    names = list(seen.slice_of)
    row_of_digest = {name: row for row, name in enumerate(names)}
    row_of_rank = np.zeros(seen.world_size, np.int32)
    row_of_rank[captured] = [row_of_digest[seen.digest_of[rank]] for rank in captured.tolist()]
    rank_class = row_of_rank[stand_in]
    # Classes in the order of their first members reads best: pp=0, pp=1, …
    present, first = np.unique(rank_class, return_index=True)
    order = present[np.argsort(first)]
    renumbered = np.empty(len(names), np.int32)
    renumbered[order] = np.arange(len(order))
    rank_class = renumbered[rank_class]

    classes: list[RankClass] = []
    taken: Counter[str] = Counter()
    for row, old in enumerate(order.tolist()):
        slice_ = seen.slice_of[names[old]]
        members = np.flatnonzero(rank_class == row)
        name = _name(seen.axes, members)
        taken[name] += 1
        name = f"{name} ({taken[name]})" if taken[name] > 1 else name
        mine = tuple(int(rank) for rank in captured if rank_class[rank] == row)
        classes.append(RankClass(name, slice_, members, mine, _note(seen, slice_, members, rank_class)))
    notes = [Note(cls.note) for cls in classes if cls.note]
    return Classes(seen.world_size, classes, seen.families, seen.axes, rank_class, assumed, notes + doubts)


def _assume(seen: Seen, stand_in: Longs, unknown: Longs, captured: Longs) -> tuple[list[Note], Longs]:
    """Point ``stand_in[unknown]`` at the nearest captured rank; warn where that one plays another part."""
    if not len(unknown):
        return [], unknown
    distance = np.zeros((len(unknown), len(captured)), np.int64)
    other_part = np.zeros(distance.shape, np.bool_)
    for axis in seen.axes.axes:
        apart = np.abs(axis.index[unknown][:, None] - axis.index[captured][None, :])
        distance += apart * (seen.world_size if axis.positional else 1)
        if axis.positional:
            other_part |= apart > 0
    nearest = np.argmin(distance, axis=1)
    stand_in[unknown] = captured[nearest]
    wrong = other_part[np.arange(len(unknown)), nearest]
    if not wrong.any():
        return [], unknown[:0]
    parts = [axis.name for axis in seen.axes.axes if axis.positional]
    doubt = (
        f"{ranks_words(unknown[wrong])} have places in {' and '.join(parts)} that no captured rank has;"
        " the nearest captured ranks stand in for them (use --ranks auto to capture one of each)"
    )
    return [Note(doubt, NoteKind.APPROXIMATION)], unknown[wrong]


def _name(axes: Axes, members: Longs) -> str:
    words = []
    for axis in axes.axes:
        places = np.unique(axis.index[members])
        if len(places) < axis.size:
            words.append(f"{axis.name}={ranges(places.tolist())}")
    return " ".join(words) or "all"


def _note(seen: Seen, slice_: Slice, members: Longs, rank_class: NDArray[np.int32]) -> str:
    """Why the class is not that of the rank at the origin of its part, where it is not."""
    axes = seen.axes
    point = axes.point(slice_.rank)
    origin = axes.rank(tuple(i if axis.positional else 0 for axis, i in zip(axes.axes, point, strict=True)))
    if origin not in seen.digest_of or rank_class[origin] == rank_class[slice_.rank]:
        return ""
    base = seen.slice_of[seen.digest_of[origin]]
    verb = "differs" if len(members) == 1 else "differ"
    why = difference(base, slice_, seen.families)
    return f"{ranks_words(members)} {verb} from rank {origin}: {why}"
