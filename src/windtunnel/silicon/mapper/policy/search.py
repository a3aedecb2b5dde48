"""The mapping of least energy for one unrolling: exact with three levels, a beam with more.

Levels are decided from the outside in: a tile of the next level, each of whose sides divides the one above,
and which operand stays in it. Since the loops that do not touch an operand are disjoint sets (`IRRELEVANT`),
only which of the three runs innermost in a level matters: three orders instead of 7!. What a level costs is
known as soon as its tile and all above it are, and the levels below cannot move fewer words than it does:
that is the bound by which branches are cut. A first, narrow beam gives the energy to beat.

A bound with a large prime factor has hardly any divisors, and is padded to the next number without.
"""

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from windtunnel.base.compiled import jit
from windtunnel.silicon.mapper.model import DIMS, IRRELEVANT, OPERANDS, Accelerator, Layer, Mapping
from windtunnel.silicon.mapper.policy.counts import MAC_ACCESSES

SMOOTH = 13  # the largest prime factor of a bound that is not padded
NARROW, WIDE, STATES = 32, 256, 1 << 18
"""States of the first beam, of that over more than three levels, and of an exact search at most."""
Array = NDArray[Any]


def padded(bound: int) -> int:
    """The least number from ``bound`` up whose prime factors are at most `SMOOTH`."""
    while True:
        rest = bound
        for prime in (2, 3, 5, 7, 11, SMOOTH):
            while rest % prime == 0:
                rest //= prime
        if rest == 1:
            return bound
        bound += 1


