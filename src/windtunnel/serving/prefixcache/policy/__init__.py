"""What a prefix cache asks: at which depths to copy the state, and what to evict.

Sources: Marconi (Pan et al., MLSys '25, arXiv 2411.19379), sections 4.1 and 4.2; SegLen (a branch of SGLang,
2026) as we read it; GreedyDual-Size-Frequency (Cherkasova, 1998).
`windtunnel.serving.prefixcache.policy.tree` asks, live as emulated. Depths are symbols; a symbol stands for
``unit`` tokens.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from functools import partial

import numpy as np
from numpy.typing import NDArray

from windtunnel.serving.prefixcache.policy.rules import RULES, CacheRules

__all__ = [
    "MANY", "POLICIES", "Alpha", "Candidate", "Decision", "Eviction", "Lookup", "Observation", "Retention",
    "Trials", "Victim", "decide", "scores",
]  # fmt: skip

Floats = NDArray[np.float64]
RECENCY_WEIGHT = 0.85
"""Of recency in SegLen's score; the rest is of the length of replay."""
SOON = 1e-3
"""Seconds: what was used less long ago counts as if it were as long."""


MANY = 1 << 30
"""More states than a prefill copies."""


@dataclass(frozen=True, slots=True)
class Lookup:
    """A prompt of ``prompt`` symbols, of which the cache knows ``matched``, and can use ``usable``.
    ``copies``: states that there is room for beside the request, which fills the room alone where that is
    below 0; ``decoded``: whether what is decoded may be kept."""

    rules: CacheRules
    unit: int
    prompt: int
    matched: int
    usable: int
    copies: int = MANY
    decoded: bool = True


@dataclass(frozen=True, slots=True)
class Retention:
    """At which depths beyond what is used this prefill copies the state, and whether one is kept after
    decoding: at the last multiple of ``end`` symbols (0: none, 1: at the very end)."""

    depths: tuple[int, ...]
    end: int


@dataclass(frozen=True, slots=True)
class Candidate:
    """What may go. ``used``: when it was used last, seconds. ``worth``: FLOPs that a hit saves a byte that is
    freed; by ``seglen`` tokens of replay. ``density``: hits a second to be expected, as `density` counts
    them."""

    node: int
    used: float
    worth: float
    density: float = 0.0


@dataclass(frozen=True, slots=True)
class Eviction:
    """Room is needed. ``used`` and ``worth``: least and most of all that may go, of which ``candidates`` are
    the oldest, the least worth, and those with the lowest scores."""

    rules: CacheRules
    alpha: float
    now: float
    used: tuple[float, float] = (0.0, 0.0)
    worth: tuple[float, float] = (0.0, 0.0)
    candidates: tuple[Candidate, ...] = ()


@dataclass(frozen=True, slots=True)
class Victim:
    """Which goes."""

    node: int


@dataclass(frozen=True, slots=True)
class Trials:
    """FLOPs that each alpha would have saved, in the requests that were replayed."""

    alphas: tuple[float, ...]
    saved: tuple[float, ...]


@dataclass(frozen=True, slots=True)
class Alpha:
    alpha: float
    reason: str = field(default="", compare=False)


Observation = Lookup | Eviction | Trials
Decision = Retention | Victim | Alpha


def decide(observation: Observation) -> Decision:
    """All rules of the cache."""
    match observation:
        case Lookup():
            return _keep(observation)
        case Eviction():
            return _victim(observation)
        case Trials(alphas, saved):
            best = max(range(len(alphas)), key=lambda index: (saved[index], -alphas[index]))
            return Alpha(alphas[best], f"{saved[best]:.4g} FLOPs saved, {saved[0]:.4g} by recency alone")


def _keep(lookup: Lookup) -> Retention:
    rules, places = lookup.rules, set()
    block = max(1, rules.block // lookup.unit)
    for point in rules.points:
        if point == "branch":
            places.add(lookup.matched)
        elif point == "boundary":
            places.add((lookup.prompt - 1) // block * block)
        elif point == "prompt":
            places.add(lookup.prompt)
        elif point == "every":
            places.update(range((lookup.usable // block + 1) * block, lookup.prompt + 1, block))
    grid = max(1, rules.grid // lookup.unit)
    depths = {depth // grid * grid for depth in places}
    end = 1 if "end" in rules.points else block if {"last", "every"} & set(rules.points) else 0
    beyond = tuple(sorted(depth for depth in depths if depth > lookup.usable))
    return Retention(beyond[: max(0, lookup.copies)], end if lookup.decoded and lookup.copies >= 0 else 0)


def _victim(eviction: Eviction) -> Victim:
    """The lowest score goes; of equal ones the oldest, then the first that was made."""
    candidates = eviction.candidates
    used, worth, density = np.array(
        [(candidate.used, candidate.worth, candidate.density) for candidate in candidates]
    ).T
    floats = scores(eviction, used, worth, density)
    best = min(range(len(candidates)), key=lambda index: (floats[index], used[index], candidates[index].node))
    return Victim(candidates[best].node)


def scores(eviction: Eviction, used: Floats, worth: Floats, density: Floats) -> Floats:
    """Of candidates with these columns; ``seen`` without its own."""
    match eviction.rules.order:
        case "seglen":
            return RECENCY_WEIGHT * _within(used, eviction.used) + (1 - RECENCY_WEIGHT) * _within(
                worth, eviction.worth
            )
        case "density" if density.any():
            return worth * density
        case "flops" if eviction.alpha:
            oldest, newest = (1 / max(eviction.now - moment, SOON) for moment in eviction.used)
            recency = _within(1 / np.maximum(eviction.now - used, SOON), (oldest, newest))
            return recency + eviction.alpha * _within(worth, eviction.worth)
        case _:
            return used


def _within(values: Floats, most: tuple[float, float]) -> Floats:
    return (values - most[0]) / (most[1] - most[0]) if most[1] > most[0] else np.zeros(len(values))


def _by(rules: CacheRules, observation: Observation) -> Decision:
    """As if the cache had these rules."""
    if isinstance(observation, Lookup):
        return decide(replace(observation, rules=rules))
    if isinstance(observation, Eviction):
        return decide(
            replace(observation, rules=rules, alpha=observation.alpha if rules.tuned else rules.alpha)
        )
    return decide(observation)


POLICIES: Mapping[str, Callable[[Observation], Decision]] = {
    name: partial(_by, rules) for name, rules in RULES.items()
}
