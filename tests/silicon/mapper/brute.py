"""The truth that counts and searches are held against: loops run one by one, and every mapping tried."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from itertools import permutations, product

import numpy as np

from windtunnel.silicon.mapper.model import DIMS, OPERANDS, Accelerator, Layer, Level, LevelTraffic, Mapping
from windtunnel.silicon.mapper.policy.counts import count, joules, tile_words

USES = {"I": (0, 1, 2, 3, 4, 6), "W": (0, 1, 4, 5), "O": (2, 3, 5, 6)}
Loops = list[tuple[int, int, int]]
"""Number in `DIMS`, bound, and how far apart its turns are."""


def word(operand: str, point: Sequence[int], stride: int) -> tuple[int, ...]:
    """What one turn of all loops touches."""
    fx, fy, ox, oy, ic, oc, on = point
    here = {"I": (on, ic, stride * oy + fy, stride * ox + fx), "W": (oc, ic, fy, fx), "O": (on, oc, oy, ox)}
    return here[operand]


def corners(loops: Loops) -> Iterator[tuple[int, ...]]:
    """Where each turn of ``loops``, outer to inner, begins."""
    for turn in product(*(range(bound) for _, bound, _ in loops)):
        at = [0] * len(DIMS)
        for (dim, _, apart), index in zip(loops, turn, strict=True):
            at[dim] += apart * index
        yield tuple(at)


def simulate(layer: Layer, accelerator: Accelerator, mapping: Mapping) -> Iterator[LevelTraffic]:
    """What all operands of one group move: a tile is fetched whenever an index changes that the operand
    depends on; a tile of outputs is written back then, and read again if its words were written before."""
    reach = [1] * len(DIMS)
    placed: list[Loops] = []
    inner = accelerator.inner
    for level in (*mapping.loops[:inner], tuple(enumerate(mapping.unroll)), *mapping.loops[inner:]):
        placed.append([])
        for dim, bound in level:
            placed[-1].insert(0, (dim, bound, reach[dim]))
            reach[dim] *= bound
    array = [*corners(placed.pop(inner))]
    for operand, below in product(OPERANDS, range(len(accelerator.levels) - 1)):
        if operand not in accelerator.levels[below].holds:
            continue
        above = accelerator.above(below, operand)
        tile = [*corners([loop for level in reversed(placed[: below + 1]) for loop in level])]
        moves: list[tuple[int, int, bool]] = []
        last, written = None, set[tuple[int, ...]]()
        for begin in corners([loop for level in reversed(placed[below + 1 :]) for loop in level]):
            if (index := [begin[dim] for dim in USES[operand]]) == last:
                continue
            last = index
            each = [
                {word(operand, np.add(np.add(begin, pe), at).tolist(), layer.stride) for at in tile}
                for pe in array
            ]
            whole, copies = set.union(*each), sum(map(len, each))
            source = copies if above < inner else len(whole)
            moves.append((source, copies if below < inner else len(whole), whole <= written))
            written |= whole
        out = operand == "O"
        read = sum(source for source, _, again in moves if again or not out)
        back = sum(source for source, _, _ in moves) if out else 0
        moved = sum(target * (out + (again or not out)) for _, target, again in moves)
        yield LevelTraffic(operand, below, above, read, back, moved)


def random_case(rng: np.random.Generator) -> tuple[Layer, Accelerator, Mapping]:
    """A small nest on two to four levels: loops of bound 1, strides, any order, any unrolling, operands that
    pass levels by."""
    depth = int(rng.integers(2, 5))
    inner = int(rng.integers(1, depth))
    loops: list[list[tuple[int, int]]] = [[] for _ in range(depth)]
    unroll = [1] * len(DIMS)
    for dim in rng.permutation(np.repeat(range(len(DIMS)), 2)).tolist()[: int(rng.integers(4, 10))]:
        bound, place = int(rng.choice([1, 2, 2, 3])), int(rng.integers(0, depth + 1))
        if place == depth:
            unroll[dim] = min(unroll[dim] * bound, 3)
        elif dim not in [other for other, _ in loops[place]]:
            loops[place].insert(int(rng.integers(0, len(loops[place]) + 1)), (dim, bound))
    held = [OPERANDS] * inner + [
        tuple(o for o in OPERANDS if rng.random() < 0.7) for _ in range(depth - inner)
    ]
    held[-1] = OPERANDS
    levels = tuple(Level(f"L{n}", None, 1.0, None, n < inner, held[n]) for n in range(depth))
    mapping = Mapping("", tuple(unroll), tuple(map(tuple, loops)))
    bounds = tuple(
        u * math.prod(b for each in loops for d, b in each if d == dim) for dim, u in enumerate(unroll)
    )
    return (
        Layer("", bounds, int(rng.integers(1, 4))),
        Accelerator("", (9, 9), levels, 1, 1.0, 1.0, 0.5),
        mapping,
    )


def exhaustive(layer: Layer, accelerator: Accelerator, unroll: Sequence[int]) -> float:
    """Joules of the best of all tilings by divisors and all orders of loops; for tiny layers."""
    best, depth = math.inf, len(accelerator.levels)
    bounds = [math.ceil(bound / along) for bound, along in zip(layer.bounds, unroll, strict=True)]
    ways = [
        [each for each in product(range(1, bound + 1), repeat=depth) if math.prod(each) == bound]
        for bound in bounds
    ]
    for chosen in product(*ways):
        levels = [[(dim, each[n]) for dim, each in enumerate(chosen) if each[n] > 1] for n in range(depth)]
        if not _fits(layer, accelerator, unroll, chosen):
            continue
        for order in product(*(permutations(level) for level in levels[1:])):
            mapping = Mapping("", tuple(unroll), (tuple(levels[0]), *order))
            best = min(best, joules(layer, accelerator, mapping, count(layer, accelerator, mapping)))
    return best


def _fits(
    layer: Layer, accelerator: Accelerator, unroll: Sequence[int], chosen: Sequence[Sequence[int]]
) -> bool:
    for place, level in enumerate(accelerator.levels[:-1]):
        along = [1] * len(DIMS) if level.per_pe else unroll
        tile = [math.prod(each[: place + 1]) * a for each, a in zip(chosen, along, strict=True)]
        if sum(tile_words(operand, tile, layer.stride) for operand in level.holds) > accelerator.room(place):
            return False
    return True


def random_tiny(rng: np.random.Generator) -> tuple[Layer, Accelerator, tuple[int, ...]]:
    """A layer of three loops or so on three small levels, and an unrolling, for `exhaustive`."""
    bounds, unroll = [1] * len(DIMS), [1] * len(DIMS)
    for dim in rng.choice(len(DIMS), 3, replace=False).tolist():
        bounds[dim] = int(rng.choice([2, 3, 4]))
    if rng.random() < 0.5:
        unroll[int(rng.choice(np.flatnonzero(np.array(bounds) > 1)))] = 2
    holds = [OPERANDS, ("I", "O"), ("W",)][int(rng.integers(3))]
    levels = (
        Level("registers", float(rng.integers(3, 12)), 1.0, None, True),
        Level("buffer", float(rng.integers(6, 60)), float(rng.integers(1, 9)), 8.0, False, holds),
        Level("DRAM", None, 50.0, 4.0),
    )
    chip = Accelerator("tiny", (4, 4), levels, 1, 1.0, 0.5, 0.25, bool(rng.random() < 0.3))
    return Layer("tiny", tuple(bounds), int(rng.integers(1, 3))), chip, tuple(unroll)
