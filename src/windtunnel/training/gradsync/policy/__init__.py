"""What gradient synchronisation asks: which plan a profile calls for, and when to make another one."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace

from windtunnel.training.gradsync.model import NONE, CodecCost, Plan, Profile
from windtunnel.training.gradsync.policy.plan import make_plan

__all__ = ["POLICIES", "Decision", "Drift", "Keep", "Observation", "Renewed", "Wanted", "decide"]

NOISE = 0.05
"""Of the steps to a loss: a codec that takes no more than so many more costs training nothing."""
TOLERATED = 0.15
"""Of the predicted time, by which the measured one may differ before a plan is made anew."""
WORTH = 0.01
"""Of the time predicted of the plan that runs: another that gains less is no reason to change."""
PATIENCE = 5
"""Consecutive iterations that must differ: one slow step is no change of the network."""
PAUSE = 4 * PATIENCE
"""Iterations that a plan runs at least."""


@dataclass(frozen=True)
class Wanted:
    """A plan is wanted for ``profile``. ``codecs``: that may be used, all of the profile's where there are
    none. ``steps``: that training needs to a loss with each, over those that it needs without. ``lossy``:
    those that need more are allowed, too."""

    profile: Profile
    codecs: tuple[str, ...] = ()
    seed: int = 0
    steps: dict[str, float] = field(default_factory=dict)
    lossy: bool = False


@dataclass(frozen=True)
class Drift:
    """A plan runs: ``predicted`` seconds of an iteration, and those ``measured`` of the latest ones.
    ``since``: iterations since the plan was made, ``pause``: those that one must run at least, twice as many
    after each plan that was made anew without need."""

    predicted: float
    measured: tuple[float, ...]
    since: int
    pause: int


@dataclass(frozen=True)
class Renewed:
    """``made`` is the plan for costs as they are now, ``plan`` the one that runs, for which they predict
    ``expected`` seconds an iteration, in ``measured`` ones; ``pause`` as in `Drift`."""

    plan: Plan
    made: Plan
    expected: float
    measured: float
    pause: int


@dataclass(frozen=True)
class Keep:
    """Whether the plan stays, and why; ``pause``: iterations that must run before this is asked for again."""

    keep: bool
    reason: str
    pause: int = PAUSE


Observation = Wanted | Drift | Renewed
Decision = Plan | Keep


def decide(observation: Observation) -> Decision:
    """The plan that comes to a loss first, or whether it stays. Time that is measured longer or shorter than
    predicted by more than `TOLERATED` in each of the last `PATIENCE` iterations calls for another plan, for
    costs as they are now; which replaces the one that runs if it is predicted to take less than that does,
    and less than is predicted of that, by `WORTH`."""
    match observation:
        case Wanted():
            return _planned(observation)
        case Drift(predicted, measured, since, pause):
            if since < pause:
                return Keep(True, f"made {since} iterations ago, {pause} is the least", pause)
            last = measured[-PATIENCE:]
            if len(last) < PATIENCE:
                return Keep(True, f"{len(last)} iterations are measured, {PATIENCE} are needed", pause)
            ratios = [one / predicted if predicted else math.inf for one in last]
            low, high = min(ratios), max(ratios)
            keep = low <= 1 + TOLERATED and high >= 1 - TOLERATED
            return Keep(keep, f"iterations take {low:.2f} to {high:.2f} of the predicted time", pause)
        case Renewed(plan, made, expected, measured, pause):
            predicted = made.forecasts[0].to_loss / plan.forecasts[0].steps
            useful = plan.digest() != made.digest() and predicted < min(measured, expected * (1 - WORTH))
            words = "costs as they are now call for the same plan"
            if plan.digest() != made.digest():
                words = f"another plan is predicted to take {predicted:.4g} s, this one {expected:.4g}"
            if abs(measured / expected - 1) > TOLERATED if expected else measured:
                words += (
                    f"; it takes {measured:.4g} s, which is not due to network or codecs: the gradients' own "
                    "times are not those of the profile, and only a new profile has them"
                )
            return Keep(not useful, words, PAUSE if useful else 2 * pause)


def steps_with(cost: CodecCost, steps: Mapping[str, float]) -> float:
    """Steps to a loss with a codec, over those without: 1 within `NOISE`, infinite where nobody measured."""
    measured = steps.get(cost.codec, math.inf)
    return 1.0 if measured <= 1 + NOISE else measured


def _planned(wanted: Wanted) -> Plan:
    """Of the plans that need no more steps than each codec does: the one that comes to a loss first. What
    needs more must gain by `WORTH`."""
    profile, most = wanted.profile, math.inf if wanted.lossy else 1.0
    priced = [(steps_with(cost, wanted.steps), cost) for cost in profile.codecs]
    allowed = [
        (steps, cost)
        for steps, cost in priced
        if steps <= most and steps < math.inf and (not wanted.codecs or cost.codec in wanted.codecs)
    ]
    prices = {cost.codec: steps for steps, cost in allowed}
    best = plan = None
    for limit in sorted({1.0, *prices.values()}):
        within = tuple(cost for steps, cost in allowed if steps <= limit)
        plan = make_plan(replace(profile, codecs=within), wanted.seed, prices)
        if best is None or plan.forecasts[0].to_loss < best.forecasts[0].to_loss * (1 - WORTH):
            best = plan
    assert best is not None and plan is not None
    return replace(best, forecasts=(best.forecasts[0], *plan.forecasts[1:]), lossy=wanted.lossy)


def _nothing(observation: Observation) -> Decision:
    """As if there were no codecs."""
    if isinstance(observation, Wanted):
        return decide(replace(observation, profile=replace(observation.profile, codecs=()), codecs=()))
    return decide(observation)


POLICIES: Mapping[str, Callable[[Observation], Decision]] = {"search": decide, NONE: _nothing}
