"""Classes of ranks that did the same, each with the slice that stands for all of its members.

`slice_world` asks the policy which ranks to run until it has enough, and cuts the world into classes. Ranks
are of one class when their slices are alike and so is what they call after the steady step.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from windtunnel.training.emulate.graph import Note, NoteKind, Slice
from windtunnel.training.emulate.policy.alike import difference, digest
from windtunnel.training.emulate.policy.checks import (
    CAPTURE_LIMIT,
    CHECK_LIMIT,
    REFUSED,
    Capture,
    CheckedCells,
    Decision,
    Observation,
    stand_ins,
)
from windtunnel.training.emulate.policy.groups import (
    Axes,
    Deadlock,
    Families,
    FamilyShape,
    family_shapes,
    find_families,
    message_peers,
    ranges,
    ranks_words,
)
from windtunnel.training.emulate.policy.search import decide

Longs = NDArray[np.int64]


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
    ``checked``: ranks that were run for their outlines only, which are those of their classes. ``messages``:
    what the captured ranks said to others, by the name of a message, where live ranks are to hear it.
    """

    world_size: int
    classes: list[RankClass]
    families: Families
    axes: Axes
    rank_class: NDArray[np.int32]
    assumed: Longs
    notes: list[Note] = field(default_factory=list)
    checked: tuple[int, ...] = ()
    messages: dict[str, bytes] = field(default_factory=dict)

    @property
    def captured(self) -> list[int]:
        return sorted(rank for cls in self.classes for rank in cls.captured)

    @property
    def unseen(self) -> list[int]:
        """Ranks that never ran: they are assumed to do what their class does."""
        return np.setdiff1d(np.arange(self.world_size), [*self.captured, *self.checked]).tolist()


@dataclass
class RankEvidence:
    """What has been run so far: for each captured rank the number of what it did, a slice and an outline for
    each such number, and the outlines of the ranks that were only checked. What is done and outlines are
    numbered by their digests."""

    world_size: int
    captured: dict[int, int] = field(default_factory=dict)
    slices: list[Slice] = field(default_factory=list)
    calls: list[int] = field(default_factory=list)
    checked: dict[int, int] = field(default_factory=dict)
    families: Families = field(init=False)
    _numbers: dict[str, int] = field(default_factory=dict)
    _outlines: dict[str, int] = field(default_factory=dict)

    def add(self, slice_: Slice) -> None:
        """Take in one slice. Raises `Deadlock` when it made other process groups than the first one."""
        if not self.slices:
            self.families = find_families(slice_.world_groups, self.world_size)
        outline = self._outline(slice_)
        name = f"{digest(slice_, self.families)} {outline}"
        number = self.captured[slice_.rank] = self._numbers.setdefault(name, len(self.slices))
        if number == len(self.slices):
            self.slices.append(slice_)
            self.calls.append(outline)

    def check(self, rank: int, slice_: Slice | None) -> None:
        """Take in the outline of a rank; None: it could not be run. Raises `Deadlock` as `add` does."""
        self.checked[rank] = REFUSED if slice_ is None else self._outline(slice_)

    def _outline(self, slice_: Slice) -> int:
        first = self.slices[0] if self.slices else slice_
        if [group.ranks for group in slice_.world_groups] != [group.ranks for group in first.world_groups]:
            raise Deadlock(
                f"ranks {first.rank} and {slice_.rank} made different process groups: every rank must"
                " call new_group (init_device_mesh) for all groups, in the same order"
            )
        return self._outlines.setdefault(digest(slice_.outline(), self.families), len(self._outlines))

    @cached_property
    def _of_the_first(self) -> tuple[tuple[FamilyShape, ...], tuple[int, ...]]:
        return family_shapes(self.slices[0], self.families), message_peers(self.slices[0])

    def observe(self, ranks: str, limit: int, checks: int = 0) -> Observation:
        """What the policy is told."""
        families, peers = self._of_the_first if self.slices else ((), ())
        return Observation(
            self.world_size, ranks, limit, dict(self.captured), families, peers, checks=checks,
            calls=tuple(self.calls), checked=dict(self.checked),
        )  # fmt: skip

    @cached_property
    def axes(self) -> Axes:
        return self.observe("", 0).axes


Slices = Callable[[list[int]], Sequence[Slice]]
Outlines = Callable[[list[int]], Sequence[Slice | None]]


