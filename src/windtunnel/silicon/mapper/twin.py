"""What mapped layers, and operators that only stream, take on the emulated accelerator.

Energy is counts times joules of a word; a layer lasts as long as its multiplications, or as the level that is
busiest with its words (`policy.counts`). An operator that is no loop nest (an activation, an optimiser)
streams its bytes once through all levels: it lasts as long as the slowest, and computes for nothing.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass

from windtunnel.silicon.mapper.model import Accelerator
from windtunnel.silicon.mapper.policy import Decision, Observation
from windtunnel.silicon.mapper.policy.counts import MAC_ACCESSES, count, cycles, joules


@dataclass(frozen=True)
class MappingCost:
    """``bytes``: read and written at each level, from the PE outwards."""

    seconds: float
    joules: float
    bytes: tuple[float, ...]

    def times(self, factor: float) -> MappingCost:
        """So many times, one after another."""
        return MappingCost(
            self.seconds * factor, self.joules * factor, tuple(count * factor for count in self.bytes)
        )


def total(costs: Iterable[MappingCost]) -> MappingCost:
    """One after another."""
    rows = [(cost.seconds, cost.joules, *cost.bytes) for cost in costs]
    seconds, joules_, *nbytes = map(math.fsum, zip(*rows, strict=True))
    return MappingCost(seconds, joules_, tuple(nbytes))


def price(observation: Observation, decision: Decision) -> MappingCost:
    """A layer as it was mapped, counted anew."""
    layer, accelerator, mapping = observation.layer, observation.accelerator, decision.mapping
    moved = count(layer, accelerator, mapping)
    words = [0.0] * len(accelerator.levels)
    words[0] = MAC_ACCESSES * mapping.steps * mapping.pes * layer.groups
    for traffic in moved:
        words[traffic.above] += traffic.read + traffic.written
        words[traffic.below] += traffic.moved
    seconds = cycles(layer, accelerator, mapping, moved) / accelerator.clock
    nbytes = tuple(accelerator.word * word for word in words)
    return MappingCost(seconds, joules(layer, accelerator, mapping, moved), nbytes)


def stream(accelerator: Accelerator, nbytes: float) -> MappingCost:
    """``nbytes`` between the outermost level and the PEs: each level in between is written and read."""
    last = len(accelerator.levels) - 1
    through = tuple(nbytes * (1 if place in (0, last) else 2) for place in range(last + 1))
    pes = math.prod(accelerator.array)
    seconds, energy = 0.0, nbytes / accelerator.word * accelerator.hop
    for level, amount in zip(accelerator.levels, through, strict=True):
        energy += amount / accelerator.word * level.energy
        if level.bandwidth is not None:
            seconds = max(seconds, amount / level.bandwidth / (pes if level.per_pe else 1))
    return MappingCost(seconds, energy, through)


def cost(observation: Observation, decision: Decision) -> dict[str, float]:
    """For ``windtunnel replay``: what a decision takes, and the bytes of the outermost level."""
    priced = price(observation, decision)
    return {"seconds": priced.seconds, "joules": priced.joules, "bytes of memory": priced.bytes[-1]}
