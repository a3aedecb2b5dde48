"""Which ranks to capture so that all are known: the decision, from what was captured so far.

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

5. What these ranks cannot exclude is *checked*: see `windtunnel.training.emulate.policy.checks`.

Ranks with equal digests become one class. A witness that no single axis explains stays alone in its class.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from itertools import pairwise, product
from math import prod

from windtunnel.base.errors import UserError
from windtunnel.training.emulate.policy.checks import Capture, CheckedCells, Decision, Observation, verify
from windtunnel.training.emulate.policy.groups import Point


def decide(observation: Observation) -> Decision:
    """The ranks to run next, or that no more are needed.

    Raises:
        UserError: the user's ranks are none, or not of this world.
    """
    return search(observation) if observation.ranks == "auto" else chosen(observation)


def chosen(observation: Observation, ranks: str = "") -> Decision:
    """Exactly the ``ranks``, or those that the user named; rank 0 stands for all where none is named."""
    named = ranks or observation.ranks
    listed = [0] if named == "auto" else parse_ranks(named, observation.world_size)
    missing = tuple(rank for rank in listed if rank not in observation.captured)
    why = "every rank" if named == "all" else "named by the user"
    return Capture(missing, why) if missing else CheckedCells(None)


def search(observation: Observation) -> Decision:
    """One rank of each part and witnesses, as the module's text says.

    At most ``limit`` ranks are captured in all; what is then still unknown gets the nearest captured rank.
    """
    if not observation.captured:
        return Capture((0,), "the first rank shows the axes of the world")
    axes, captured, limit = observation.axes, observation.captured, observation.limit
    sizes = [axis.size for axis in axes.axes]
    origin: Point = (0,) * len(sizes)

    def at(point: Point) -> int | None:
        return captured.get(axes.rank(point))

    def missing(points: list[Point]) -> tuple[int, ...]:
        ranks = {axes.rank(point): None for point in points}
        room = max(limit - len(captured), 0)
        return tuple(rank for rank in ranks if rank not in captured)[:room]

    positional = [a for a, axis in enumerate(axes.axes) if axis.positional]
    others = [a for a in range(len(sizes)) if a not in positional]
    far = [
        _moved(origin, {a: sizes[a] - 1 for a in others}),
        _moved(origin, {a: sizes[a] // 2 for a in others}),
    ]
    # The neighbour tells whether the place matters. Parts are captured in order, each after the one before
    # it, because a pipeline stage learns the shapes of its inputs from the stage before.
    near = {a: [_moved(origin, {a: 1})] for a in positional}
    if next_ranks := missing([origin, *far, *(point for points in near.values() for point in points)]):
        return Capture(
            next_ranks, "neighbours of the first rank where messages go, and witnesses far from it"
        )
    alike = [a for a in positional if at(near[a][0]) == at(origin)]
    ends = near | {a: [_moved(origin, {a: i}) for i in (sizes[a] // 2, sizes[a] - 1)] for a in alike}
    if next_ranks := missing([point for points in ends.values() for point in points]):
        return Capture(next_ranks, "the middle and the end of what may be a ring")

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
    if next_ranks := missing([*parts, *(point for points in witnesses.values() for point in points)]):
        return Capture(next_ranks, "one of each part, and a witness at the last")

    cuts: dict[int, set[int]] = {a: {0} for a in others}
    probes: list[Point] = []
    for part, points in witnesses.items():
        if all(at(point) == at(part) for point in points):
            continue
        for a in others:
            edges, unknown = segments(lambda i, part=part, a=a: at(_moved(part, {a: i})), sizes[a])  # type: ignore[misc]
            cuts[a].update(edges)
            probes.extend(_moved(part, {a: i}) for i in unknown)
    if next_ranks := missing(probes):
        return Capture(next_ranks, "where a witness differs, the places at which the graph changes")
    starts = tuple(tuple(sorted(cuts.get(a, range(size)))) for a, size in enumerate(sizes))
    cells: list[Point] = list(product(*starts)) if prod(len(s) for s in starts) <= 4 * limit else []
    # Parts in the middle of a pipeline resemble each other: if two of them do not vary where the ends do, the
    # others are taken not to either, and their other cells are not captured.
    inner = {part for part in (parts[1 % len(parts)], parts[len(parts) // 2]) if part not in witnesses}

    def part_of(cell: Point) -> Point:
        return _moved(origin, {a: cell[a] for a in varied})

    if next_ranks := missing(
        [cell for cell in cells if part_of(cell) in inner or part_of(cell) in witnesses]
    ):
        return Capture(next_ranks, "one of each segment, at the ends and inside")
    if any(at(cell) != at(part_of(cell)) for cell in cells if part_of(cell) in inner) and (
        next_ranks := missing(cells)
    ):
        return Capture(next_ranks, "one of each segment of the parts inside")
    return verify(observation, CheckedCells(starts))


POLICIES: Mapping[str, Callable[[Observation], Decision]] = {
    "auto": search,
    "all": partial(chosen, ranks="all"),
    "chosen": chosen,
}


def name_of(ranks: str) -> str:
    """The policy in `POLICIES` that `decide` follows for what the user wants captured."""
    return ranks if ranks in ("auto", "all") else "chosen"


def parse_ranks(text: str, world_size: int, option: str = "ranks") -> list[int]:
    """The ranks that an option names: ``"all"``, or numbers and ranges as in ``"0,17,120-127"``.

    Raises `UserError` for anything else, and for a rank outside the world.
    """
    if text.strip() == "all":
        return list(range(world_size))
    ranks: set[int] = set()
    for part in text.split(","):
        first, dash, last = part.strip().partition("-")
        if not first.isdecimal() or (dash and not last.isdecimal()):
            raise UserError(
                f"`{option}`: {part.strip()!r} is not a rank; accepted are"
                f"{' auto,' if option == 'ranks' else ''} all, or 0,17,120-127"
            )
        low, high = int(first), int(last or first)
        if high >= world_size or low > high:
            raise UserError(
                f"`{option}`: {part.strip()!r} lies outside the world of ranks 0 to {world_size - 1}"
            )
        ranks.update(range(low, high + 1))
    return sorted(ranks)


def segments(answer_of: Callable[[int], int | None], size: int) -> tuple[list[int], list[int]]:
    """Where a line of ranks changes: (starts of the segments so far, indices that must be known next).

    ``known(i)`` is the class of index i, or None. Looks at both ends and the middle, then between neighbours
    that differ, until they are adjacent. A change that ends where it began, between two equal samples, is not
    seen.
    """
    samples = {0, size // 2, size - 1}
    while True:
        unknown = sorted(i for i in samples if answer_of(i) is None)
        if unknown:
            return [0], unknown
        ordered = sorted(samples)
        between = {
            _between(i, j, size, samples)
            for i, j in pairwise(ordered)
            if j - i > 1 and answer_of(i) != answer_of(j)
        }
        if not between:
            return [0] + [j for i, j in pairwise(ordered) if answer_of(i) != answer_of(j)], []
        samples |= between


def _between(i: int, j: int, size: int, samples: set[int]) -> int:
    if i == 0 and 1 not in samples:
        return 1
    if j == size - 1 and size - 2 not in samples:
        return size - 2
    return (i + j) // 2


def _moved(point: Point, places: dict[int, int]) -> Point:
    return tuple(places.get(a, i) for a, i in enumerate(point))
