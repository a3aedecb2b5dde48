"""What stands in a job's graph: its pieces, its longest path, and what has slack.

Seconds are those of tasks that nobody is in the way of. Pipelined tasks are *split* into pieces of one unit,
so that everything else sees tasks that begin when others have ended: a chain of n pieces each then takes
sum(unit) + max(size - unit), as in MXDAG (HotNets 2021), and where numbers of pieces differ, each piece waits
for as much of what feeds it as it is part of its task.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from graphlib import CycleError, TopologicalSorter
from math import ceil, inf

from windtunnel.base.errors import UserError
from windtunnel.network.dag.policy.graph import GraphJob, GraphTask

MOST_PIECES = 4096
"""Of one job."""
SHORTEST, LONGEST = 1e-9, 1e9
"""Seconds that a task may take alone: floats tell such times apart."""


def alone(task: GraphTask, resources: Mapping[str, float], left: float | None = None) -> float:
    """Seconds of what is ``left`` of a task (all of it) when nobody is in its way."""
    size = task.size if left is None else left
    if task.kind == "compute":
        return size
    return size * max(times / resources[name] for name, times in task.loads)


def checked(
    jobs: Iterable[GraphJob], resources: Mapping[str, float], where: str = "jobs"
) -> tuple[GraphJob, ...]:
    """The jobs, with tasks in an order in which each stands behind those it comes after.

    Raises:
        UserError: a name given twice, an unknown resource or task, a size that is none, or tasks that wait
            for each other (the cycle is named).
    """
    by_name: dict[str, GraphJob] = {}
    for name, rate in resources.items():
        if not 0.0 < rate < inf:
            raise UserError(f"{where}: resources.{name} is {rate}, accepted is a positive number")
    for job in jobs:
        at = f"{where}: {job.name}"
        if job.name in by_name:
            raise UserError(f"{at} is given twice, accepted is a job of each name")
        if not (job.tasks and 0.0 <= job.begins <= LONGEST):
            raise UserError(f"{at} has no tasks or begins at {job.begins}, accepted are tasks from 0 s on")
        tasks = {task.name: task for task in job.tasks}
        if len(tasks) < len(job.tasks):
            raise UserError(f"{at}: two tasks have one name, accepted is a task of each name")
        for task in job.tasks:
            _check(task, tasks, resources, f"{at}: task {task.name}")
        waits = {task.name: (*task.after, *task.pipelined) for task in job.tasks}
        try:
            order = list(TopologicalSorter(waits).static_order())
        except CycleError as error:
            cycle = " -> ".join(reversed(error.args[1]))
            raise UserError(f"{at}: tasks wait for each other: {cycle}; accepted are no cycles") from None
        earlier: set[str] = set()
        for task in job.tasks:
            if not earlier.issuperset(waits[task.name]):
                job = replace(job, tasks=tuple(tasks[name] for name in order))
                break
            earlier.add(task.name)
        by_name[job.name] = job
    return tuple(by_name.values())


def _check(task: GraphTask, tasks: Mapping[str, GraphTask], resources: Mapping[str, float], at: str) -> None:
    for before in (*task.after, *task.pipelined):
        if before not in tasks:
            raise UserError(f"{at} comes after {before!r}, accepted are tasks of its job: {some(tasks)}")
    for name, times in task.loads:
        if name not in resources:
            raise UserError(f"{at} is on {name!r}, accepted are resources that there are: {some(resources)}")
        if not 0.0 < times < inf:
            raise UserError(f"{at} loads {name} {times} times, accepted is a positive number")
    for what, figure in (("size", task.size), ("unit", min(task.unit, task.size))):
        if not 0.0 < figure < inf:
            raise UserError(f"{at} has {what} {figure}, accepted is a positive number of seconds or bytes")
    if task.kind == "compute" and not (
        len(task.loads) == 1 and task.loads[0][1] == 1 <= resources[task.loads[0][0]]
    ):
        raise UserError(f"{at} computes on {task.loads}, accepted is one processor of one host")
    if not task.loads:
        raise UserError(f"{at} loads nothing, accepted is at least one link")
    if not SHORTEST <= (seconds := alone(task, resources)) <= LONGEST:
        raise UserError(f"{at} takes {seconds:.3g} s alone, accepted are {SHORTEST:g} to {LONGEST:g} s")


def some(names: Iterable[str]) -> str:
    """The first of several names, for a message."""
    names = list(names)
    return ", ".join(names[:8]) + (", …" if len(names) > 8 else "")


def split(job: GraphJob) -> GraphJob:
    """The job with its pipelined tasks cut into pieces of a unit, called TASK#1, TASK#2 and so on.

    Raises:
        UserError: that would be too many pieces.
    """
    feeding = {name for task in job.tasks for name in task.pipelined}
    cut = {task.name: task.size / task.unit * (1 - 1e-12) for task in job.tasks}
    counts = {
        task.name: ceil(min(cut[task.name], 2.0 * MOST_PIECES))
        if task.pipelined or task.name in feeding
        else 1
        for task in job.tasks
    }
    if sum(counts.values()) > max(MOST_PIECES, len(counts)):
        raise UserError(f"{job.name}: units make more than {MOST_PIECES} pieces, accepted are larger units")

    def piece(name: str, number: int) -> str:
        return name if counts[name] <= 1 else f"{name}#{number}"

    pieces = []
    for task in job.tasks:
        many = counts[task.name] = max(1, counts[task.name])
        for k in range(1, many + 1):
            if k == 1:
                after = [piece(name, counts[name]) for name in task.after]
            else:
                after = [piece(task.name, k - 1)]
            after += [piece(name, ceil(k * counts[name] / many)) for name in task.pipelined]
            size = task.size if many == 1 else task.unit if k < many else task.size - task.unit * (many - 1)
            pieces.append(
                replace(task, name=piece(task.name, k), size=size, unit=inf, after=tuple(after), pipelined=())
            )
    return replace(job, tasks=tuple(pieces))


def whole(piece: str) -> str:
    """The name of the task that a piece is of."""
    return piece.partition("#")[0]


@dataclass(frozen=True, slots=True)
class Copath:
    """A way beside the longest path: its ``tasks`` begin behind one task of that (or of a copath with less to
    spare) and end before another (``""``: with the job), and might take ``spare`` seconds longer."""

    behind: str
    before: str
    tasks: tuple[str, ...]
    spare: float


@dataclass(frozen=True, slots=True)
class Paths:
    """Of each task its earliest start, seconds after the job's begin, and its ``slack``: how much later than
    at once it may begin; the tasks along the job's longest path, how long that is, and the ways beside it,
    those with least to spare first."""

    earliest: dict[str, float]
    slack: dict[str, float]
    critical: tuple[str, ...]
    length: float
    copaths: tuple[Copath, ...]


def paths(job: GraphJob, resources: Mapping[str, float]) -> Paths:
    """When tasks may and must begin for the job to end as soon as it can: forward, then backward. A task is
    on the longest of the ways through it."""
    plain = split(job).tasks
    took = {task.name: alone(task, resources) for task in plain}
    ends: dict[str, float] = {}
    behind, then = dict.fromkeys(took, 0.0), dict.fromkeys(took, "")
    last: dict[str, str] = {}  # which it waits for longest
    for task in plain:
        last[task.name] = max(task.after, key=ends.__getitem__, default="")
        ends[task.name] = ends.get(last[task.name], 0.0) + took[task.name]
    for task in reversed(plain):
        for name in task.after:
            if not then[name] or behind[name] < took[task.name] + behind[task.name]:
                behind[name], then[name] = took[task.name] + behind[task.name], task.name

    on: set[str] = set()

    def along(steps: Mapping[str, str], at: str) -> list[str]:
        """From a task to the first that is on a way already (or to "")."""
        path = [at]
        while (at := steps[at]) and whole(at) not in on:
            path.append(at)
        return [*path, at]

    critical = along(last, max(ends, key=ends.__getitem__))[-2::-1]
    length = ends[critical[-1]]
    on.update(map(whole, critical))
    late = {name: length - behind[name] - took[name] for name in took}
    earliest: dict[str, float] = {}
    latest: dict[str, float] = {}
    beside = []
    for task in sorted(plain, key=lambda task: late[task.name] - ends[task.name] + took[task.name]):
        own, name, begin = whole(task.name), task.name, ends[task.name] - took[task.name]
        spare = max(0.0, late[name] - begin)
        earliest[own] = min(earliest.get(own, inf), begin)
        latest[own] = min(latest.get(own, inf), earliest[own] + spare)
        if own not in on:
            *back, behind_it = along(last, name)
            *forth, before_it = along(then, name)
            tasks = tuple(dict.fromkeys(map(whole, [*reversed(back), *forth])))
            beside.append(Copath(whole(behind_it), whole(before_it), tasks, spare))
            on.update(tasks)
    slack = {name: latest[name] - begin for name, begin in earliest.items()}
    return Paths(earliest, slack, tuple(dict.fromkeys(map(whole, critical))), length, tuple(beside))
