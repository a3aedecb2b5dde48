"""What gradient synchronisation asks: which plan a profile calls for."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace

from windtunnel.training.gradsync.model import NONE, CodecCost, SyncPlan, SyncProfile
from windtunnel.training.gradsync.policy.plan import make_plan

__all__ = ["POLICIES", "Decision", "Observation", "PlanRequest", "decide"]

NOISE = 0.05
"""Of the steps to a loss: a codec that takes no more than so many more costs training nothing."""
WORTH = 0.01
"""Of the seconds to a loss: a codec that needs more steps must gain that much."""


@dataclass(frozen=True)
class PlanRequest:
    """A plan for ``profile``. ``codecs``: that may be used, all of the profile's where there are none.
    ``steps``: that training needs to a loss with each, over those that it needs without. ``lossy``: those
    that need more are allowed, too."""

    profile: SyncProfile
    codecs: tuple[str, ...] = ()
    seed: int = 0
    steps: dict[str, float] = field(default_factory=dict)
    lossy: bool = False


Observation = PlanRequest
Decision = SyncPlan


def steps_with(cost: CodecCost, steps: Mapping[str, float]) -> float:
    """Steps to a loss with a codec, over those without: 1 within `NOISE`, infinite where nobody measured."""
    measured = steps.get(cost.codec, math.inf)
    return 1.0 if measured <= 1 + NOISE else measured


def usable(request: PlanRequest) -> dict[str, float]:
    """The codecs of the profile that may be used at all, with their `steps_with`."""
    priced = {cost.codec: steps_with(cost, request.steps) for cost in request.profile.codecs}
    return {
        codec: steps for codec, steps in priced.items() if steps <= 1 or (request.lossy and steps < math.inf)
    }


def decide(observation: Observation) -> Decision:
    """Of the plans that need no more steps than each codec does: the one that comes to a loss first. What
    needs more must gain by `WORTH`."""
    profile, codecs = observation.profile, observation.codecs
    prices = {codec: steps for codec, steps in usable(observation).items() if not codecs or codec in codecs}
    best = plan = None
    for limit in sorted({1.0, *prices.values()}):
        within = tuple(cost for cost in profile.codecs if prices.get(cost.codec, math.inf) <= limit)
        plan = make_plan(replace(profile, codecs=within), observation.seed, prices)
        if best is None or plan.forecasts[0].to_loss < best.forecasts[0].to_loss * (1 - WORTH):
            best = plan
    assert best is not None and plan is not None
    return replace(best, forecasts=(best.forecasts[0], *plan.forecasts[1:]))


def _nothing(observation: Observation) -> Decision:
    """As if there were no codecs."""
    return decide(replace(observation, profile=replace(observation.profile, codecs=()), codecs=()))


POLICIES: Mapping[str, Callable[[Observation], Decision]] = {"search": decide, NONE: _nothing}
