"""Which loops are spread over the PEs of the array: the taxonomy of dataflows (Interstellar, section 3).

A dataflow is named by the loops along the array's axes: C|K (TPU), FY|OY (row stationary, Eyeriss), OX|OY.
A loop that does not fill its axis leaves room for a second one, written C+FX|K (replication).
"""

import math
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import combinations, product

from windtunnel.base.errors import UserError
from windtunnel.silicon.mapper.model import DIMS, LETTERS, Layer

Along = tuple[tuple[int, int], ...]  # the loops along one axis: number in DIMS, PEs


@dataclass(frozen=True)
class Unrolling:
    """``utilisation``: of all PEs by the layer's own operations, 0 to 1."""

    dataflow: str
    unroll: tuple[int, ...]
    utilisation: float


def unrollings(layer: Layer, array: tuple[int, int], dataflow: str = "") -> list[Unrolling]:
    """Ways to unroll a layer, those that use most PEs first, one for each set of factors.

    ``dataflow``: only that one, such as C|K, replicated in whatever way; its axes may change places.
    """
    by_sizes: dict[tuple[int, ...], Unrolling] = {}
    axes = set(dataflow.split("|")) if dataflow else set()
    if dataflow and (len(axes) != 2 or not axes <= set(LETTERS)):
        words = f"accepted are two of {', '.join(LETTERS)}, such as C|K"
        raise UserError(f"`dataflow`: {dataflow!r} is not understood, {words}")
    for first, second in product(_along(layer, array[0]), _along(layer, array[1])):
        if {dim for dim, _ in first} & {dim for dim, _ in second}:
            continue
        if dataflow and axes != {LETTERS[axis[0][0]] for axis in (first, second) if axis}:
            continue
        unroll = [1] * len(DIMS)
        for dim, pes in (*first, *second):
            unroll[dim] = pes
        steps = math.prod(math.ceil(b / along) for b, along in zip(layer.bounds, unroll, strict=True))
        utilisation = math.prod(layer.bounds) / steps / math.prod(array)
        name = "|".join("+".join(LETTERS[dim] for dim, _ in axis) or "-" for axis in (first, second))
        by_sizes.setdefault(tuple(unroll), Unrolling(name, tuple(unroll), utilisation))
    return sorted(by_sizes.values(), key=lambda unrolling: -unrolling.utilisation)


def _along(layer: Layer, pes: int) -> Iterator[Along]:
    """Nothing, one loop, or two where the first leaves room. A loop that is longer than the axis is cut into
    as few parts as need be, and these are made as equal as can be."""
    yield ()
    sizes = {dim: _share(layer.bounds[dim], pes) for dim in range(len(DIMS)) if layer.bounds[dim] > 1}
    for dim, along in sizes.items():
        yield ((dim, along),)
    for size, other in combinations(sizes, 2):
        for first, second in ((size, other), (other, size)):
            rest = _share(layer.bounds[second], pes // sizes[first])
            if rest > 1:
                yield ((first, sizes[first]), (second, rest))


def _share(bound: int, pes: int) -> int:
    return math.ceil(bound / math.ceil(bound / pes)) if pes else 1
