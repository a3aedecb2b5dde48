"""Who may send how fast: rates from weights, and what others leave, given again.

Every entity has a rate of its own: the one that it is promised, or its weight's part of what the promised
ones leave. These sum to at most 98.5 % of the line, since at 100 % the physical queue still wanders. A rate
of its own is never taken away: it is there with the first packet. What entities leave of theirs is lent to
those that are held back, by weight (max-min, with measured demands), until the next decision; a lent rate
that is not lent anew ends by itself.

Source: Wu et al., SIGCOMM 2023, has rates from weights over active entities; lending is ours, since the gap
alone leaves an idle neighbour's rate unused. `gap` has what becomes of a packet.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

SHARE = 0.985
"""Of the line, the most that rates may sum to."""
HELD = 0.2
"""Seconds after a drop or mark in which an entity counts as held back: a sender that has just halved its
window would have more."""
HEADROOM = 1.25
"""Of what an entity sent it is left so much: a sender that grows must be seen to."""
IDLE = 0.01
"""Of its own rate; who sends less is lent nothing."""


@dataclass(frozen=True)
class SharingTenant:
    """``rate``: bytes/s that it is promised, None: by ``weight``. ``offered``: bytes/s that it has sent since
    the last decision, dropped ones among them. ``since_trouble``: seconds since it was last dropped or
    marked; None: not in the time that was looked at."""

    name: str
    weight: float = 1.0
    rate: float | None = None
    offered: float = 0.0
    since_trouble: float | None = None


@dataclass(frozen=True)
class Observation:
    """``line``: bytes/s."""

    line: float
    entities: tuple[SharingTenant, ...]


@dataclass(frozen=True)
class Decision:
    """Bytes/s of each entity: its own, and what it may have until the next decision, which is never less."""

    own: tuple[float, ...]
    lent: tuple[float, ...]


def promised(observation: Observation) -> tuple[float, ...]:
    """Every entity's own rate.

    Raises:
        ValueError: more is promised than there is; says how much.
    """
    whole = SHARE * observation.line
    left = whole - sum(entity.rate for entity in observation.entities if entity.rate is not None)
    weights = sum(entity.weight for entity in observation.entities if entity.rate is None)
    if left < -1e-9 * whole or (weights and left <= 1e-9 * whole):
        sums = whole - left
        rest = " and leave nothing to those with weights" if weights else ""
        raise ValueError(f"rates sum to {sums:.6g} bytes/s{rest}; accepted is at most {whole:.6g}")
    return tuple(
        left * entity.weight / weights if entity.rate is None else entity.rate
        for entity in observation.entities
    )


def fixed(observation: Observation) -> Decision:
    """Each its own rate, whatever the others do."""
    own = promised(observation)
    return Decision(own, own)


def decide(observation: Observation) -> Decision:
    """Each its own rate, and what others leave of theirs."""
    own = promised(observation)
    demands = [_demand(entity, rate) for entity, rate in zip(observation.entities, own, strict=True)]
    filled = fill(SHARE * observation.line, own, demands)
    spare = SHARE * observation.line - sum(filled)
    active = sum(rate for rate, demand in zip(own, demands, strict=True) if demand > 0)
    # what nobody is seen to want goes to whoever sends: he may be growing
    shares = (
        part + (spare * rate / active if demand > 0 else 0.0)
        for part, rate, demand in zip(filled, own, demands, strict=True)
    )
    return Decision(own, tuple(max(pair) for pair in zip(own, shares, strict=True)))


def _demand(entity: SharingTenant, own: float) -> float:
    if entity.offered <= IDLE * own:
        return 0.0
    backlogged = entity.since_trouble is not None and entity.since_trouble < HELD and entity.offered > own / 4
    return float("inf") if backlogged else HEADROOM * entity.offered


def fill(whole: float, weights: tuple[float, ...], demands: list[float]) -> list[float]:
    """Weighted max-min: to each the least of its demand and its weight's part of what is left of
    ``whole``."""
    parts = [0.0] * len(demands)
    rest = sum(weight for weight, demand in zip(weights, demands, strict=True) if demand > 0)
    for place in sorted(range(len(demands)), key=lambda place: demands[place] / weights[place]):
        if demands[place] > 0:
            parts[place] = min(demands[place], whole * weights[place] / rest)
            whole -= parts[place]
            rest -= weights[place]
    return parts


POLICIES: Mapping[str, Callable[[Observation], Decision]] = {"lend": decide, "fixed": fixed}
"""``fixed`` is the paper's: a rate that its entity does not use is used by nobody."""
