"""A job for the replay engine without its computing: which join waits for which, and how long after its end.

Between joins a replay is arithmetic of *max* and *plus*: a join is ready at the latest of some earlier marks'
ends, each plus a delay, and that sum is all that the nodes between them come to. So a step of 20,000 nodes
with 100 joins is a graph of some 150 *marks* that gives the same times whatever the joins last, also when
other jobs make them last longer. A mark is a join, or a point without duration at which delays from several
marks are taken together, so that marks do not all depend on all.

One copy of the step is read. What it begins with (the tail of every queue, the host's clock, nodes that the
next step waits for) are marks of the copy before: steps overlap in the skeleton as they do in the replay.

Source: max-plus linear systems, Baccelli et al., Synchronization and Linearity (1992), chapter 2.
"""

from __future__ import annotations

from collections.abc import Container, Mapping, Sequence
from dataclasses import dataclass, field
from graphlib import CycleError, TopologicalSorter

import numpy as np

from windtunnel.engines.replay.layout import Program, ReplayJob

MOST_TERMS = 3
"""A point that more marks may hold back becomes a mark."""
Terms = dict[tuple[int, int], float]
"""(mark, how many steps back) to seconds after its end."""


@dataclass(frozen=True)
class Mark:
    """``join``: of the last copy, or -1. ``after``: (mark, steps back, seconds after its end) of what it
    waits for."""

    join: int
    after: tuple[tuple[int, int, float], ...]


@dataclass(frozen=True)
class Skeleton:
    """``marks``: each behind those of its step that it waits for. ``ends[rank]``: the mark at which the
    rank's step is over."""

    marks: tuple[Mark, ...]
    ends: tuple[int, ...]

    def times(self, seconds: Mapping[int, float], steps: int) -> list[list[float]]:
        """When each mark of each step ends, where joins last ``seconds`` and nobody else uses the network."""
        ends: list[list[float]] = []
        for step in range(steps):
            ends.append([])
            for mark in self.marks:
                ready = [
                    (ends[step - back][term] if back <= step else 0.0) + delay
                    for term, back, delay in mark.after
                ]
                ends[step].append(max(ready, default=0.0) + seconds.get(mark.join, 0.0))
        return ends


def skeleton(
    job: ReplayJob, copies: int, *, barrier: bool = False, receives: Container[tuple[int, int]] = ()
) -> Skeleton:
    """The skeleton of the last of the ``copies`` steps that the job's programs repeat. With ``barrier`` a
    rank begins a step when it has ended the one before. ``receives``: (rank, ordinal) of join nodes that the
    join does not wait for: their rank has what was sent when both have come.

    Raises:
        ValueError: joins wait for each other in a circle.
    """
    builder = _SkeletonMarks()
    runs = [_Runs(program, copies) for program in job.programs]
    ends = tuple(
        _walk(builder, job, rank, runs[job.rank_program[rank]], barrier, receives)
        for rank in range(job.ranks)
    )
    return builder.skeleton(ends)


class _Runs:
    """The last copy of a program as runs of nodes of one queue, between which nothing else depends on any.

    Of each run: its first and last node, the host's seconds for all of it, the queue's, and the longest of
    (issuing up to a node, working from it on)."""

    def __init__(self, program: Program, copies: int) -> None:
        n = self.nodes = len(program) // copies
        first = n * (copies - 1)
        self.queue = program.queue[first:]
        self.join = program.join[first:].astype(np.int64)
        self.queues = int(program.queue.max(initial=0)) + 1
        ptr = program.dep_ptr
        self.deps: dict[int, list[tuple[int, int]]] = {}  # node: (node, steps back)
        sources: set[int] = set()
        self.carried: set[int] = set()
        for node in np.flatnonzero(np.diff(ptr[first:])).tolist():
            earlier = self.deps[node] = []
            for dep in program.dep[ptr[first + node] : ptr[first + node + 1]].tolist():
                back = copies - 1 - dep // n
                earlier.append((dep % n, back))
                (self.carried if back else sources).add(dep % n)
        self.sources = sources | self.carried
        alone = (self.queue == 0) | (self.join >= 0)
        begins = alone | np.concatenate([[True], self.queue[1:] != self.queue[:-1]])[:n]
        begins[1:] |= alone[:-1]
        begins[list(self.deps)] = True
        begins[[node + 1 for node in self.sources if node + 1 < n]] = True
        self.first = np.flatnonzero(begins)
        self.last = np.append(self.first[1:], n)[: len(self.first)] - 1
        issue, work = program.issue[first:], np.where(alone & (self.join >= 0), 0.0, program.duration[first:])
        self.issue = np.add.reduceat(issue, self.first) if n else np.zeros(0)
        self.work = np.add.reduceat(work, self.first) if n else np.zeros(0)
        self._columns = issue, work

    def scaled(self, compute: float, host: float) -> np.ndarray:
        """The longest of (issuing up to a node, working from it on) of each run."""
        issue, work = self._columns
        if not self.nodes:
            return np.zeros(0)
        run = np.repeat(np.arange(len(self.first)), self.last - self.first + 1)
        done = np.cumsum(work) - work
        issued = np.cumsum(issue)
        from_on = (done - done[self.first][run]) * -compute  # plus the run's work
        up_to = (issued - issued[self.first][run] + issue[self.first][run]) * host
        longest: np.ndarray = np.maximum.reduceat(up_to + from_on, self.first) + self.work * compute
        return longest


