"""How a layer is computed on an accelerator: which loops are unrolled over its PEs, how the others are
blocked for each memory, and in which order they run (Interstellar, ASPLOS 2020, arXiv:1809.04070).

`counts` says what a mapping moves, `search` finds the best one of an unrolling, `unroll` which of these there
are, `schedule` writes a mapping down in Halide's words, `allocation` sizes the memories.
"""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace

from windtunnel.base.errors import UserError
from windtunnel.silicon.mapper.model import Accelerator, Layer, LevelTraffic
from windtunnel.silicon.mapper.model import Mapping as Nest
from windtunnel.silicon.mapper.policy.counts import count, cycles, joules
from windtunnel.silicon.mapper.policy.search import least_energy
from windtunnel.silicon.mapper.policy.unroll import unrollings

LEAST, MOST = 0.75, 64
"""Of the PEs that the best unrolling uses, what one must use to be tried; how many are, the best first."""


@dataclass(frozen=True)
class Observation:
    """``dataflow``: the only one to try, such as C|K; all where it is empty."""

    layer: Layer
    accelerator: Accelerator
    dataflow: str = ""


@dataclass(frozen=True)
class Decision:
    """``energy``: joules and ``cycles`` of the whole layer; ``utilisation``: of all PEs by the layer's own
    operations while computing. ``exact``: no mapping of the kind that was searched (each tile divides the one
    above, bounds padded as `search.padded` does) and of the unrollings that were tried costs less."""

    mapping: Nest
    traffic: tuple[LevelTraffic, ...]
    energy: float
    cycles: float
    utilisation: float
    exact: bool


def decide(observation: Observation) -> Decision:
    """The mapping that takes the least energy, of these the one with the fewest cycles."""
    return _best(observation, lambda decision: (decision.energy, decision.cycles), cut=True)


def fastest(observation: Observation) -> Decision:
    """Of the least-energy mapping of each unrolling the one that takes the fewest cycles."""
    return _best(observation, lambda decision: (decision.cycles, decision.energy), cut=False)


POLICIES: Mapping[str, Callable[[Observation], Decision]] = {"energy": decide, "fastest": fastest}


def _best(observation: Observation, key: Callable[[Decision], tuple[float, float]], cut: bool) -> Decision:
    """``cut``: a mapping that takes more energy than one that is known is of no use."""
    layer, accelerator = observation.layer, observation.accelerator
    ways = unrollings(layer, accelerator.array, observation.dataflow)
    ways = [way for way in ways if way.utilisation >= LEAST * ways[0].utilisation]
    best: Decision | None = None
    exact = True
    for way in ways[:MOST]:
        beat = best.energy / layer.groups if best and cut else math.inf
        mapping, _, sure = least_energy(layer, accelerator, way.dataflow, way.unroll, beat)
        exact &= sure
        if mapping is None:
            continue
        moved = count(layer, accelerator, mapping)
        costs = joules(layer, accelerator, mapping, moved), cycles(layer, accelerator, mapping, moved)
        used = layer.macs / (mapping.steps * layer.groups * math.prod(accelerator.array))
        decision = Decision(mapping, moved, *costs, used, exact)
        best = min(best or decision, decision, key=key)
    if best is None:
        sizes = ", ".join(
            f"{level.name} {level.capacity:,.0f} B" for level in accelerator.levels if level.capacity
        )
        what = f"layer {layer.name} has no mapping {observation.dataflow}".rstrip()
        raise UserError(f"{what} that fits {accelerator.name} ({sizes}), accepted is more room for its tiles")
    return replace(best, exact=exact)
