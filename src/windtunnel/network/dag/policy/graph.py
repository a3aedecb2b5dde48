"""Jobs as graphs of tasks, and what is seen of them and decided at an instant: plain data.

A *task* is a piece of computing or of sending. It has a *size* (seconds of one processor, or bytes), a *unit*
(what it takes in and gives out at once; its size where it does so only at its end), and loads some
*resources*: a computing task one processor of its host, a sending task links, each ``times`` its rate, as a
flow does in `engines.flows`. So a collective is one task that loads every link it crosses. What comes *after*
a task may begin when that is done, or, along a *pipelined* edge, when that has given out its first unit.

Source: Wang et al., "MXDAG: A Hybrid Abstraction for Emerging Applications", HotNets 2021 (arXiv 2107.07442).
The terms are the paper's; formulas that it does not print are ours, and say so.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from math import inf
from typing import Literal

Kind = Literal["compute", "network"]
OVER = 0.05
"""Of what has been done of it: what is thought to be left of a task that should have ended."""


@dataclass(frozen=True, slots=True)
class GraphTask:
    """``size`` and ``unit``: seconds (compute) or bytes (network). ``loads``: (resource, times) of each
    resource it is on; a compute task has one, its processors, once. ``after``: names of tasks of the same job
    that must have ended; ``pipelined``: of those that must have given out a unit for each unit it takes in.
    ``coflow``: sending tasks of a job with the same name count as one coflow (Varys). ``command``: the
    program that computes, where it is run for real."""

    name: str
    kind: Kind
    size: float
    loads: tuple[tuple[str, float], ...]
    after: tuple[str, ...] = ()
    pipelined: tuple[str, ...] = ()
    unit: float = inf
    coflow: str = ""
    command: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class GraphJob:
    """Its tasks, in an order in which each stands behind those it comes after, of different names;
    ``begins``, seconds."""

    name: str
    tasks: tuple[GraphTask, ...]
    begins: float = 0.0


@dataclass(frozen=True, slots=True)
class PendingTask:
    """A task that has not ended: what is ``left`` (seconds or bytes), whether it is ``ready`` (nothing that
    it comes after is under way) and, for computing, has ``begun``: it keeps its processor to its end."""

    job: str
    task: GraphTask
    left: float
    ready: bool
    begun: bool = False

    def under_way(self, done: float) -> PendingTask:
        """What is seen of it once so much is done."""
        left = self.task.size - done if done < self.task.size else OVER * done
        return replace(self, left=left, begun=self.task.kind == "compute")


@dataclass(frozen=True, slots=True)
class Observation:
    """What `decide` sees at ``now``: every task that has not ended of jobs that have come, job by job as they
    came and in the order of their tasks (after `split`), sizes as they are believed to be. ``resources``:
    processors of a host, or bytes/s of a link. ``schedule``: one of `SCHEDULES`."""

    now: float
    resources: dict[str, float]
    pending: tuple[PendingTask, ...]
    schedule: str


@dataclass(frozen=True, slots=True)
class TaskShare:
    """How a sending task is served: smaller ``priority`` first, strictly; equal ones by ``weight``; at most
    ``cap`` bytes/s."""

    job: str
    task: str
    priority: int = 0
    weight: float = 1.0
    cap: float = inf


@dataclass(frozen=True, slots=True)
class Decision:
    """``begin``: (job, task) of computing tasks that get a processor now. ``shares``: of every ready sending
    task. ``until``: look again by then even if nothing ends, seconds; later than now."""

    begin: tuple[tuple[str, str], ...]
    shares: tuple[TaskShare, ...]
    until: float = inf


SCHEDULES = ("fair", "fifo", "sebf", "cpath", "mxdag")
"""Max-min of all; first come; smallest effective bottleneck first with MADD (Varys); critical path of
computing alone; least slack first with altruism between jobs."""