@dataclass
class _SkeletonMarks:
    """Marks as they are made: (join, terms), and those of joins."""

    marks: list[tuple[int, Terms]] = field(default_factory=list)
    joins: dict[int, int] = field(default_factory=dict)

    def add(self, join: int = -1) -> int:
        self.marks.append((join, {}))
        return len(self.marks) - 1

    def merged(self, *parts: Terms) -> Terms:
        """The latest of all, without what another of them implies."""
        terms: Terms = {}
        for part in parts:
            for name, delay in part.items():
                if delay > terms.get(name, -1.0):
                    terms[name] = delay
        for (mark, back), delay in list(terms.items()) if len(terms) > 1 else ():
            if not back:
                for name, before in self.marks[mark][1].items():
                    if name in terms and name != (mark, 0) and before + delay >= terms[name]:
                        del terms[name]
        if len(terms) <= MOST_TERMS:
            return terms
        mark = self.add()
        self.marks[mark][1].update(terms)
        return {(mark, 0): 0.0}

    def skeleton(self, ends: Sequence[int]) -> Skeleton:
        """Without marks that only stand for another one, or that nobody waits for."""

        def resolved(terms: Terms) -> Terms:
            delays: Terms = {}
            for (mark, back), delay in terms.items():
                while not back and mark not in keep and len(after := self.marks[mark][1]) == 1:
                    ((other, more), seconds) = next(iter(after.items()))
                    mark, back, delay = other, back + more, delay + seconds
                if self.marks[mark][1] != {(mark, 1): 0.0} or mark in keep:
                    delays[mark, back] = max(delay, delays.get((mark, back), 0.0))
            return delays

        keep = {*ends, *self.joins.values()}
        terms = {mark: resolved(after) for mark, (_, after) in enumerate(self.marks)}
        nodes = sorted(keep)
        reachable = set(nodes)
        for mark in nodes:  # grows while it is read
            new = {term for term, _ in terms[mark]} - reachable
            reachable |= new
            nodes += sorted(new)
        graph = {mark: {term for term, back in terms[mark] if not back} for mark in sorted(reachable)}
        try:
            order = [*TopologicalSorter(graph).static_order()]
        except CycleError:
            raise ValueError("joins wait for each other in a circle") from None
        place = {mark: number for number, mark in enumerate(order)}
        marks = tuple(
            Mark(
                self.marks[mark][0], tuple((place[term], back, d) for (term, back), d in terms[mark].items())
            )
            for mark in order
        )
        return Skeleton(marks, tuple(place[mark] for mark in ends))


def _walk(
    builder: _SkeletonMarks,
    job: ReplayJob,
    rank: int,
    runs: _Runs,
    barrier: bool,
    receives: Container[tuple[int, int]],
) -> int:
    """Add the marks of a rank; the one of its end."""
    compute, host_scale = float(job.compute_scale[rank]), float(job.issue_scale[rank])
    joins = job.rank_join[job.rank_join_ptr[rank] : job.rank_join_ptr[rank + 1]]
    join_numbers = builder.joins
    over = builder.add()
    cuts = [over if barrier else builder.add() for _ in range(runs.queues)]
    carried = {node: builder.add() for node in sorted(runs.carried)}
    tails: list[Terms] = [{(cut, 1): 0.0} for cut in cuts]
    ends: dict[int, Terms] = {}
    longest = runs.scaled(compute, host_scale).tolist()
    columns = (runs.first, runs.last, runs.issue * host_scale, runs.work)
    for run, (first, last, issue, work) in enumerate(
        zip(*(column.tolist() for column in columns), strict=True)
    ):
        queue, join = int(runs.queue[first]), int(runs.join[first])
        waits = [{(carried[d], b): 0.0} if b else ends[d] for d, b in runs.deps.get(first, ())]
        if queue == 0:
            begun = _later(builder.merged(tails[0], *waits), issue)
            ended = _later(begun, work * host_scale)
        else:
            begun = builder.merged(tails[queue], _later(tails[0], issue), *waits)
            behind = builder.merged(tails[queue], *waits)
            ended = builder.merged(_later(behind, work * compute), _later(tails[0], longest[run]))
            tails[0] = _later(tails[0], issue)
        if join >= 0:
            number = int(joins[join])
            if number not in join_numbers:
                join_numbers[number] = builder.add(number)
            mark = join_numbers[number]
            if (rank, join) in receives:
                ended = builder.merged(begun, {(mark, 0): 0.0})
            else:
                for name, delay in begun.items():
                    builder.marks[mark][1][name] = max(delay, builder.marks[mark][1].get(name, 0.0))
                ended = {(mark, 0): 0.0}
        if last in carried:
            builder.marks[carried[last]][1].update(ended)
        tails[queue] = ended
        if last in runs.sources:
            ends[last] = ended
    if not barrier:
        for cut, tail in zip(cuts, tails, strict=True):
            builder.marks[cut][1].update(tail)
    builder.marks[over][1].update(builder.merged(*tails))
    return over


def _later(terms: Terms, seconds: float) -> Terms:
    return {name: delay + seconds for name, delay in terms.items()} if seconds else terms
