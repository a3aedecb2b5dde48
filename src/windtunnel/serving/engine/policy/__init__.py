"""Who is admitted, who is refused and what is prefilled in one step of the engine.

First come, first served. A request is admitted when all that it may ever hold fits beside what the admitted
ones may hold: so nobody is ever preempted. Prompts are prefilled in chunks beside the decoded rows, at most
``chunk`` tokens in a step; what a running request waits for (its branches' heads, a join) goes before new
prompts. A request whose first token can come in time no more, even if nothing but prefill lay between, is
late: what happens to those is the policy's name (`POLICIES`).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from math import ceil, inf

from windtunnel.serving.engine.model import StepTime

__all__ = ["POLICIES", "Decision", "Filling", "Observation", "WaitingRequest", "decide"]


@dataclass(frozen=True, slots=True)
class WaitingRequest:
    """A request that is not admitted. ``left``: prompt tokens to prefill (0: its branches begin at once),
    ``stop``: of these, as many at most in one chunk; ``reserve``: KV tokens that it may come to hold;
    ``due``: when its first token is (inf: whenever)."""

    request: int
    left: int
    stop: int
    reserve: int
    due: float


@dataclass(frozen=True, slots=True)
class Filling:
    """A unit of an admitted request with ``left`` tokens to prefill, ``stop`` of them at most in one
    chunk."""

    request: int
    unit: int
    left: int
    stop: int


@dataclass(frozen=True, slots=True)
class Observation:
    """One step before it is planned.

    ``now``: seconds on the caller's clock. ``rows``: units that are decoded in any case. ``slots``: requests
    that may be admitted, ``free``: KV tokens that nobody may claim yet, ``chunk``: tokens prefilled at most.
    ``filling``: in the order in which they are served, as far as the chunk might reach; ``backlog``: tokens
    that all the admitted ones have to prefill. ``waiting``: the first of the queue. ``time``: of a step.
    """

    now: float
    rows: int
    slots: int
    free: int
    chunk: int
    backlog: int
    filling: tuple[Filling, ...]
    waiting: tuple[WaitingRequest, ...]
    time: StepTime


@dataclass(frozen=True, slots=True)
class Decision:
    """Requests that are admitted or refused; ``prefill``: (request, unit, tokens). ``until``: when the next
    request of those observed gets late: no such decision is due before."""

    admit: tuple[int, ...] = ()
    refuse: tuple[int, ...] = ()
    prefill: tuple[tuple[int, int, int], ...] = ()
    until: float = inf


def decide(observation: Observation, late: str = "refuse") -> Decision:
    """The step's admissions and prefill; ``late`` requests: "wait" in their turn, or "refuse".

    No one is admitted before who came earlier, and only with tokens of the chunk left for him.
    """
    budget, free, slots = observation.chunk, observation.free, observation.slots
    prefill: list[tuple[int, int, int]] = []
    for filling in observation.filling:
        if budget <= 0:
            break
        prefill.append((filling.request, filling.unit, min(filling.stop, budget)))
        budget -= prefill[-1][2]
    ahead = observation.backlog
    admit, hopeless, until, blocked = [], [], inf, False
    for other in observation.waiting:
        if late != "wait" and other.due < inf:
            latest = other.due - fill_time(
                observation.time, observation.rows, ahead + other.left, observation.chunk
            )
            if observation.now > latest:
                hopeless.append(other.request)
                continue
            until = min(until, latest)
        ahead += other.left
        blocked = blocked or budget <= 0 or slots <= 0 or other.reserve > free
        if not blocked:
            admit.append(other.request)
            if other.stop:
                prefill.append((other.request, 0, min(other.stop, budget)))
                budget -= prefill[-1][2]
            free, slots = free - other.reserve, slots - 1
    return Decision(tuple(admit), tuple(hopeless), tuple(prefill), until)


def fill_time(time: StepTime, rows: int, tokens: int, chunk: int) -> float:
    """Seconds in which ``tokens`` can be prefilled at the least, beside ``rows`` that are decoded."""
    return ceil(tokens / chunk) * (time.of(rows, 0) + time.chunk) + time.token * tokens


POLICIES: Mapping[str, Callable[[Observation], Decision]] = {
    "refuse": decide,
    "wait": partial(decide, late="wait"),
}
