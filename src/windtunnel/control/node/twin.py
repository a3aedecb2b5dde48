"""The agents on emulated hosts, with the faults that an agent must survive.

Loops, agents and policy are those of live; the clock, the host and the faults are emulated. A fault wraps
what an agent collects or is answered, or lets a loop stand still: no agent knows of it. Three hosts, whose
figures are ours: eight cores with a bursty primary load, memory of which most is cold, and a frequency.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from windtunnel.base.errors import UserError
from windtunnel.control.node import agents, policy
from windtunnel.control.node.policy import Decision, Guards, Observation, Schedule

FAULTS = ("none", "bad data", "broken model", "late model", "frozen actuator")
HARVEST = Schedule(0.005, 5, 0.1, 0.05, 0.025, 0.05, 0.25, 5.0)  # with the epoch of the paper, of 25 ms
ALL = Guards()
BEGINS, STALLS, BAD, CLEANED = 0.2, 0.47, 0.3, 5.0
"""A fault's begin and the length of a stall, as shares of a run; the share of bad samples; seconds after
which an operator cleans up after an actuator that stands still, where guards are on: it cannot do so."""


@dataclass(frozen=True)
class NodeOutcome:
    """``harm``: share of steps that starved the primary, of accesses to the slow tier, of energy that boosts
    waste; ``gain``: cores lent or the share of memory in the slow tier, the mean; work beyond nominal's."""

    harm: float
    gain: float
    counts: Mapping[str, int]


class Cores:
    """Eight, and a demand for them: a slow random walk, and bursts that come within 50 ms."""

    cores, dt = 8.0, HARVEST.collect

    def __init__(self, steps: int, rng: np.random.Generator) -> None:
        slow, bursts = np.cumsum(rng.normal(0, 0.02, steps)), np.zeros(steps)
        for start in np.flatnonzero(rng.random(steps) < self.dt / 3):
            part = bursts[start : start + 80]
            part[:] = np.maximum(part, rng.uniform(1, 4) * np.minimum(np.arange(len(part)) / 10, 1))
        demand = 1.5 + np.abs((slow + 1.5) % 3 - 1.5) + rng.normal(0, 0.1, steps) + bursts
        self._demand = iter(np.clip(demand, 0, self.cores).tolist())
        self.lent = self._short = self._demanded = self._used = 0.0

    def step(self) -> tuple[float, float, float, float]:
        """What hurt, of what it is a share, and the gain likewise."""
        demand = next(self._demand)
        short = max(0.0, demand - (self.cores - self.lent))
        self._short, self._demanded, self._used = self._short + short, self._demanded + demand, demand - short
        return float(short > 0), 1.0, self.lent, 1.0

    def usage(self, now: float) -> float:
        return self._used

    def waited(self) -> float:
        share = self._short / (self._demanded or 1.0)
        self._short = self._demanded = 0.0
        return share

    def lend(self, cores: float = 0.0) -> float:
        self.lent = cores
        return cores

    restore = lend


class MemoryRegions:
    """512, each accessed at random at a rate of its own; what is accessed comes back, as from swap."""

    dt = agents.MEMORY.collect

    def __init__(self, rng: np.random.Generator, count: int = 512) -> None:
        kinds = rng.choice((10.0, 0.3, 0.002), count, p=(0.15, 0.25, 0.6))
        self._rng, self._rates, self._remote = rng, kinds * rng.uniform(0.5, 2, count), np.zeros(2)
        self.slow, self._bits = np.zeros((2, count), bool)

    def step(self) -> tuple[float, float, float, float]:
        accesses = self._rng.poisson(self._rates * self.dt)
        remote = np.array([np.sum((accesses > 0) & self.slow), accesses.sum()])  # the first one fetches it
        self._remote += remote
        self._bits |= accesses > 0
        self.slow &= accesses == 0
        return float(remote[0]), float(remote[1]), float(self.slow.mean()), 1.0

    def scan(self) -> tuple[bool, ...]:
        bits, self._bits = tuple(self._bits.tolist()), np.zeros_like(self._bits)
        return bits

    def page_out(self, regions: Sequence[int]) -> int:
        self.slow[list(regions)] = True
        return len(regions)

    def remote(self) -> float:
        (remote, accesses), self._remote = self._remote, np.zeros(2)
        return float(remote / max(1.0, accesses))

    def bring_back(self) -> int:
        count, self.slow[:] = int(self.slow.sum()), False
        return count


