"""Jobs on hosts and links where nothing is late: sending tasks are fluid flows, computing ones timers.

Whenever a job comes, a task ends, or the last decision asks for it, `decide` looks at what is left. What it
sees of a size may be wrong by a factor (``believed``); what has been done of it is always known.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from math import inf, nextafter

from windtunnel.engines.flows import World
from windtunnel.network.dag.policy import (
    Decision,
    GraphJob,
    GraphTask,
    Observation,
    PendingTask,
    decide,
    split,
)
from windtunnel.network.dag.policy.paths import checked, whole

Key = tuple[str, str]


@dataclass(frozen=True)
class GraphResult:
    """``jobs``: seconds from each job's begin to its end. ``tasks``: begin and end of each task, by job and
    name, in seconds. ``decisions``: how many."""

    jobs: dict[str, float]
    tasks: dict[Key, tuple[float, float]]
    decisions: int

    @property
    def mean(self) -> float:
        """Seconds of a job, on average."""
        return sum(self.jobs.values()) / len(self.jobs)


class _TwinTask:
    """A task that has not ended, of a job that has come."""

    def __init__(self, job: str, task: GraphTask, factor: float) -> None:
        self.true, self.begin = task.size, 0.0
        self.flow: int | None = None
        self.observed = PendingTask(
            job, replace(task, size=task.size * factor), task.size * factor, not task.after
        )

    def start(self, world: World, loads: Mapping[int, float], cap: float = inf) -> int:
        self.begin = world.now
        self.flow = world.start(self.true, loads, cap=cap)
        return self.flow

    def pending(self, world: World, under_way: Mapping[Key, _TwinTask]) -> PendingTask:
        """What is seen of it."""
        pending = self.observed
        if self.flow is not None:
            return pending.under_way(self.true - world.left(self.flow))
        if not pending.ready and not any((pending.job, name) in under_way for name in pending.task.after):
            self.observed = replace(pending, ready=True)
        return self.observed


def emulate(
    jobs: Iterable[GraphJob], resources: Mapping[str, float], schedule: str, *,
    believed: Mapping[Key, float] | None = None,
    decide: Callable[[Observation], Decision] = decide,
    decided: Callable[[Observation, Decision], None] | None = None,
) -> GraphResult:  # fmt: skip
    """Let all jobs end.

    ``believed``: by job and task, how many times its true size a task is thought to have (1). ``decided``:
    gets every decision beside what it was made of.

    Raises:
        UserError: jobs that are none (`policy.paths.checked`), or of too many pieces.
        ValueError: ``decide`` lets nobody work, though some could.
    """
    rates = dict(resources)
    graph_jobs = checked(jobs, rates)
    coming = sorted(map(split, graph_jobs), key=lambda job: job.begins)
    wrong = believed or {}
    links = {name: place for place, name in enumerate(rates)}
    world = World(rates.values())
    here: dict[Key, _TwinTask] = {}
    flows: dict[int, Key] = {}
    ends: dict[str, float] = {}
    tasks: dict[Key, tuple[float, float]] = {}
    count = 0
    while coming or here:
        while coming and coming[0].begins <= world.now:
            job = coming.pop(0)
            for task in job.tasks:
                factor = wrong.get((job.name, whole(task.name)), 1.0)
                here[job.name, task.name] = _TwinTask(job.name, task, factor)
        until = coming[0].begins if coming else inf
        if here:
            pending = tuple(task.pending(world, here) for task in here.values())
            observation = Observation(world.now, rates, pending, schedule)
            decision = decide(observation)
            count += 1
            if decided:
                decided(observation, decision)
            for key in decision.begin:
                flows[here[key].start(world, {}, cap=1.0)] = key
            for share in decision.shares:
                state, key = here[share.job, share.task], (share.job, share.task)
                if state.flow is None:
                    loads = {links[name]: times for name, times in state.observed.task.loads}
                    flows[state.start(world, loads)] = key
                assert state.flow is not None
                world.change(state.flow, weight=share.weight, cap=share.cap, priority=share.priority)
            until = min(until, max(decision.until, nextafter(world.now, inf)))
        ended = world.advance(until)
        if until == inf and not ended:
            raise ValueError(f"{len(here)} tasks have not ended, and none of them is under way")
        for flow in ended:
            job_name, name = key = flows.pop(flow)
            own = job_name, whole(name)
            first = tasks.get(own, (here[key].begin, 0.0))[0]
            tasks[own] = first, world.now
            ends[job_name] = world.now
            del here[key]
    return GraphResult({job.name: ends[job.name] - job.begins for job in graph_jobs}, tasks, count)


def cost(observation: Observation, decision: Decision) -> dict[str, float]:
    """What a decision puts to use: bytes/s that links carry by it, and processors that begin."""
    world = World(observation.resources.values())
    links = {name: place for place, name in enumerate(observation.resources)}
    sending = {
        (pending.job, pending.task.name): pending.task
        for pending in observation.pending
        if pending.task.kind == "network"
    }
    for share in decision.shares:
        loads = {links[name]: times for name, times in sending[share.job, share.task].loads}
        world.start(inf, loads, weight=share.weight, cap=share.cap, priority=share.priority)
    return {"carried bytes/s": float(world.loads().sum()), "processors": float(len(decision.begin))}