def divisors(number: int) -> list[int]:
    """All of them, ascending."""
    small = [n for n in range(1, math.isqrt(number) + 1) if number % n == 0]
    return small + [number // n for n in reversed(small) if n * n != number]


def least_energy(
    layer: Layer, accelerator: Accelerator, dataflow: str, unroll: Sequence[int], beat: float = math.inf
) -> tuple[Mapping | None, float, bool]:
    """The mapping with this unrolling that costs least, if less than ``beat``: None where none does, or fits;
    its energy, joules of one group; and whether that is exact, since none was left out."""
    bounds, common, levels = _tables(layer, accelerator, unroll)
    steps = math.prod(bounds) * math.prod(unroll)
    base = steps * (accelerator.mac + MAC_ACCESSES * accelerator.levels[0].energy)
    best, _ = _run(bounds, common, levels, base, beat, NARROW, True)
    exact = len(levels) <= 2
    beat = best[1] if best else beat
    better, left_out = _run(bounds, common, levels, base, beat, STATES if exact else WIDE, not exact)
    best = better or best
    mapping = _mapping(dataflow, unroll, best[0]) if best else None
    return mapping, best[1] if best else math.inf, exact and not left_out


Tables = tuple[tuple[int, ...], tuple[Any, ...], list[tuple[Any, ...]]]


def _tables(layer: Layer, accelerator: Accelerator, unroll: Sequence[int]) -> Tables:
    """The bounds to block, and what the kernel reads: for all levels, and of each but the last."""
    bounds = tuple(padded(math.ceil(b / along)) for b, along in zip(layer.bounds, unroll, strict=True))
    lists = [divisors(bound) for bound in bounds]
    table = np.zeros((len(DIMS), max(map(len, lists)) + 1), np.int64)  # 0 ends a list
    for row, each in zip(table, lists, strict=True):
        row[: len(each)] = each
    levels, inner, pes = accelerator.levels, accelerator.inner, math.prod(unroll)
    rows: list[tuple[Any, ...]] = []
    rest_whole, rest_copies = np.zeros(3), np.zeros(3)
    for below, level in enumerate(levels[:-1]):
        whole, copies = np.zeros(3), np.zeros(3)
        for place, operand in enumerate(OPERANDS):
            if operand in level.holds:
                above = accelerator.above(below, operand)
                whole[place] = levels[above].energy * (above >= inner) + level.energy * (below >= inner)
                copies[place] = pes * (
                    levels[above].energy * (above < inner) + level.energy * (below < inner)
                )
                copies[place] += pes * accelerator.hop * (below < inner <= above)
        resident = np.array([operand in level.holds for operand in OPERANDS])
        rows.append(
            (resident, below < inner, whole, copies, rest_whole, rest_copies, accelerator.room(below))
        )
        rest_whole, rest_copies = rest_whole + whole + copies / pes, rest_copies + copies
    return bounds, (np.array(unroll, np.int64), layer.stride, table), rows


Choice = tuple[tuple[int, ...], int]  # a tile, and the operand that stays in it


def _run(
    bounds: tuple[int, ...], common: tuple[Any, ...], levels: list[tuple[Any, ...]], base: float, beat: float,
    width: int, replace: bool,
) -> tuple[tuple[list[Choice], float] | None, bool]:  # fmt: skip
    """Level by level, at most ``width`` states of each: the best, or as many as come first. The choices from
    the outside in, with what they cost; and whether states were left out."""
    tiles: Array = np.array([bounds], np.int64)
    run: Array = np.ones((1, 3))
    sums: Array = np.array([[1.0, 1.0, base]])
    trail, left_out = [], False
    for number, level in reversed([*enumerate(levels)]):
        size = width if number else 1
        following = np.zeros((size, len(DIMS)), np.int64), np.ones((size, 3)), np.zeros((size, 3))
        totals, parents, classes = np.zeros(size), np.zeros(size, np.int64), np.zeros(size, np.int64)
        arguments: list[Any] = [tiles, run, sums, *common, *level, beat, replace or not number, not number]
        arguments += [*following, totals, parents, classes]
        states, over = _expand(*arguments)
        if not states:
            return None, left_out
        left_out |= over and number > 0
        order = np.argsort(totals[:states], kind="stable")
        tiles, run, sums = (array[order] for array in following)
        trail.append((tiles, parents[order], classes[order]))
    choices, place = [], 0
    for tiles, parents, classes in reversed(trail):
        choices.append((tuple(tiles[place].tolist()), int(classes[place])))
        place = int(parents[place])
    return ([(bounds, 0), *reversed(choices)], float(sums[0, 2])), left_out


def _mapping(dataflow: str, unroll: Sequence[int], choices: Sequence[Choice]) -> Mapping:
    """The loops of each level: those that its stationary operand does not touch are innermost."""
    loops = []
    tiles = [tile for tile, _ in choices] + [(1,) * len(DIMS)]
    for place, inner in enumerate(tiles[1:]):
        stationary = choices[place + 1][1] if place + 1 < len(choices) else 0
        bounds = [outer // own for outer, own in zip(tiles[place], inner, strict=True)]
        order = sorted(range(len(DIMS)), key=lambda dim: dim not in IRRELEVANT[stationary])
        loops.append(tuple((dim, bounds[dim]) for dim in order if bounds[dim] > 1))
    return Mapping(dataflow, tuple(unroll), tuple(reversed(loops)))


@jit
def _words(tile: Array, unroll: Array, stride: int, spread: bool, out: Array) -> None:
    """Words of the three operands in a tile: over the array where ``spread``, else in one PE."""
    fx, fy, ox, oy, ic, oc, on = tile[0], tile[1], tile[2], tile[3], tile[4], tile[5], tile[6]
    if spread:
        fx, fy, ox, oy = fx * unroll[0], fy * unroll[1], ox * unroll[2], oy * unroll[3]
        ic, oc, on = ic * unroll[4], oc * unroll[5], on * unroll[6]
    out[0] = float((ox - 1) * min(stride, fx) + fx) * float((oy - 1) * min(stride, fy) + fy) * ic * on
    out[1] = float(fx * fy) * float(ic * oc)
    out[2] = float(ox * oy) * float(oc * on)


@jit
def _expand(
    tiles: Array, run: Array, sums: Array, unroll: Array, stride: int, table: Array, resident: Array,
    own: bool, whole: Array, copies: Array, rest_whole: Array, rest_copies: Array, room: float, beat: float,
    replace: bool, last: bool, next_tiles: Array, next_run: Array, next_sums: Array, totals: Array,
    parents: Array, classes: Array,
) -> tuple[int, bool]:  # fmt: skip
    """The tiles of a level below each state, with each of the three orders above them: those whose cost and
    bound are less than ``beat`` are written out. ``sums`` of a state: all loops above it, those of them that
    the output does not touch, and the cost. ``whole`` and ``copies``: joules of a word of the tile over the
    array, and of a PE's own (``own``: the level is of each PE); ``rest_…``: at least, in all levels below.
    ``replace``: where there is no room the worst goes, else the newest. ``last``: only the best counts."""
    number, left_out, worst = 0, False, -1
    size = len(totals)
    place, tile = np.zeros(7, np.int64), np.ones(7, np.int64)
    words, spread, group, reuse = np.zeros(3), np.zeros(3), np.zeros(3), np.zeros(3)
    for parent in range(len(tiles)):
        if sums[parent, 2] >= beat:
            continue
        place[:] = 0
        tile[:] = 1
        while True:
            _words(tile, unroll, stride, False, words)
            _words(tile, unroll, stride, True, spread)
            need = 0.0
            for operand in range(3):
                if resident[operand]:
                    need += words[operand] if own else spread[operand]
            fits = need <= room
            if fits:
                group[:] = 1.0
                for dim in range(7):
                    ratio = tiles[parent, dim] // tile[dim]
                    group[0 if dim == 5 else (1 if dim == 2 or dim == 3 or dim == 6 else 2)] *= ratio
                between = group[0] * group[1] * group[2]
                above, untouched = sums[parent, 0] * between, sums[parent, 1] * group[2]
                for still in range(3):
                    if group[still] == 1.0 and (between > 1.0 or still > 0):
                        continue  # another order is as good
                    cost, bound = sums[parent, 2], 0.0
                    for operand in range(3):
                        reuse[operand] = group[still] if operand == still else 1.0
                        if reuse[operand] == between:
                            reuse[operand] *= run[parent, operand]
                        times = above / reuse[operand]
                        if operand == 2:
                            times = 2.0 * times - above / untouched
                        cost += times * (whole[operand] * spread[operand] + copies[operand] * words[operand])
                        if own:
                            bound += times * rest_copies[operand] * words[operand]
                        else:
                            bound += times * rest_whole[operand] * spread[operand]
                    if cost + bound >= beat:
                        continue
                    at = number
                    if number == size:
                        left_out = True
                        if not replace:
                            continue
                        if worst < 0:
                            worst = int(np.argmax(totals))
                        if cost + bound >= totals[worst]:
                            continue
                        at, worst = worst, -1
                    else:
                        number += 1
                    next_tiles[at] = tile
                    next_run[at] = reuse
                    next_sums[at, 0], next_sums[at, 1], next_sums[at, 2] = above, untouched, cost
                    totals[at], parents[at], classes[at] = cost + bound, parent, still
                    if last:
                        beat = cost
            # The next tile. One that does not fit has none that fits where a side is longer still.
            dim = 0
            if not fits:
                while dim < 7 and place[dim] == 0:
                    dim += 1
                if dim == 7:
                    break  # not even the smallest
                place[dim], tile[dim] = 0, 1
                dim += 1
            while dim < 7:
                place[dim] += 1
                while table[dim, place[dim]] and tiles[parent, dim] % table[dim, place[dim]]:
                    place[dim] += 1
                if table[dim, place[dim]]:
                    tile[dim] = table[dim, place[dim]]
                    break
                place[dim], tile[dim] = 0, 1
                dim += 1
            if dim == 7:
                break
    return number, left_out
