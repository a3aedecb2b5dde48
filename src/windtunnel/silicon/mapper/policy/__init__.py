"""How a layer is computed on an accelerator: which loops are unrolled over its PEs, how the others are
blocked for each memory, and in which order they run (Interstellar, ASPLOS 2020, arXiv:1809.04070).

`counts` says what a mapping moves, `search` finds the best one of an unrolling, `unroll` which of these there
are, `schedule` writes a mapping down in Halide's words, `allocation` sizes the memories.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace

from windtunnel.base.errors import UserError
from windtunnel.silicon.mapper.model import LETTERS, Accelerator, Layer, Traffic
from windtunnel.silicon.mapper.model import Mapping as Nest
from windtunnel.silicon.mapper.policy.counts import count, cycles, joules
from windtunnel.silicon.mapper.policy.search import least_energy
from windtunnel.silicon.mapper.policy.unroll import Unrolling, known, unrollings


@dataclass(frozen=True)
class Limits:
    """``dataflow``: the only one to try, such as C|K; all by default. ``utilisation``: of the PEs, at least
    that share of what the best unrolling uses. ``unrollings``: how many to try at most, those that use most
    PEs first. ``width``: of the beam, where there are more than three levels."""

    dataflow: str = ""
    utilisation: float = 0.75
    unrollings: int = 64
    width: int = 256


@dataclass(frozen=True)
class Observation:
    layer: Layer
    accelerator: Accelerator
    limits: Limits = field(default_factory=Limits)


@dataclass(frozen=True)
class Decision:
    """``energy``: joules and ``cycles`` of the whole layer; ``utilisation``: of all PEs by the layer's own
    operations while computing. ``exact``: no mapping of the kind that was searched (each tile divides the one
    above, bounds padded as `search.padded` does) and of these unrollings costs less."""

    mapping: Nest
    traffic: tuple[Traffic, ...]
    energy: float
    cycles: float
    utilisation: float
    exact: bool


def decide(observation: Observation) -> Decision:
    """The mapping that takes the least energy, of these the one with the fewest cycles."""
    best: Decision | None = None
    exact = True
    for way in _ways(observation):
        beat = math.inf if best is None else best.energy / observation.layer.groups
        made, sure = _map(observation, way, beat)
        exact &= sure
        if made is not None and (best is None or (made.energy, made.cycles) < (best.energy, best.cycles)):
            best = made
    return _answer(observation, best, exact)


def fastest(observation: Observation) -> Decision:
    """Of the least-energy mapping of each unrolling the one that takes the fewest cycles."""
    results = [_map(observation, way, math.inf) for way in _ways(observation)]
    best = min((made for made, _ in results if made), key=lambda one: (one.cycles, one.energy), default=None)
    return _answer(observation, best, all(sure for _, sure in results))


POLICIES: Mapping[str, Callable[[Observation], Decision]] = {"energy": decide, "fastest": fastest}


def _ways(observation: Observation) -> list[Unrolling]:
    """The unrollings to try."""
    limits = observation.limits
    if limits.dataflow and not known(limits.dataflow):
        raise UserError(
            f"`dataflow`: {limits.dataflow!r} is not understood, accepted are two of {', '.join(LETTERS)}, "
            "such as C|K"
        )
    ways = unrollings(observation.layer, observation.accelerator.array, limits.dataflow)
    enough = limits.utilisation * ways[0].utilisation if ways else 0.0
    return [one for one in ways if one.utilisation >= enough][: limits.unrollings]


def _map(observation: Observation, way: Unrolling, beat: float) -> tuple[Decision | None, bool]:
    """The least-energy mapping of one unrolling, None where none costs less than ``beat`` or none fits; and
    whether that is sure."""
    layer, accelerator = observation.layer, observation.accelerator
    found = least_energy(layer, accelerator, way.dataflow, way.unroll, beat, observation.limits.width)
    if found.mapping is None:
        return None, found.exact
    moved = count(layer, accelerator, found.mapping)
    energy = joules(layer, accelerator, found.mapping, moved)
    used = layer.macs / (found.mapping.steps * layer.groups * math.prod(accelerator.array))
    taken = cycles(layer, accelerator, found.mapping, moved)
    return Decision(found.mapping, moved, energy, taken, used, found.exact), found.exact


def _answer(observation: Observation, best: Decision | None, exact: bool) -> Decision:
    if best is None:
        layer, accelerator, limits = observation.layer, observation.accelerator, observation.limits
        sizes = ", ".join(f"{one.name} {one.capacity:,.0f} B" for one in accelerator.levels if one.capacity)
        raise UserError(
            f"layer {layer.name} has no mapping{' as ' * bool(limits.dataflow)}{limits.dataflow} that fits "
            f"{accelerator.name} ({sizes}), accepted are levels that hold a tile of it"
        )
    return replace(best, exact=exact)
