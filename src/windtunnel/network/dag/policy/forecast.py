"""When jobs would end if a rule decided to the end: what-if, by the fluid flows of the twin in plain Python.

Jobs that have not come yet are not known, and sizes are those that are believed.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from math import inf

from windtunnel.network.dag.policy.graph import Decision, Observation, TaskShare

Key = tuple[str, str]
FULL = 1e-9
"""Of a link, a cap or a task: less than this is left of none."""


def forecast(observation: Observation, rule: Callable[[Observation], Decision], most: float = inf) -> float:
    """Seconds from now to the ends of all jobs, summed; inf as soon as that is known to be above ``most``."""
    here = {(entry.job, entry.task.name): entry for entry in observation.pending}
    waits = {
        key: {name for name in entry.task.after if (key[0], name) in here} for key, entry in here.items()
    }
    loads = {key: entry.task.loads for key, entry in here.items()}
    now, summed = 0.0, 0.0
    open_: dict[str, int] = {}
    for job, _ in here:
        open_[job] = open_.get(job, 0) + 1
    while here:
        if summed + now * len(open_) > most:
            return inf
        decision = rule(replace(observation, now=observation.now + now, pending=tuple(here.values())))
        for key in decision.begin:
            here[key] = replace(here[key], begun=True)
        rates = filled(decision.shares, loads, observation.resources)
        rates |= {key: 1.0 for key, entry in here.items() if entry.begun}
        step = min(here[key].left / rate if rate else inf for key, rate in rates.items())
        step = min(step, max(decision.until - observation.now - now, FULL * step))
        now += step
        ended = []
        for key, rate in rates.items():
            pending = here[key]
            left = pending.left - rate * step
            if left <= FULL * pending.left or left <= FULL * rate:
                ended.append(key)
            elif rate:
                here[key] = replace(pending, left=left)
        for key in ended:
            del here[key]
            job, name = key
            open_[job] -= 1
            if not open_[job]:
                del open_[job]
                summed += now
            for other, before in waits.items():
                if other[0] == job and name in before:
                    before.remove(name)
                    if not before:
                        here[other] = replace(here[other], ready=True)
    return summed


def filled(
    shares: Iterable[TaskShare], loads: Mapping[Key, Iterable[tuple[str, float]]], lines: Mapping[str, float]
) -> dict[Key, float]:
    """Bytes/s of each task when smaller priorities are served first and equal ones rise together, each by
    its weight, until a link that it loads is full or its cap is reached: weighted max-min."""
    free, rates, load = dict(lines), dict[Key, float](), dict[str, float]()
    by_priority: dict[int, dict[Key, TaskShare]] = {}
    for share in shares:
        rates[share.job, share.task] = 0.0
        by_priority.setdefault(share.priority, {})[share.job, share.task] = share
    for priority in sorted(by_priority):
        rising = by_priority[priority]
        while rising:
            load.clear()
            for key, share in rising.items():
                for name, times in loads[key]:
                    load[name] = load.get(name, 0.0) + times * share.weight
            level = min(
                *(free[name] / load[name] for name in load),
                *((share.cap - rates[key]) / share.weight for key, share in rising.items()),
            )
            for key, share in rising.items():
                rates[key] += level * share.weight
            for name in load:
                free[name] = max(0.0, free[name] - level * load[name])
            full = {name for name in load if free[name] <= FULL * lines[name]}
            rising = {
                key: share
                for key, share in rising.items()
                if rates[key] < share.cap * (1 - FULL) and not any(name in full for name, _ in loads[key])
            }
    return rates