def slice_world(
    capture: Slices, world_size: int, ranks: str | Sequence[int] = "auto", limit: int = CAPTURE_LIMIT,
    choose: Callable[[Observation], Decision] = decide, check: Outlines | None = None,
) -> Classes:  # fmt: skip
    """Run what is needed and sort all ``world_size`` ranks into classes.

    ``capture(ranks)`` returns a slice for each of ``ranks``, in any order; it may run them in parallel.
    ``check(ranks)`` likewise, in the order of ``ranks``: slices of which only the outlines are read, None for
    a rank that cannot be run; without it no rank is checked. ``ranks`` is ``"auto"``, ``"all"``, or the ranks
    that the user chose: then no other rank is run, and those that play a part nobody was captured for get the
    nearest captured one and a note. ``choose`` asks the policy; a caller may write down what it said, and add
    what it knows.

    Raises:
        UserError: a rank that the world does not have.
        Deadlock: two ranks made different process groups.
    """
    named = ranks if isinstance(ranks, str) else ",".join(map(str, ranks))
    evidence = RankEvidence(world_size)
    checks = CHECK_LIMIT if check is not None else 0
    while not isinstance(decision := choose(evidence.observe(named, limit, checks)), CheckedCells):
        if isinstance(decision, Capture):
            _take(evidence, capture, list(decision.ranks))
        else:
            assert check is not None
            for rank, slice_ in zip(decision.ranks, check(list(decision.ranks)), strict=True):
                evidence.check(rank, slice_)
    return _classes(evidence, decision)


def _take(evidence: RankEvidence, capture: Slices, ranks: list[int]) -> None:
    slices = {slice_.rank: slice_ for slice_ in capture(ranks)}
    for rank in ranks:
        if rank not in slices:
            raise RuntimeError(f"capture returned no slice of rank {rank}")
        evidence.add(slices[rank])


def _classes(evidence: RankEvidence, cells: CheckedCells) -> Classes:
    """Classes in which every rank has the graph of the captured rank that stands for it."""
    stand_in, assumed = stand_ins(evidence.observe("", 0), cells)
    number_of = np.zeros(evidence.world_size, np.int32)
    number_of[list(evidence.captured)] = list(evidence.captured.values())
    # Classes in the order of their first members reads best: pp=0, pp=1, …
    present, first = np.unique(number_of[stand_in], return_index=True)
    order = present[np.argsort(first)]
    row_of = np.zeros(len(evidence.slices), np.int32)
    row_of[order] = np.arange(len(order))
    rank_class = row_of[number_of[stand_in]]

    classes: list[RankClass] = []
    name_counts: Counter[str] = Counter()
    for row, number in enumerate(order.tolist()):
        slice_, members = evidence.slices[number], np.flatnonzero(rank_class == row)
        name = _name(evidence.axes, members)
        name_counts[name] += 1
        name = f"{name} ({name_counts[name]})" if name_counts[name] > 1 else name
        mine = tuple(rank for rank in sorted(evidence.captured) if rank_class[rank] == row)
        classes.append(RankClass(name, slice_, members, mine, _note(evidence, slice_, members, rank_class)))
    notes = [Note(cls.note) for cls in classes if cls.note]
    notes += [_doubt(evidence, assumed)] if len(assumed) else []
    ran = (rank for rank, outline in sorted(evidence.checked.items()) if outline != REFUSED)
    checked = tuple(rank for rank in ran if rank not in evidence.captured)
    return Classes(
        evidence.world_size, classes, evidence.families, evidence.axes, rank_class, assumed, notes, checked
    )


def _doubt(evidence: RankEvidence, assumed: Longs) -> Note:
    """Warns that the captured ranks which stand in for these play another part."""
    parts = [axis.name for axis in evidence.axes.axes if axis.positional]
    return Note(
        f"{ranks_words(assumed)} have places in {' and '.join(parts)} that no captured rank has;"
        " the nearest captured ranks stand in for them (use `ranks` auto to capture one of each)",
        NoteKind.APPROXIMATION,
    )


def _name(axes: Axes, members: Longs) -> str:
    words = []
    for axis in axes.axes:
        places = np.unique(axis.index[members])
        if len(places) < axis.size:
            words.append(f"{axis.name}={ranges(places.tolist())}")
    return " ".join(words) or "all"


def _note(evidence: RankEvidence, slice_: Slice, members: Longs, rank_class: NDArray[np.int32]) -> str:
    """Why the class is not that of the rank at the origin of its part, where it is not."""
    axes = evidence.axes
    point = axes.point(slice_.rank)
    origin = axes.rank(tuple(i if axis.positional else 0 for axis, i in zip(axes.axes, point, strict=True)))
    if origin not in evidence.captured or rank_class[origin] == rank_class[slice_.rank]:
        return ""
    base = evidence.slices[evidence.captured[origin]]
    verb = "differs" if len(members) == 1 else "differ"
    why = difference(base, slice_, evidence.families)
    return f"{ranks_words(members)} {verb} from rank {origin}: {why}" if why else ""
