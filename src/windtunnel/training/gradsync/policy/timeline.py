"""What an iteration takes with a plan: gradients, codecs and collectives on three resources that each do one
thing at a time, with all their overlap.

Backward makes group after group on the device; each group's tasks follow one another, each on its resource
as soon as that is free. A resource takes what became ready first, of equal ones that of the earlier group:
so decoding on the device delays gradients that are made after it, and the network is busy with one group
while the next is encoded. Source: Espresso (EuroSys '23), section 4.3; checked against a plain simulation
with an event queue.

`Costs` has the tasks of every group under every option that it may have, so that trying another choice is
one call of compiled code.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from windtunnel.base.compiled import jit
from windtunnel.training.gradsync.policy.options import RESOURCES, GroupTask

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]
MOST = 12
"""Tasks of one option."""
EACH = len(RESOURCES)


class Costs(NamedTuple):
    """``seconds[g, o, i]``, ``resource[g, o, i]``: task i of group g under its option o; ``length[g, o]`` of
    them, and ``options[g]`` options. ``backward[g]``: of computing before the group is ready. ``forward``,
    ``after``: as in `SyncProfile`."""

    seconds: Floats
    resource: Ints
    length: Ints
    options: Ints
    backward: Floats
    forward: float
    after: float

    @classmethod
    def of(
        cls, groups: Sequence[Sequence[Sequence[GroupTask]]], backward: Sequence[float], forward: float,
        after: float,
    ) -> Costs:  # fmt: skip
        """``groups[g][o]`` are the tasks of an option of a group; groups may have different numbers."""
        most = max((len(group) for group in groups), default=1)
        seconds = np.zeros((len(groups), most, MOST))
        resource = np.zeros((len(groups), most, MOST), np.int64)
        count = np.zeros((len(groups), most), np.int64)
        first: dict[int, int] = {}  # groups of one size share their options
        for g, alternatives in enumerate(groups):
            same = first.setdefault(id(alternatives), g)
            if same != g:
                seconds[g], resource[g], count[g] = seconds[same], resource[same], count[same]
                continue
            for o, work in enumerate(alternatives):
                count[g, o] = len(work)
                for i, task in enumerate(work):
                    seconds[g, o, i], resource[g, o, i] = task.seconds, task.resource
        options = np.array([len(alternatives) for alternatives in groups], np.int64)
        return cls(
            seconds, resource, count, options, np.asarray(backward, float), float(forward), float(after)
        )

    def iteration(self, choice: Ints) -> float:
        """Seconds of an iteration where group g has option ``choice[g]``."""
        return float(iteration_seconds(self, choice))

    def schedule(self, choice: Ints) -> tuple[float, Floats]:
        """The seconds, and when each task begins and ends, [groups, tasks, 2]; nan where there is none.
        Task 0 is the group's backward; the option's follow."""
        times = np.full((len(choice), MOST + 1, 2), np.nan)
        return float(run(self, choice, times)), times


@jit
def iteration_seconds(costs: Costs, choice: Ints) -> float:
    """Seconds of an iteration, for compiled code."""
    return run(costs, choice, np.empty((0, 0, 2)))


@jit
def run(costs: Costs, choice: Ints, times: Floats) -> float:
    """List scheduling: at each turn the task that can begin first does. ``queue[r]`` has the groups whose
    next task is for resource r, by when they were ready, in a ring: those from ``head`` to ``tail``."""
    seconds, resource, count, _, backward, forward, after = costs
    groups = len(choice)
    keep = len(times) > 0
    free = np.zeros(EACH)
    free[0] = forward
    size = 1
    while size < groups:
        size *= 2
    mask = size - 1
    queue = np.empty((EACH, size), np.int64)
    head = np.zeros(EACH, np.int64)
    tail = np.zeros(EACH, np.int64)
    ready = np.empty(groups)
    step = np.zeros(groups, np.int64)
    computed = 0  # groups whose backward is done
    next_ready = forward  # since when backward could go on
    end = forward
    left = groups
    while left > 0:
        first, first_ready, r = np.inf, np.inf, -1
        for number in range(EACH):
            if head[number] < tail[number]:
                waits = ready[queue[number, head[number] & mask]]
                start = max(free[number], waits)
                if start < first or (start == first and waits < first_ready):
                    first, first_ready, r = start, waits, number
        start = max(free[0], next_ready)
        # what was ready at the same moment, such as encoding what was just made, goes before backward
        if computed < groups and (start < first or (start == first and next_ready < first_ready)):
            g = computed
            computed += 1
            stop = start + backward[g]
            next_ready = stop
            free[0] = stop if computed < groups else stop + after
            end = max(end, free[0])
        else:
            g = queue[r, head[r] & mask]
            head[r] += 1
            start = first
            stop = start + seconds[g, choice[g], step[g]]
            free[r] = stop
            end = max(end, stop)
            step[g] += 1
        if keep:
            times[g, step[g], 0], times[g, step[g], 1] = start, stop
        ready[g] = stop
        if step[g] == count[g, choice[g]]:
            left -= 1
            continue
        r = resource[g, choice[g], step[g]]
        place = tail[r]
        tail[r] += 1
        while place > head[r]:
            before = queue[r, (place - 1) & mask]
            if ready[before] < stop or (ready[before] == stop and before < g):
                break
            queue[r, place & mask] = before
            place -= 1
        queue[r, place & mask] = g
    return end
