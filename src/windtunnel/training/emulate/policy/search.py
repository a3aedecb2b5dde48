"""Which ranks to capture so that all are known: the decision, as a pure loop.

Rank 0 is captured first. Its slice tells the axes of the world, and which of them carry messages. Then, in
rounds that the caller may capture in parallel:

1. The neighbour on every positional axis, and two witnesses that are far from rank 0 on all other axes at
   once. A positional axis on which the neighbour, the middle and the last place are alike is a ring (context
   parallel), not a pipeline; it is treated like the others from here on.
2. One rank for each *part*, a place on all axes that do vary, and a witness at the last part.
3. Where a witness differs from its part, every axis is looked at alone and the places where the graph
   changes are found by bisection. Shards become uneven at the ends, and rank 0 is often special, so the
   neighbours of the ends are looked at first.
4. One rank for each part and segment that is still unknown; parts inside a pipeline are sampled.

Ranks with equal digests become one class. A witness that no single axis explains stays alone in its class.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cached_property
from itertools import pairwise, product
from math import prod

import numpy as np
from numpy.typing import NDArray

from windtunnel.training.emulate.graph import Slice
from windtunnel.training.emulate.policy.axes import Axes, Point, find_axes
from windtunnel.training.emulate.policy.deadlock import Deadlock
from windtunnel.training.emulate.policy.digest import digest
from windtunnel.training.emulate.policy.families import Families, find_families

CAPTURE_LIMIT = 256


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
    def axes(self) -> Axes:
        return find_axes(self.first, self.families)


@dataclass(frozen=True)
class Plan:
    """The cells of the world: on axis a, index i belongs to the segment that ``starts[a]`` begins."""

    starts: list[NDArray[np.int64]]


def plan_first() -> list[int]:
    """The ranks to capture before anything is known."""
    return [0]


def refine(seen: Seen, limit: int = CAPTURE_LIMIT) -> list[int] | Plan:
    """The ranks to capture next, or, when nothing more need be known, the cells of the world.

    At most ``limit`` ranks are captured in all; what is then still unknown gets the nearest captured rank.
    """
    axes = seen.axes
    sizes = [axis.size for axis in axes.axes]
    origin: Point = (0,) * len(sizes)

    def at(point: Point) -> str | None:
        return seen.digest_of.get(axes.rank(point))

    def missing(points: list[Point]) -> list[int]:
        ranks = {axes.rank(point): None for point in points}
        room = max(limit - len(seen.digest_of), 0)
        return [rank for rank in ranks if rank not in seen.digest_of][:room]

    positional = [a for a, axis in enumerate(axes.axes) if axis.positional]
    others = [a for a in range(len(sizes)) if a not in positional]
    far = [
        _moved(origin, {a: sizes[a] - 1 for a in others}),
        _moved(origin, {a: sizes[a] // 2 for a in others}),
    ]
    # The neighbour tells whether the place matters. Parts are captured in order, each after the one before
    # it, because a pipeline stage learns the shapes of its inputs from the stage before.
    near = {a: [_moved(origin, {a: 1})] for a in positional}
    if wanted := missing([origin, *far, *(point for points in near.values() for point in points)]):
        return wanted
    alike = [a for a in positional if at(near[a][0]) == at(origin)]
    ends = near | {a: [_moved(origin, {a: i}) for i in (sizes[a] // 2, sizes[a] - 1)] for a in alike}
    if wanted := missing([point for points in ends.values() for point in points]):
        return wanted

    varied = [a for a in positional if any(at(point) != at(origin) for point in ends[a])]
    if prod(sizes[a] for a in varied) > limit // 2:
        varied = []  # too many parts to capture each: look for where they change instead
    others = [a for a in range(len(sizes)) if a not in varied]
    parts = [
        _moved(origin, dict(zip(varied, places, strict=True)))
        for places in product(*(range(sizes[a]) for a in varied))
    ]
    last = {a: sizes[a] - 1 for a in others}
    middle = {a: sizes[a] // 2 for a in others}
    witnesses = {
        parts[0]: [_moved(parts[0], last), _moved(parts[0], middle)],
        parts[-1]: [_moved(parts[-1], last)],
    }
    if wanted := missing([*parts, *(point for points in witnesses.values() for point in points)]):
        return wanted

    cuts: dict[int, set[int]] = {a: {0} for a in others}
    probes: list[Point] = []
    for part, points in witnesses.items():
        if all(at(point) == at(part) for point in points):
            continue
        for a in others:
            found, unknown = segments(lambda i, part=part, a=a: at(_moved(part, {a: i})), sizes[a])  # type: ignore[misc]
            cuts[a].update(found)
            probes.extend(_moved(part, {a: i}) for i in unknown)
    if wanted := missing(probes):
        return wanted
    starts = [np.array(sorted(cuts.get(a, range(size)))) for a, size in enumerate(sizes)]
    cells: list[Point] = (
        [tuple(int(i) for i in cell) for cell in product(*starts)]
        if prod(len(s) for s in starts) <= 4 * limit
        else []
    )
    # Parts in the middle of a pipeline resemble each other: if two of them do not vary where the ends do, the
    # others are taken not to either, and their other cells are not captured.
    inner = {part for part in (parts[1 % len(parts)], parts[len(parts) // 2]) if part not in witnesses}

    def part_of(cell: Point) -> Point:
        return _moved(origin, {a: cell[a] for a in varied})

    if wanted := missing([cell for cell in cells if part_of(cell) in inner or part_of(cell) in witnesses]):
        return wanted
    if any(at(cell) != at(part_of(cell)) for cell in cells if part_of(cell) in inner) and (
        wanted := missing(cells)
    ):
        return wanted
    return Plan(starts)


def segments(known: Callable[[int], str | None], size: int) -> tuple[list[int], list[int]]:
    """Where a line of ranks changes: (starts of the segments so far, indices that must be known next).

    ``known(i)`` is the digest at index i, or None. Looks at both ends and the middle, then between neighbours
    that differ, until they are adjacent. A change that ends where it began, between two equal samples, is not
    seen.
    """
    looked = {0, size // 2, size - 1}
    while True:
        unknown = sorted(i for i in looked if known(i) is None)
        if unknown:
            return [0], unknown
        ordered = sorted(looked)
        wanted = {
            _between(i, j, size, looked) for i, j in pairwise(ordered) if j - i > 1 and known(i) != known(j)
        }
        if not wanted:
            return [0] + [j for i, j in pairwise(ordered) if known(i) != known(j)], []
        looked |= wanted


def _between(i: int, j: int, size: int, looked: set[int]) -> int:
    if i == 0 and 1 not in looked:
        return 1
    if j == size - 1 and size - 2 not in looked:
        return size - 2
    return (i + j) // 2


def _moved(point: Point, places: dict[int, int]) -> Point:
    return tuple(places.get(a, i) for a, i in enumerate(point))
