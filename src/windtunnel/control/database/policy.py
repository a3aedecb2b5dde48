"""Which waiting task goes to which worker: first in first out, least loaded, locality, priority, gangs.

A gang (tasks that have to begin together) is placed whole or not at all. Under ``fifo``, ``least`` and
``locality`` a task that does not fit is passed over; under ``priority`` nothing passes it, under ``gang``
nothing passes a gang, so that neither waits for ever.

Source: Skiadopoulos et al., DBOS: A DBMS-oriented Operating System (VLDB 2022), section 4.1, for the first
three; gangs are of Ousterhout, Scheduling Techniques for Concurrent Systems (ICDCS 1982).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True)
class Task:
    """One that waits, is due, and whose gang is complete. ``slots``: of one worker; ``data``: what it reads,
    "" for nothing; ``gang``: who begins with it, "" for nobody."""

    id: int
    slots: int = 1
    priority: int = 0
    data: str = ""
    gang: str = ""


@dataclass(frozen=True, slots=True)
class Worker:
    """One whose lease holds. ``free`` of its ``slots``; ``data``: what it holds."""

    name: str
    free: int
    slots: int
    data: str = ""


@dataclass(frozen=True)
class Observation:
    """A window of what waits (highest priority first, then the oldest) and of who has slots (most first)."""

    tasks: tuple[Task, ...]
    workers: tuple[Worker, ...]


@dataclass(frozen=True, slots=True)
class Assignment:
    task: int
    worker: str
    reason: str = field(default="", compare=False)


@dataclass(frozen=True)
class Decision:
    assignments: tuple[Assignment, ...]
    reason: str = field(default="", compare=False)


Choose = Callable[[Task, dict[str, int]], tuple[str, str]]
"""A worker and why, by the slots that are free; it may have no room."""


def decide(observation: Observation) -> Decision:
    """The oldest task to the worker that has most free slots."""
    return _placed(_oldest(observation), observation, _most_free)


def fifo(observation: Observation) -> Decision:
    """The oldest task to the first worker with room."""
    return _placed(_oldest(observation), observation, _first)


def locality(observation: Observation) -> Decision:
    """To a worker that holds the task's data, else to the one that has most free slots."""
    data = {worker.name: worker.data for worker in observation.workers}

    def choose(task: Task, free: dict[str, int]) -> tuple[str, str]:
        here = {name: count for name, count in free.items() if data[name] == task.data != ""}
        if max(here.values(), default=0) >= task.slots:
            return _most_free(task, here)[0], "holds its data"
        return _most_free(task, free)

    return _placed(_oldest(observation), observation, choose)


def priority(observation: Observation) -> Decision:
    """The highest priority first, and nothing passes a task that does not fit."""
    tasks = sorted(observation.tasks, key=lambda task: (-task.priority, task.id))
    return _placed(tasks, observation, _most_free, passes=lambda task: False)


def gang(observation: Observation) -> Decision:
    """The oldest first, and nothing passes a gang that does not fit: what is free is kept for it."""
    return _placed(_oldest(observation), observation, _most_free, passes=lambda task: not task.gang)


POLICIES: Mapping[str, Callable[[Observation], Decision]] = {
    "least": decide, "fifo": fifo, "locality": locality, "priority": priority, "gang": gang,
}  # fmt: skip


def _oldest(observation: Observation) -> list[Task]:
    return sorted(observation.tasks, key=lambda task: task.id)


def _most_free(task: Task, free: dict[str, int]) -> tuple[str, str]:
    return max(free, key=free.__getitem__), "most free slots"


def _first(task: Task, free: dict[str, int]) -> tuple[str, str]:
    return next((name for name, count in free.items() if count >= task.slots), next(iter(free))), "has room"


def _placed(
    tasks: Iterable[Task], observation: Observation, choose: Choose,
    passes: Callable[[Task], bool] = lambda task: True,
) -> Decision:  # fmt: skip
    """``passes``: whether others may pass a task that does not fit."""
    free = {worker.name: worker.free for worker in observation.workers}
    gangs: dict[str | int, list[Task]] = {}
    for task in tasks:
        gangs.setdefault(task.gang or task.id, []).append(task)
    assignments: list[Assignment] = []
    for members in gangs.values():
        whole: list[Assignment] = []
        for member in members:
            name, reason = choose(member, free)
            if free[name] < member.slots:
                break
            free[name] -= member.slots
            whole.append(Assignment(member.id, name, reason))
        if len(whole) == len(members):
            assignments += whole
            continue
        for member, placed in zip(members, whole, strict=False):
            free[placed.worker] += member.slots
        if not passes(members[0]):
            return Decision(tuple(assignments), f"task {members[0].id} does not fit, and nothing passes it")
    return Decision(tuple(assignments))
