"""Which task of which job goes first, on processors and on links alike (MXDAG, HotNets 2021).

`decide` looks at all tasks that have not ended and says which computing tasks get the free processors and how
every sending task that is ready is served. What each schedule goes by:

- ``fair``: max-min of all flows; a free processor goes to the job that has fewest.
- ``fifo``: the job that came first, on links and processors.
- ``sebf``: coflows by their effective bottleneck, the smallest first, each at the rates with which all of its
  flows end together (MADD), and what is left given again in that order (Varys, SIGCOMM 2014, 5.3);
  processors as in ``fair``.
- ``cpath``: among a job's tasks, processors to the one with the longest path of computing behind it; all else
  as in ``fair``.
- ``mxdag``: least slack first within a job, by paths of computing and sending together; between jobs
  altruism: a task that has slack yields to those of other jobs that have none, until its slack is used up; on
  processors, whose tasks are not interrupted, where it has more slack than the longest of them takes.

A task's *slack* is how much later than at once it may begin for its job to end with its longest path, when
nobody is in its way; it is found anew at every decision. The paper leaves open who goes first of those with
none: here the job with the smallest product of what is left of it (the longer of its longest path and its
work on its fullest resource) and of its work where the task meets most others; the first alone lets long
tasks of short jobs hold up others for little, the second alone forgets what a job still has to do elsewhere.
Within a job it is what has the longest path behind it.

That order goes by paths, and may leave a processor idle that a small flow with slack would have fed. So where
it differs from ``fair``, both are played to the end (`forecast`); whose jobs end sooner on average decides,
until the next decision: jobs that are all there end on average no later than by ``fair``. Who comes later is
not known.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import replace
from functools import partial
from math import inf
from typing import Any

from windtunnel.network.dag.policy.forecast import forecast
from windtunnel.network.dag.policy.graph import (
    SCHEDULES,
    Decision,
    GraphJob,
    GraphTask,
    Observation,
    PendingTask,
    TaskShare,
)
from windtunnel.network.dag.policy.paths import alone, split

__all__ = [
    "POLICIES",
    "SCHEDULES",
    "Decision",
    "GraphJob",
    "GraphTask",
    "Observation",
    "PendingTask",
    "TaskShare",
    "decide",
    "split",
]  # fmt: skip

NO_SLACK = 0.05
"""Of what is left of a job's longest path: less slack than this is none, so that tasks with nearly the same
slack do not take turns."""
AHEAD = 32
"""Tasks: with more of them nobody looks ahead, since that takes as the square of their number."""
Key = tuple[str, str]
Rank = Callable[[PendingTask], tuple[Any, ...]]


def decide(observation: Observation) -> Decision:
    """Who computes and who sends. Raises KeyError for a schedule that is none of `SCHEDULES`."""
    return _RULES[observation.schedule](observation)


def _fair(observation: Observation) -> Decision:
    return Decision(
        _begin(observation, lambda pending: (), even=True), _shares(observation, lambda pending: ())
    )


def _fifo(observation: Observation) -> Decision:
    came = {
        name: place
        for place, name in enumerate(dict.fromkeys(pending.job for pending in observation.pending))
    }

    def rank(pending: PendingTask) -> tuple[Any, ...]:
        return (came[pending.job],)

    return Decision(_begin(observation, rank), _shares(observation, rank))


def _cpath(observation: Observation) -> Decision:
    behind = _behind(observation, sending=False)
    first = _begin(
        observation, lambda pending: (-pending.left - behind[pending.job, pending.task.name],), even=True
    )
    return Decision(first, _shares(observation, lambda pending: ()))


def _sebf(observation: Observation) -> Decision:
    coflows: dict[tuple[str, str, str], list[PendingTask]] = {}
    for sender in _sending(observation):
        own = sender.task.coflow
        coflows.setdefault((sender.job, own, "" if own else sender.task.name), []).append(sender)
    free = dict(observation.resources)
    order = sorted(coflows.values(), key=lambda flows: _bottleneck(flows, free))
    rates: dict[Key, float] = {}
    for again in (False, True):
        for flows in order:
            ends = 0.0 if again else _bottleneck(flows, free)
            for flow in flows:
                more = (
                    flow.left / ends if ends else min(free[name] / times for name, times in flow.task.loads)
                )
                rates[_key(flow)] = rates.get(_key(flow), 0.0) + more
                for name, times in flow.task.loads:
                    free[name] = max(0.0, free[name] - more * times)
    shares = [
        TaskShare(
            *_key(flow), place, flow.left, rates[_key(flow)] or inf
        )  # without a rate: of what is left, none
        for place, flows in enumerate(order)
        for flow in flows
    ]
    return Decision(_begin(observation, lambda pending: (), even=True), tuple(shares))


def _bottleneck(flows: Iterable[PendingTask], free: dict[str, float]) -> float:
    """Seconds of a coflow on its fullest link, with what is free there."""
    loads: dict[str, float] = {}
    for flow in flows:
        for name, times in flow.task.loads:
            loads[name] = loads.get(name, 0.0) + flow.left * times
    return max(load / free[name] if free[name] > 0.0 else inf for name, load in loads.items())


def _mxdag(observation: Observation) -> Decision:
    decision, even = _slack(observation), _fair(observation)
    if len(observation.pending) > AHEAD or (decision.begin == even.begin and decision.shares == even.shares):
        return decision
    ends = forecast(observation, _slack)
    return decision if forecast(observation, _fair, ends) >= ends * (1 - 1e-9) else even


def _slack(observation: Observation) -> Decision:
    behind, ends, demand = _behind(observation, sending=True), dict[str, float](), dict[str, float]()
    path: dict[Key, float] = {}
    loads: dict[Key, float] = {}  # seconds of a job's work on each resource
    waiting: dict[str, list[tuple[PendingTask, float]]] = {}  # for processors, which nobody gives back early
    for pending in observation.pending:
        if pending.ready:
            path[_key(pending)] = (
                alone(pending.task, observation.resources, pending.left) + behind[_key(pending)]
            )
            ends[pending.job] = max(ends.get(pending.job, 0.0), path[_key(pending)])
        for name, times in pending.task.loads:
            load = pending.left * times / observation.resources[name]
            loads[pending.job, name] = loads.get((pending.job, name), 0.0) + load
            demand[name] = demand.get(name, 0.0) + load * pending.ready
            if pending.ready and not pending.begun and pending.task.kind == "compute":
                waiting.setdefault(name, []).append((pending, pending.left))
    rest = dict(ends)
    for (job, _), load in loads.items():
        rest[job] = max(rest[job], load)

    def slack(flow: PendingTask) -> float:
        left = ends[flow.job] - path[_key(flow)]
        return left if left > NO_SLACK * ends[flow.job] else 0.0

    def rank(flow: PendingTask) -> tuple[Any, ...]:
        own = slack(flow)
        crowded = max((name for name, _ in flow.task.loads), key=demand.__getitem__)
        over = max((left for other, left in waiting.get(crowded, ()) if other is not flow), default=0.0)
        return own > over, rest[flow.job] * loads[flow.job, crowded], own, -behind[_key(flow)]

    shares = _shares(observation, rank)
    late = [slack(flow) for flow, share in zip(_sending(observation), shares, strict=True) if share.priority]
    out = min((own for own in late if own), default=inf)
    soonest = NO_SLACK * max(rest.values(), default=0.0)  # jobs that nobody serves do not use slack up
    return Decision(_begin(observation, rank), shares, observation.now + max(out, soonest))


def _behind(observation: Observation, *, sending: bool) -> dict[Key, float]:
    """Seconds of the longest path behind each task, of computing and, if wanted, of ``sending``."""
    behind = {_key(flow): 0.0 for flow in observation.pending}
    for pending in reversed(observation.pending):
        seconds = behind[_key(pending)]
        if sending or pending.task.kind == "compute":
            seconds += alone(pending.task, observation.resources, pending.left)
        for before in (*pending.task.after, *pending.task.pipelined):
            if behind.get((pending.job, before), inf) < seconds:
                behind[pending.job, before] = seconds
    return behind


def _begin(observation: Observation, rank: Rank, *, even: bool = False) -> tuple[Key, ...]:
    """Computing tasks for the free processors, by rank; ``even``: of the job first that has fewest."""
    free, has = dict(observation.resources), Counter[str]()
    for entry in observation.pending:
        if entry.begun:
            free[entry.task.loads[0][0]] -= 1
            has[entry.job] += 1
    waiting = [
        pending
        for pending in observation.pending
        if pending.ready and pending.task.kind == "compute" and not pending.begun
    ]
    waiting.sort(key=rank)
    begun: list[Key] = []
    while waiting := [pending for pending in waiting if free[pending.task.loads[0][0]] >= 1]:
        entry = min(waiting, key=lambda pending: has[pending.job]) if even else waiting[0]
        waiting.remove(entry)
        free[entry.task.loads[0][0]] -= 1
        has[entry.job] += 1
        begun.append(_key(entry))
    return tuple(begun)


def _shares(observation: Observation, rank: Rank) -> tuple[TaskShare, ...]:
    """Every sending task that is ready, at the place of its rank; those of equal rank share alike."""
    sending = _sending(observation)
    ranks = [rank(pending) for pending in sending]
    places = {rank: place for place, rank in enumerate(sorted(set(ranks)))}
    return tuple(
        TaskShare(*_key(pending), places[rank]) for pending, rank in zip(sending, ranks, strict=True)
    )


def _sending(observation: Observation) -> list[PendingTask]:
    return [pending for pending in observation.pending if pending.ready and pending.task.kind == "network"]


def _key(pending: PendingTask) -> Key:
    return pending.job, pending.task.name


_RULES = {"fair": _fair, "fifo": _fifo, "sebf": _sebf, "cpath": _cpath, "mxdag": _mxdag}


def _by(schedule: str, observation: Observation) -> Decision:
    return decide(replace(observation, schedule=schedule))


POLICIES: dict[str, Callable[[Observation], Decision]] = {name: partial(_by, name) for name in SCHEDULES}
