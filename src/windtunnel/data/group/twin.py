"""A chain of engines in emulated time, with the wait for a CPU that was measured on a real one.

Each member is a queue of one server, as its engine is one thread. An operation that finds it idle waits
until the kernel lets it run (`EngineProfile.delays`, a measured table: no figure here is a guess), then each
takes its service time; between members there is a wire. After a loss the policy is asked as a live one asks
it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

from windtunnel.data.group.policy import Decision, MemberState, Observation, decide
from windtunnel.engines.events import Environment, ProcessGenerator


@dataclass(frozen=True)
class EngineProfile:
    """``service``: seconds of an operation at one engine; ``issue``: at the coordinator, from its call to the
    head and from the tail to its caller; ``delays``: seconds until an engine that is woken runs, as measured;
    ``wire``, ``bandwidth``: seconds and bytes/s between members."""

    service: float
    issue: float
    delays: tuple[float, ...] = (0.0,)
    wire: float = 0.0
    bandwidth: float = 1e9


def latencies(
    members: int, operations: int, profile: EngineProfile, seed: int, *, payload: int = 1024, window: int = 1
) -> NDArray[np.float64]:
    """Seconds of each operation that a coordinator issues, ``window`` at a time; shape (operations,)."""
    env, rng = Environment(), np.random.default_rng(seed)
    waits = rng.choice(np.array(profile.delays), (members, operations))
    hop = profile.wire + payload / profile.bandwidth
    took, free = np.zeros(operations), np.zeros(members)
    coming = iter(range(operations))

    def caller() -> ProcessGenerator:
        for number in coming:
            began = env.now
            yield env.timeout(profile.issue)
            for place in range(members):
                if place:
                    yield env.timeout(hop)
                start = free[place] if free[place] > env.now else env.now + waits[place, number]
                free[place] = start + profile.service
                yield env.timeout(free[place] - env.now)
            took[number] = env.now - began

    for _ in range(window):
        env.process(caller())
    env.run()
    return took


def lives(
    members: Sequence[MemberState], losses: Mapping[int, str], operations: int, *, window: int = 64,
    coordinator: str = "", epoch: int = 1, policy: Callable[[Observation], Decision] = decide,
) -> list[Decision]:  # fmt: skip
    """What is decided while ``operations`` go through: the first chain, and one after each of ``losses`` (who
    is lost, by the number of the operation that it did last)."""
    here, decisions = list(members), list[Decision]()

    def form(least: int) -> None:
        decisions.append(policy(Observation(epoch + len(decisions), tuple(here), coordinator, least, window)))

    form(len(here))
    for last, name in sorted(losses.items()):
        if last > operations or not decisions[-1].chain:
            break
        now = epoch + len(decisions) - 1
        member = {standing.name: standing for standing in here}
        here[:] = [
            replace(member[survivor], fenced=now, epoch=now, sequence=last, steady=True)
            for survivor in decisions[-1].chain
            if survivor != name
        ]
        form(1)
    return decisions


def cost(observation: Observation, decision: Decision) -> dict[str, float]:
    """What a decision makes of the next operations: copies of a payload that leave a domain, and those that
    have to come before a payload is in two domains (all, where it never is); bytes to be compared."""
    domain = {member.name: member.domain for member in observation.members}
    way = [observation.coordinator, *(domain[name] for name in decision.chain)]
    leaves = [place != other for place, other in pairwise(way)]
    second = next((at for at, place in enumerate(way[1:], 1) if place != way[1]), len(decision.chain))
    size = max((member.size for member in observation.members), default=0)
    return {
        "copies between domains": float(sum(leaves)), "copies until two domains": float(second),
        "bytes compared": float(size * len(decision.compare)),
    }  # fmt: skip
