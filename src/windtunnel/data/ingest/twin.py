"""Workers that make batches and a trainer that takes them, emulated: what the policy makes of a demand.

Both are fluids: each worker makes ``capacity`` batches a second into the trainer's buffers while there is
room, the trainer takes what it wants while there is any. A worker serves ``start`` seconds after it was asked
for. Every period the policy is asked what it is asked live, with what a period would show; noise is on what
each period's work costs. `cost` prices a decision by what the period after it would be.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np

from windtunnel.data.ingest.policy import (
    Decision,
    Observation,
    PoolLoad,
    PoolSize,
    ScalingBounds,
    WaitForSplit,
    decide,
)
from windtunnel.data.ingest.policy.autoscaler import Autoscaler

STEP = 0.02
"""Seconds that are emulated at a time."""


@dataclass(frozen=True)
class IngestWorld:
    """``capacity``: batches that a worker makes a second; ``buffer``: batches that lie ready for each worker;
    ``start``: seconds until a new worker serves; ``noise``: standard deviation of the logarithm of what a
    period's batches cost."""

    capacity: float = 10.0
    buffer: float = 8.0
    start: float = 2.0
    period: float = 1.0
    noise: float = 0.0


WORLD, SCALING = IngestWorld(), ScalingBounds()


@dataclass
class ScalingResult:
    """By period: ``stalled``: share of it that the trainer waited; ``workers``: that were wanted."""

    stalled: list[float] = field(default_factory=list)
    workers: list[int] = field(default_factory=list)


def run(
    demand: Callable[[float], float], seconds: float, rng: np.random.Generator, *, world: IngestWorld = WORLD,
    settings: ScalingBounds = SCALING, policy: Callable[[Observation], Decision] = decide,
) -> ScalingResult:  # fmt: skip
    """A trainer that wants ``demand(t)`` batches a second at ``t``, for ``seconds``."""
    outcome, ready, stock = ScalingResult(), [0.0] * settings.least, 0.0
    scaler = Autoscaler(settings, settings.least, -settings.cooldown, policy)
    for period in range(round(seconds / world.period)):
        rate = world.capacity * float(np.exp(rng.normal(0.0, world.noise)))
        consumed = produced = stalled = busy = fill = 0.0
        for step in range(round(world.period / STEP)):
            now = period * world.period + step * STEP
            serving = sum(at <= now for at in ready)
            room = world.buffer * max(serving, 1) - stock
            batches = min(rate * serving * STEP, max(0.0, room) + demand(now) * STEP)
            stock += batches
            took = min(stock, demand(now) * STEP)
            stock -= took
            produced += batches
            consumed += took
            busy += batches / rate
            stalled += STEP * (1 - took / (demand(now) * STEP)) if demand(now) else 0.0
            fill += stock / (world.buffer * max(serving, 1)) * STEP
        end = (period + 1) * world.period
        share = min(1.0, stalled / world.period)
        scaler.period(
            end, world.period, consumed=round(consumed), stalled=share,
            buffered=min(1.0, fill / world.period), produced=round(produced), busy=busy,
            ready=sum(at <= end for at in ready),
        )  # fmt: skip
        ready += [end + world.start] * (scaler.target - len(ready))
        ready = sorted(ready)[: scaler.target]
        outcome.stalled.append(share)
        outcome.workers.append(scaler.target)
    return outcome


def cost(observation: Observation, decision: Decision) -> dict[str, float]:
    """What a decision costs in the next period, demand and output staying as they were seen: seconds that
    trainers are stalled, seconds of workers; and whether a client was made to wait."""
    if not isinstance(observation, PoolLoad):
        return {
            "stalled_seconds": 0.0,
            "worker_seconds": 0.0,
            "waits": float(isinstance(decision, WaitForSplit)),
        }
    assert isinstance(decision, PoolSize)
    rate = observation.produced / observation.busy if observation.produced and observation.busy else 0.0
    demand_rate = observation.consumed / observation.period / max(1 - observation.stalled, 0.1)
    stalled = (
        max(0.0, 1 - decision.workers * rate / demand_rate) * observation.period
        if rate and demand_rate
        else 0.0
    )
    return {"stalled_seconds": stalled, "worker_seconds": decision.workers * observation.period, "waits": 0.0}
