"""How large the memories should be: capacities swept while the array stays (Interstellar, section 6.3).

The size of each level that has a table of energies goes through powers of two within its table, each layer is
mapped anew for each combination, and the one of least energy counts that is not slower than the base.
"""

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from itertools import product

from windtunnel.base.errors import UserError
from windtunnel.silicon.mapper.model import Accelerator, Layer, Level
from windtunnel.silicon.mapper.policy import Decision, Observation

SLOWER = 1.001  # of the base's cycles: what counts as the same throughput


@dataclass(frozen=True)
class DesignPoint:
    """An accelerator with what all layers together take, joules and cycles."""

    accelerator: Accelerator
    energy: float
    cycles: float


@dataclass(frozen=True)
class Allocation:
    """``points``: all that were tried, ``best`` of which takes least energy at the base's throughput."""

    base: DesignPoint
    best: DesignPoint
    points: tuple[DesignPoint, ...]

    @property
    def gain(self) -> float:
        return self.base.energy / self.best.energy


def sizes(accelerator: Accelerator) -> Iterator[Accelerator]:
    """The accelerator with each combination of capacities: powers of two within its tables of energies."""
    ways: list[list[Level]] = []
    for level in accelerator.levels:
        ends = [math.log2(level.scale[end][0]) for end in (0, -1)] if level.scale else []
        steps = range(math.ceil(ends[0]), math.floor(ends[1]) + 1) if ends else ()
        ways.append([level.sized(2.0**n) for n in steps] or [level])
    if not any(level.scale for level in accelerator.levels):
        raise UserError(
            f"{accelerator.name}: no level has a table of energies, accepted is one with rf or sram"
        )
    for levels in product(*ways):
        yield replace(accelerator, levels=levels)


def allocate(
    layers: Sequence[Layer],
    accelerator: Accelerator,
    dataflow: str,
    decide: Callable[[Observation], Decision],
) -> Allocation:
    """The best sizes for all ``layers`` together; ``decide`` maps each. Raises `UserError`: a layer does not
    fit the base, or no level can be resized."""

    def point(accelerator: Accelerator) -> DesignPoint:
        decisions = [decide(Observation(layer, accelerator, dataflow)) for layer in layers]
        return DesignPoint(
            accelerator,
            math.fsum(each.energy for each in decisions),
            math.fsum(each.cycles for each in decisions),
        )

    base, points = point(accelerator), []
    for size in sizes(accelerator):
        with suppress(UserError):  # a layer has no tile that fits these sizes
            points.append(point(size))
    quick = [point for point in (base, *points) if point.cycles <= SLOWER * base.cycles]
    return Allocation(base, min(quick, key=lambda point: point.energy), tuple(points))
