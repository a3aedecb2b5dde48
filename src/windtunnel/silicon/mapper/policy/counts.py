"""Exact counts of what a mapping moves, and what that costs in joules and cycles.

For a level's tile, the loops above it are written from inner to outer, those of bound 1 left out. The longest
run of innermost ones that an operand does not depend on, across levels too, leaves its tile where it is. V is
the product of the bounds that are left, N that of those among them that it depends on:

* inputs and weights are read V times a tile;
* outputs are written V times and, as partial sums, read back V - N times.

A strided tile of inputs counts the words that are used, not the box around them. Interstellar's published
tool approximates here (no halo, no reuse across levels).
"""

import math
from collections.abc import Iterable, Sequence

from windtunnel.silicon.mapper.model import (
    DIMS,
    IRRELEVANT,
    OPERANDS,
    Accelerator,
    Layer,
    LevelTraffic,
    Mapping,
)

MAC_ACCESSES = 4  # of the innermost level by a multiply and add: three words read, the sum written


def tile_words(operand: str, extents: Sequence[int], stride: int) -> int:
    """Distinct words of ``operand`` in a tile of these extents (by `DIMS`)."""
    fx, fy, ox, oy, ic, oc, on = extents
    if operand == "W":
        return fx * fy * ic * oc
    if operand == "O":
        return ox * oy * oc * on
    return ((ox - 1) * min(stride, fx) + fx) * ((oy - 1) * min(stride, fy) + fy) * ic * on


def visits(operand: str, loops: Iterable[tuple[int, int]]) -> tuple[int, int]:
    """V and N of the loops above a tile, inner to outer."""
    irrelevant = IRRELEVANT[OPERANDS.index(operand)]
    total, distinct, still = 1, 1, True
    for dim, bound in loops:
        still = still and (bound == 1 or dim in irrelevant)
        total *= 1 if still else bound
        distinct *= 1 if dim in irrelevant else bound
    return total, distinct


def traffic_of(layer: Layer, accelerator: Accelerator, mapping: Mapping, operand: str) -> list[LevelTraffic]:
    """What one operand moves between each level that holds it and the next."""
    traffics = []
    extents = [1] * len(DIMS)
    for below in range(len(accelerator.levels) - 1):
        for dim, bound in mapping.loops[below]:
            extents[dim] *= bound
        if operand not in accelerator.levels[below].holds:
            continue
        above = accelerator.above(below, operand)
        spread = [a * b for a, b in zip(extents, mapping.unroll, strict=True)]
        whole = tile_words(operand, spread, layer.stride)
        copies = mapping.pes * tile_words(operand, extents, layer.stride)
        source = copies if above < accelerator.inner else whole
        target = copies if below < accelerator.inner else whole
        total, distinct = visits(operand, (loop for level in mapping.loops[below + 1 :] for loop in level))
        again = total - distinct if operand == "O" else total
        written = total if operand == "O" else 0
        words = again * source, written * source, (again + written) * target
        traffics.append(LevelTraffic(operand, below, above, *(layer.groups * word for word in words)))
    return traffics


def count(layer: Layer, accelerator: Accelerator, mapping: Mapping) -> tuple[LevelTraffic, ...]:
    """What all operands move."""
    return tuple(
        traffic for operand in OPERANDS for traffic in traffic_of(layer, accelerator, mapping, operand)
    )


def joules(layer: Layer, accelerator: Accelerator, mapping: Mapping, moved: Iterable[LevelTraffic]) -> float:
    """Energy of all accesses, hops and multiplications. Loops that were padded compute as well."""
    levels, inner = accelerator.levels, accelerator.inner
    total = mapping.steps * mapping.pes * layer.groups
    energy = total * (accelerator.mac + MAC_ACCESSES * levels[0].energy)
    for traffic in moved:
        hop = accelerator.hop if traffic.below < inner <= traffic.above else 0.0
        energy += (traffic.read + traffic.written) * levels[traffic.above].energy
        energy += traffic.moved * (levels[traffic.below].energy + hop)
    return energy


def cycles(layer: Layer, accelerator: Accelerator, mapping: Mapping, moved: Iterable[LevelTraffic]) -> float:
    """Computing, or the level that takes longest over its words where moving is hidden; else the sum."""
    words = [0] * len(accelerator.levels)
    for traffic in moved:
        words[traffic.above] += traffic.read + traffic.written
        words[traffic.below] += traffic.moved
    times = [float(mapping.steps * layer.groups)]
    for level, amount in zip(accelerator.levels, words, strict=True):
        if level.bandwidth is not None:
            rate = level.bandwidth * (mapping.pes if level.per_pe else 1)
            times.append(amount * accelerator.word / rate * accelerator.clock)
    return max(times) if accelerator.double_buffered else math.fsum(times)