class BoostedMachine:
    """A virtual machine that computes, waits for memory or idles, minutes each, on a host whose cores take a
    fifth of its power, as beside accelerators. Work and watts are 1 where all its cycles count at nominal."""

    dt, frequencies = agents.OVERCLOCK.collect, (1.0, 1.15, 1.3)
    loads = ((0.95, 1.0), (0.4, 0.1), (0.05, 0.0))  # activity, and the share of a boost that is work

    def __init__(self, _: int, rng: np.random.Generator) -> None:
        self._rng, self._left, self._load, self.level = rng.spawn(1)[0], 0, 0, 0  # not what explores

    def step(self) -> tuple[float, float, float, float]:
        if self._left == 0:
            self._left = int(self._rng.uniform(60, 300) / self.dt)
            self._load = int((self._load + self._rng.integers(1, 3)) % 3)
        self._left -= 1
        self._active, share = active, _ = self.loads[self._load]
        (nominal, usual), (watts, work) = (
            (0.8 + 0.05 * times**2 + 0.15 * active * times**3, active * (1 + share * (times - 1)))
            for times in (1.0, self.frequencies[self.level])
        )
        noise = self._rng.normal(1, 0.02, 3)  # of what counters say
        self._sample = self.level, work * noise[0], watts * noise[1], min(1.0, active * noise[2])
        return max(0.0, watts - nominal * work / usual), nominal, work - usual, usual

    def counters(self) -> tuple[int, float, float, float]:
        return self._sample

    def activity(self) -> float:
        return self._active

    def boost(self, level: int = 0) -> int:
        self.level = level
        return level


AGENTS: Mapping[str, tuple[Schedule, Any, Any, Any]] = {
    "harvest": (HARVEST, Cores, lambda host, _: agents.HarvestModel(host), agents.HarvestActuator),
    "memory": (agents.MEMORY, lambda _, rng: MemoryRegions(rng), agents.MemoryModel, agents.MemoryActuator),
    "overclock": (agents.OVERCLOCK, BoostedMachine, agents.OverclockModel, agents.OverclockActuator),
}


def emulate(
    agent: str, fault: str = "none", guards: Guards = ALL, *, seconds: float = 300.0, seed: int = 0
) -> NodeOutcome:
    """``harvest``, ``memory`` or ``overclock`` for so many seconds, with a fault after a fifth of them.

    Raises:
        UserError: an unknown agent or fault.
    """
    if agent not in AGENTS or fault not in FAULTS:
        raise UserError(f"emulate: {agent!r}, {fault!r}; accepted are {tuple(AGENTS)}, {FAULTS}")
    rng, noise = (np.random.default_rng((seed, number)) for number in range(2))
    schedule, host, model, actuator = AGENTS[agent]
    world = host(steps := round(seconds / schedule.collect), rng)
    model, actuator = model(world, rng), actuator(world)
    collect, now, slot, begins = model.collect, 0.0, list[agents.Prediction](), BEGINS * seconds

    def ask(observation: Observation) -> Decision:
        decision = policy.decide(observation)
        if fault != "broken model" or now < begins or isinstance(decision, policy.Publish | policy.Action):
            return decision
        if isinstance(decision, policy.Forecast):
            return replace(decision, need=1.0)
        if isinstance(decision, policy.Frequency):
            return replace(decision, level=policy.LEVELS - 1)
        return replace(decision, cold=tuple(range(len(decision.idle))))

    def collected(at: float) -> Any:
        sample = collect(at)
        if sample is None or fault != "bad data" or at < begins or noise.random() >= BAD:
            return sample
        if agent == "memory":
            return sample[0], ()
        wrong = float(noise.choice((0.0, -5.0, 1e6)))
        return wrong if agent == "harvest" else (sample[0], wrong, *sample[2:])

    model.collect = collected
    learning = agents.ModelLoop(model, schedule, guards, ask, lambda newest: slot.insert(0, newest), 0.0)
    acting = agents.ActuatorLoop(actuator, schedule, guards, ask)
    totals, every = np.zeros(4), round(schedule.act / world.dt)
    for number in range(steps):
        now = number * world.dt
        totals += world.step()
        stalled = fault if begins <= now < begins + STALLS * seconds else "none"
        if stalled != "late model":
            learning.turn(now)
        if number % every == 0 and stalled != "frozen actuator":
            acting.turn(now, slot[0] if slot else None)
        elif stalled == "frozen actuator" and guards.expiry and now >= begins + CLEANED:
            actuator.clean_up()
        del slot[1:]
    harm, gain = float(totals[0] / max(1.0, totals[1])), float(totals[2] / totals[3])
    return NodeOutcome(harm, gain, learning.counts + acting.counts)


def cost(observation: Observation, decision: Decision) -> dict[str, float] | None:
    """What a forecast leaves to be lent, in cores; None for other decisions."""
    if isinstance(observation, policy.Harvest) and isinstance(decision, policy.Forecast):
        return {"cores lent": observation.cores - decision.need}
    return None
