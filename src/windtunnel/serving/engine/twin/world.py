"""Requests through the engine's scheduler on a virtual clock: the decisions are those of the live engine,
only how long a step takes is told by a step model.

While nobody arrives, ends or gets late, the scheduler says how many steps in a row are alike
(`ScheduledStep.repeat`); the clock jumps over these at once. What comes out is what single steps would give.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from math import inf, nan

import numpy as np
from numpy.typing import NDArray

from windtunnel.base.policyfile import Policy
from windtunnel.serving.engine.model import InferenceRequest, StepTime
from windtunnel.serving.engine.policy.scheduler import FULL, EngineScheduler, Log
from windtunnel.serving.engine.policy.step import Depths, Finished, ScheduledStep, StepLimits
from windtunnel.serving.prefixcache.policy.changes import PrefixMatch
from windtunnel.serving.prefixcache.policy.tree import PrefixCache

Floats = NDArray[np.float64]
LOOKS = 600
"""How often the memory that is held is noted over the time of the arrivals."""


@dataclass
class Results:
    """What became of the requests, in the order in which they were given; times are seconds on the virtual
    clock, nan where there is none.

    ``first`` and ``end``: of the first and the last token. ``tokens``: emitted. ``cached``: prompt tokens
    that the prefix cache held (0 for who was never admitted). ``refused``: whether it was; ``never``: in a
    sentence why those that could never be served were not. ``kv_used``: tokens, at `LOOKS` times; ``over``:
    when all was done. ``steps``: of which the scheduler planned ``planned``; ``busy``: seconds of them.
    """

    arrival: Floats
    first: Floats
    end: Floats
    tokens: NDArray[np.int64]
    cached: NDArray[np.int64]
    refused: NDArray[np.bool_]
    never: dict[int, str] = field(default_factory=dict)
    kv_used: list[int] = field(default_factory=list)
    over: float = 0.0
    steps: int = 0
    planned: int = 0
    busy: float = 0.0
    gain: float = 1.0


def serve(
    requests: Sequence[InferenceRequest], limits: StepLimits, model: StepTime, *,
    truth: StepTime | None = None, jitter: float = 0.0, random: np.random.Generator | None = None,
    prefixes: TwinPrefixes | None = None, log: Log | None = None, every: int = 1, jump: bool = True,
    own: Mapping[str, Policy] = {}, enough: Callable[[Finished], bool] = lambda done: False,
) -> Results:  # fmt: skip
    """Serve ``requests``, sorted by arrival, until all are done with.

    ``model``: what the scheduler believes of steps; ``truth``: how long they take, ``model`` by default,
    times a factor whose logarithm is normal with deviation ``jitter``, drawn from ``random`` (the steps of a
    jump share one). ``own``: a user's policies by capability. ``log`` is told of the decisions of every
    ``every``-th planned step. ``jump``: False to take each step by itself. It ends early when ``enough`` says
    so of a request that is done.

    Raises:
        ValueError: the requests are not sorted, or two have one id.
    """
    count = len(requests)
    arrivals = [request.arrival for request in requests]
    if any(earlier > other for earlier, other in pairwise(arrivals)):
        raise ValueError("requests have to be sorted by their arrivals")
    place = {request.id: number for number, request in enumerate(requests)}
    if len(place) != count:
        raise ValueError("two requests have the same id")
    truth = truth or model
    served = Results(
        np.array(arrivals), np.full(count, nan), np.full(count, nan), np.zeros(count, np.int64),
        np.zeros(count, np.int64), np.zeros(count, bool),
    )  # fmt: skip

    def logged(capability: str, policy: str, observation: object, decision: object) -> None:
        if log is not None and served.planned % every == 0:
            log(capability, policy, observation, decision)

    lookup = prefixes.look if prefixes is not None else None
    scheduler = EngineScheduler(
        limits, model, lookup=lookup, log=logged if log is not None else None, own=own
    )
    now, coming = (arrivals[0] if count else 0.0), 0
    gap = (arrivals[-1] - arrivals[0]) / LOOKS if count else 0.0
    note = now
    if prefixes is not None:
        prefixes.clock = lambda: now
    while True:
        while coming < count and arrivals[coming] <= now:
            request = requests[coming]
            why = scheduler.arrive(request)
            served.refused[coming] = bool(why)
            if why not in ("", FULL):
                served.never[request.id] = why
            coming += 1
        if now >= note:
            served.kv_used.append(scheduler.kv_used())
            note = now + gap
        served.planned += 1
        step = scheduler.next(now)
        if step is None:
            if coming == count:
                break
            now = arrivals[coming]
            continue
        for number in step.refused:
            served.refused[place[number]] = True
        if prefixes is not None:
            for number in step.admitted:
                served.cached[place[number]] = prefixes.admitted(number)
        if not step.work:
            continue
        factor = float(np.exp(jitter * random.standard_normal())) if jitter and random is not None else 1.0
        upto = arrivals[coming] if coming < count else inf
        alike = count_alike(step, truth, factor, now, upto) if jump else 1
        spent = factor * step.total(truth, alike)
        now += spent
        served.busy += spent
        served.steps += alike
        out = scheduler.done(step, now, count=alike)
        for number in out.first:
            served.first[place[number]] = now
            if prefixes is not None:
                prefixes.read(requests[place[number]])
        for done in out.finished:
            at = place[done.request.id]
            served.end[at], served.tokens[at] = now, done.tokens
            if prefixes is not None:
                prefixes.left(done.request.id)
        if any(map(enough, out.finished)):
            break
    served.over, served.gain = now, scheduler.predictor.gain
    return served


def count_alike(step: ScheduledStep, truth: StepTime, factor: float, now: float, coming: float) -> int:
    """How many steps in a row may be taken: all that begin before the next arrival, and none after
    ``step.until``."""
    if step.repeat == 1 or coming == step.until == inf:
        return step.repeat
    limit, bisect = (step.until, bisect_right) if step.until < coming else (coming, bisect_left)
    first, more = factor * step.total(truth, 1), factor * truth.kv * len(step.rows)
    later = range(1, min(step.repeat, int(max(0.0, limit - now) / first) + 2))
    # seconds until the one after so many begins
    return 1 + bisect(later, limit - now, key=lambda n: n * first + more * (n * (n - 1) // 2))


@dataclass
class TwinPrefixes:
    """The policy's prefix cache, without tensors: ``symbols`` of each request's prompt by its id (those that
    have none are never found)."""

    cache: PrefixCache
    symbols: Mapping[int, NDArray[np.int64]]
    clock: Callable[[], float] = lambda: 0.0
    _matches: dict[int, PrefixMatch] = field(default_factory=dict)

    def look(self, request: InferenceRequest) -> tuple[int, Depths]:
        """For the scheduler: tokens that are there, and where its prefill stops to copy the state."""
        if request.id not in self.symbols:
            return 0, ()
        unit = self.cache.unit
        match = self.cache.look(self.symbols[request.id], self.clock(), (request.prompt - 1) // unit)
        self._matches[request.id] = match
        return match.depth * unit, tuple(at * unit for at in match.keep if at * unit <= request.prompt)

    def admitted(self, number: int) -> int:
        """It uses what was found, which stays until it has `left`; prompt tokens."""
        match = self._matches.get(number)
        if match is None or not match.depth:
            return 0
        self.cache.pin(match.node)
        return match.depth * self.cache.unit

    def read(self, request: InferenceRequest) -> None:
        """Its prompt is prefilled: from now on others may use it."""
        if (match := self._matches.get(request.id)) is not None:
            whole = self.symbols[request.id][: request.prompt // self.cache.unit]
            depths = [at for at in match.keep if at <= len(whole)]
            self.cache.admit(whole, depths, self.clock())
            if (replay := self.cache.due()) is not None:
                self.cache.settle(replay.run())

    def left(self, number: int) -> None:
        """It is done."""
        match = self._matches.pop(number, None)
        if match is not None and match.depth:
            self.cache.unpin(match.node)
