"""What a prefix cache asks: at which depths to copy the state, what to evict, whether to bring something
back.

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

from windtunnel.serving.prefixcache.policy.rules import RULES, Rules

__all__ = [
    "MANY", "POLICIES", "Alpha", "Candidate", "Decision", "Eviction", "Keep", "Lookup", "Observation",
    "Restore", "Return", "Trials", "Victim", "decide", "scores",
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

    rules: Rules
    unit: int
    prompt: int
    matched: int
    usable: int
    copies: int = MANY
    decoded: bool = True


@dataclass(frozen=True, slots=True)
class Keep:
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

    rules: Rules
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
class Return:
    """What lies in a lower tier would be used (or put there, to be used later): ``seconds`` to bring it back
    against ``recompute``."""

    seconds: float
    recompute: float


@dataclass(frozen=True, slots=True)
class Restore:
    restore: bool


@dataclass(frozen=True, slots=True)
class Trials:
    """FLOPs that each alpha would have saved, in the requests that were replayed."""

    alphas: tuple[float, ...]
    saved: tuple[float, ...]


@dataclass(frozen=True, slots=True)
class Alpha:
    alpha: float
    reason: str = field(default="", compare=False)


Observation = Lookup | Eviction | Return | Trials
Decision = Keep | Victim | Restore | Alpha


def decide(seen: Observation) -> Decision:
    """All rules of the cache."""
    match seen:
        case Lookup():
            return _keep(seen)
        case Eviction():
            return _victim(seen)
        case Return(seconds, recompute):
            return Restore(seconds < recompute)
        case Trials(alphas, saved):
            best = max(range(len(alphas)), key=lambda one: (saved[one], -alphas[one]))
            return Alpha(alphas[best], f"{saved[best]:.4g} FLOPs saved, {saved[0]:.4g} by recency alone")


def _keep(seen: Lookup) -> Keep:
    rules, found = seen.rules, set()
    block = max(1, rules.block // seen.unit)
    for point in rules.points:
        if point == "branch":
            found.add(seen.matched)
        elif point == "boundary":
            found.add((seen.prompt - 1) // block * block)
        elif point == "prompt":
            found.add(seen.prompt)
        elif point == "every":
            found.update(range((seen.usable // block + 1) * block, seen.prompt + 1, block))
    grid = max(1, rules.grid // seen.unit)
    depths = {depth // grid * grid for depth in found}
    end = 1 if "end" in rules.points else block if {"last", "every"} & set(rules.points) else 0
    kept = tuple(sorted(depth for depth in depths if depth > seen.usable))
    return Keep(kept[: max(0, seen.copies)], end if seen.decoded and seen.copies >= 0 else 0)


def _victim(seen: Eviction) -> Victim:
    """The lowest score goes; of equal ones the oldest, then the first that was made."""
    shown = seen.candidates
    used, worth, density = np.array([(one.used, one.worth, one.density) for one in shown]).T
    found = scores(seen, used, worth, density)
    best = min(range(len(shown)), key=lambda one: (found[one], used[one], shown[one].node))
    return Victim(shown[best].node)


def scores(seen: Eviction, used: Floats, worth: Floats, density: Floats) -> Floats:
    """Of candidates with these columns; ``seen`` without its own."""
    match seen.rules.order:
        case "seglen":
            return RECENCY_WEIGHT * _within(used, seen.used) + (1 - RECENCY_WEIGHT) * _within(
                worth, seen.worth
            )
        case "density" if density.any():
            return worth * density
        case "flops" if seen.alpha:
            oldest, newest = (1 / max(seen.now - one, SOON) for one in seen.used)
            recency = _within(1 / np.maximum(seen.now - used, SOON), (oldest, newest))
            return recency + seen.alpha * _within(worth, seen.worth)
        case _:
            return used


def _within(values: Floats, most: tuple[float, float]) -> Floats:
    return (values - most[0]) / (most[1] - most[0]) if most[1] > most[0] else np.zeros(len(values))


def _by(rules: Rules, seen: Observation) -> Decision:
    """As if the cache had these rules."""
    if isinstance(seen, Lookup):
        return decide(replace(seen, rules=rules))
    if isinstance(seen, Eviction):
        return decide(replace(seen, rules=rules, alpha=seen.alpha if rules.tuned else rules.alpha))
    return decide(seen)


POLICIES: Mapping[str, Callable[[Observation], Decision]] = {
    name: partial(_by, rules) for name, rules in RULES.items()
}
