"""What serving variants asks: who answers a query, in which batch; in which state a variant is; how many
replicas and hosts there are."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import partial

from windtunnel.serving.variants.policy.scale import (
    IDLE,
    PAUSE,
    Fleet,
    Load,
    Measured,
    Now,
    Resize,
    Scaling,
    resize,
    scale,
    state_of,
)
from windtunnel.serving.variants.policy.select import (
    Batch,
    Chosen,
    QueryRefused,
    VariantQuery,
    Waiting,
    gather,
    select,
)

__all__ = ["POLICIES", "Decision", "Observation", "decide"]

Observation = VariantQuery | Waiting | Measured | Load | Fleet
Decision = Chosen | QueryRefused | Batch | Now | Scaling | Resize


@dataclass(frozen=True)
class Style:
    """``pinned``: one variant an architecture; ``own``: hosts of one architecture each; ``cheapest``: see
    `select`; ``upgrade``: other variants may take over; ``scales``: replicas and hosts come and go."""

    pinned: bool = False
    own: bool = False
    cheapest: bool = False
    upgrade: bool = True
    scales: bool = True


def _decide(style: Style, observation: Observation) -> Decision:
    match observation:
        case VariantQuery():
            if style.pinned and observation.pinned:
                only = tuple(
                    candidate
                    for candidate in observation.candidates
                    if candidate.variant.name == observation.pinned
                )
                observation = replace(observation, candidates=only, recent=())
            return select(observation, own=style.own, cheapest=style.cheapest)
        case Waiting():
            return gather(observation)
        case Measured():
            return state_of(observation)
        case Load():
            if not style.scales:
                return Scaling((), tuple(0 for _ in observation.running), False, "nothing changes")
            return scale(observation, upgrade=style.upgrade)
        case Fleet():
            if not style.scales:
                return Resize(reason="nothing changes")
            return resize(observation, last=IDLE // 2 if style.cheapest else PAUSE)


STYLES = {
    "cheapest": Style(cheapest=True),
    "infaas": Style(),
    "no-upgrade": Style(upgrade=False),
    "shared": Style(pinned=True, upgrade=False),
    "individual": Style(pinned=True, own=True, upgrade=False),
    "static": Style(pinned=True, own=True, upgrade=False, scales=False),
}
"""``cheapest`` is INFaaS but for three rules: it takes what costs least an item, not the slowest; it loads
only where nothing that could answer is loaded, and what costs least; the last host of its hardware stays
longer. The baselines: ``no-upgrade`` lacks one rule of INFaaS's; ``shared`` has one variant an architecture,
``individual`` on hosts of its own, too (as endpoints that scale by replicas do); ``static`` has a fixed
number of them."""
POLICIES: Mapping[str, Callable[[Observation], Decision]] = {
    name: partial(_decide, style) for name, style in STYLES.items()
}
decide = POLICIES["cheapest"]
