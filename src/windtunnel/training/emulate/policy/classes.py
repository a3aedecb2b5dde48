"""Classes of ranks that did the same, each with the slice that stands for all of its members."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from windtunnel.base.errors import UserError
from windtunnel.training.emulate.graph import Slice
from windtunnel.training.emulate.policy.axes import Axes
from windtunnel.training.emulate.policy.deadlock import ranges, ranks_words
from windtunnel.training.emulate.policy.digest import difference
from windtunnel.training.emulate.policy.families import Families
from windtunnel.training.emulate.policy.search import CAPTURE_LIMIT, Plan, Seen, plan_first, refine

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

    ``assumed``: ranks for which no captured rank stands by right, but only the nearest; ``warnings`` says so.
    """

    world_size: int
    classes: list[RankClass]
    families: Families
    axes: Axes
    rank_class: NDArray[np.int32]
    assumed: Longs
    warnings: list[str] = field(default_factory=list)

    @property
    def captured(self) -> list[int]:
        return sorted(rank for cls in self.classes for rank in cls.captured)


Capture = Callable[[list[int]], Sequence[Slice]]


def slice_world(
    capture: Capture, world_size: int, ranks: str | Sequence[int] = "auto", limit: int = CAPTURE_LIMIT
) -> Classes:
    """Capture what is needed and sort all ``world_size`` ranks into classes.

    ``capture(ranks)`` returns a slice for each of ``ranks``, in any order; it may run them in parallel.
    ``ranks`` is ``"auto"``, ``"all"``, or the ranks that the user chose: then no other rank is captured, and
    those that play a part nobody was captured for get the nearest captured one and a warning.

    Raises:
        UserError: a rank that the world does not have.
        Deadlock: two ranks made different process groups.
    """
    seen = Seen(world_size)
    if ranks == "auto":
        step: list[int] | Plan = plan_first()
        while not isinstance(step, Plan):
            _take(seen, capture, step)
            step = refine(seen, limit)
        return _by_plan(seen, step)
    chosen = parse_ranks(ranks, world_size) if isinstance(ranks, str) else list(ranks)
    _take(seen, capture, chosen)
    return _by_distance(seen)


def parse_ranks(text: str, world_size: int) -> list[int]:
    """The ranks that ``--ranks`` names: ``"all"``, or numbers and ranges as in ``"0,17,120-127"``.

    Raises `UserError` for anything else, and for a rank outside the world.
    """
    if text.strip() == "all":
        return list(range(world_size))
    found: set[int] = set()
    for part in text.split(","):
        first, dash, last = part.strip().partition("-")
        if not first.isdigit() or (dash and not last.isdigit()):
            raise UserError(
                f"--ranks: {part.strip()!r} is not a rank; accepted are auto, all, or 0,17,120-127"
            )
        low, high = int(first), int(last or first)
        if high >= world_size or low > high:
            raise UserError(
                f"--ranks: {part.strip()!r} lies outside the world of ranks 0 to {world_size - 1}"
            )
        found.update(range(low, high + 1))
    return sorted(found)


def _take(seen: Seen, capture: Capture, ranks: list[int]) -> None:
    slices = {slice_.rank: slice_ for slice_ in capture(ranks)}
    for rank in ranks:
        if rank not in slices:
            raise RuntimeError(f"capture returned no slice of rank {rank}")
        seen.add(slices[rank])


def _by_plan(seen: Seen, plan: Plan) -> Classes:
    axes = seen.axes
    cell = np.zeros(seen.world_size, np.int64)
    for axis, starts in zip(axes.axes, plan.starts, strict=True):
        segment = np.searchsorted(starts, axis.index, side="right") - 1
        cell = cell * len(starts) + segment
    _, first, inverse = np.unique(cell, return_index=True, return_inverse=True)
    stand_in = np.empty(seen.world_size, np.int64)
    corners = []
    for rank in first.tolist():
        point = tuple(
            int(starts[np.searchsorted(starts, i, side="right") - 1])
            for starts, i in zip(plan.starts, axes.point(rank), strict=True)
        )
        corners.append(axes.rank(point))
    stand_in[:] = np.array(corners, np.int64)[inverse]
    return _classes(seen, stand_in)


def _by_distance(seen: Seen) -> Classes:
    return _classes(seen, np.arange(seen.world_size))


def _classes(seen: Seen, stand_in: Longs) -> Classes:
    """Classes in which every rank has the graph of its stand-in, or of the nearest captured rank."""
    stand_in = stand_in.copy()
    captured = np.array(sorted(seen.digest_of), np.int64)
    stand_in[captured] = captured
    unknown = ~np.isin(stand_in, captured)
    warnings, assumed = _assume(seen, stand_in, np.flatnonzero(unknown), captured)

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
    notes = [cls.note for cls in classes if cls.note]
    return Classes(seen.world_size, classes, seen.families, seen.axes, rank_class, assumed, notes + warnings)


def _assume(seen: Seen, stand_in: Longs, unknown: Longs, captured: Longs) -> tuple[list[str], Longs]:
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
    warning = (
        f"{ranks_words(unknown[wrong])} have places in {' and '.join(parts)} that no captured rank has;"
        " the nearest captured ranks stand in for them (use --ranks auto to capture one of each)"
    )
    return [warning], unknown[wrong]


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
