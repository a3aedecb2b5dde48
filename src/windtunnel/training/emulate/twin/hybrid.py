"""Virtual ranks beside live ones: when a collective ends in which both take part.

All ranks but the live ones are replayed, as a skeleton (`engines.replay.skeleton`): which call waits for
which, and how long after it. A call with live members is ready when its virtual members are, and when all its
live ones have said that they came; it ends for all at one time. So who is late delays the others, on either
side, and through them whoever meets these later.

The replay joins in at a step, when each live rank has come there (`Virtual.begin`). What virtual ranks
compute is scaled by the *pace*: what the live ranks took for themselves over what the model says that they
take: in the whole step, or between two calls that a live rank of their class makes too. So an error of the
cost model that is common to all ranks does not count.

A live rank's calls are those of the graph, in its order, step after step. What it calls before the replay
joins in, and what follows the last whole step, is met by virtual ranks at once.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace

import numpy as np

from windtunnel.engines.replay import ReplayJob
from windtunnel.engines.replay.skeleton import Mark, skeleton
from windtunnel.training.emulate.policy.groups import at, call_words
from windtunnel.training.emulate.policy.stitch import StitchedWorld
from windtunnel.training.emulate.twin.job import WorldJob

Pace = Callable[[int, int, int], float]
KEPT = 4
"""Units behind the slowest live rank that are remembered."""


@dataclass(frozen=True)
class HybridCall:
    """A call of a live rank as it says it. ``peer``: the other end of a message, else -1."""

    kind: str
    ranks: tuple[int, ...]
    nbytes: int
    peer: int

    @property
    def is_message(self) -> bool:
        return self.kind in ("send", "recv")

    def __str__(self) -> str:
        size = f" of {self.nbytes} bytes" if self.nbytes else ""
        return f"{self.kind}{size} in a group of {len(self.ranks)} ranks"


@dataclass(frozen=True)
class Expected:
    """The calls of a live rank in one unit (the steps that repeat): what each is, in words with its place in
    the program, and its join. ``own_s``: what the model says that the rank takes for itself; ``at_s``: of
    that, up to each call. ``alike``: joins whose other members are virtual ranks of its class."""

    calls: list[HybridCall]
    words: list[str]
    joins: list[int]
    own_s: float
    at_s: list[float] = field(default_factory=list)
    alike: frozenset[int] = frozenset()


def expected(world: StitchedWorld, job: WorldJob, rank: int, on_host: bool) -> Expected:
    """What the graph has of ``rank``."""
    colour = int(job.colour[rank])
    row = job.class_of(colour)
    calls, program = world.calls[row], job.programs[row]
    count, last = len(calls.event), program.copies - 1
    first = int(job.replay.rank_join_ptr[colour]) + last * count
    hybrid_calls, words = [], []
    for position in range(count):
        call = job.call(row, position)
        peer = call.family.peer(rank, call.channel[2]) if call.is_message else -1
        ranks, nbytes = tuple(call.family.group(rank).tolist()), max(call.row.in_bytes, call.row.out_bytes)
        hybrid_calls.append(HybridCall(call.row.kind, ranks, nbytes, peer))
        words.append(call_words(call.row) + at(calls.slice, int(calls.event[position])))
    nodes = slice(last * program.nodes, None)
    issue, duration = program.program.issue[nodes], program.program.duration[nodes]
    queue = program.program.queue[nodes]
    own = issue.sum() + duration.sum()
    if not on_host:
        busy = np.bincount(queue, weights=duration, minlength=1)
        own = max(float(issue.sum()), float(busy.max(initial=0.0)))
    joins = job.replay.rank_join[first : first + count].tolist()
    at_s = np.cumsum(issue + duration)[program.program.join[nodes] >= 0].tolist() if on_host else []
    ptr, owners, _ = job.members
    alike = [j for j in joins if {job.class_of(c) for c in owners[ptr[j] : ptr[j + 1]].tolist()} == {row}]
    return Expected(hybrid_calls, words, joins, float(own), at_s, frozenset(alike))


def without(job: ReplayJob, ranks: Sequence[int]) -> ReplayJob:
    """The job of all other simulated ranks; joins keep their numbers."""
    remaining = [rank for rank in range(job.ranks) if rank not in set(ranks)]
    parts = [job.rank_join[job.rank_join_ptr[rank] : job.rank_join_ptr[rank + 1]] for rank in remaining]
    return replace(
        job, rank_program=job.rank_program[remaining], compute_scale=job.compute_scale[remaining],
        issue_scale=job.issue_scale[remaining],
        rank_join_ptr=np.concatenate([[0], np.cumsum([len(part) for part in parts])]).astype(np.int64),
        rank_join=np.concatenate([np.zeros(0, np.int64), *parts]),
    )  # fmt: skip


@dataclass
class _Unit:
    """One round of the steps that repeat. ``delays[mark]``: of what it waits for, at the pace of this unit;
    ``lacking[mark]``: how much of that is not known; ``end``: when it ends, None before that is known."""

    delays: list[list[float]]
    lacking: list[int]
    ready: list[float]
    end: list[float | None]


class Virtual:
    """The virtual ranks, as far as the live ones have come.

    ``joined[live rank]``: its joins in a unit. Units are numbered from 0, the first with the replay in it.
    """

    def __init__(self, job: WorldJob, joined: dict[int, list[int]]) -> None:
        colours = [int(job.colour[rank]) for rank in joined]
        beside = without(job.replay, colours)
        marks: tuple[Mark, ...] = ()
        if beside.ranks:
            marks = skeleton(beside, job.programs[0].copies).marks
        self.members: dict[int, int] = {}  # of a join: live ranks
        for joins in joined.values():
            for join in joins:
                self.members[join] = self.members.get(join, 0) + 1
        marked_joins = {mark.join for mark in marks}
        marks += tuple(Mark(join, ()) for join in sorted(set(self.members) - marked_joins))
        self.marks = marks
        self.place = {mark.join: number for number, mark in enumerate(marks) if mark.join >= 0}
        self.seconds = [
            float(job.replay.join_duration[mark.join]) if mark.join >= 0 else 0.0 for mark in marks
        ]
        self.after: list[list[tuple[int, int, int]]] = [[] for _ in marks]
        for number, mark in enumerate(marks):
            for term, (source, back, _) in enumerate(mark.after):
                self.after[source].append((number, back, term))
        self.units: dict[int, _Unit] = {}
        self.started = 0.0

    def begin(self, seconds: float) -> None:
        """Nobody begins the first unit before this time."""
        self.started = max(self.started, seconds)

    def arrive(self, unit: int, join: int, seconds: float, pace: Pace) -> None:
        """A live rank has come to a join. ``pace``: of virtual ranks in units that begin now, between two
        joins, the one so many units before the other."""
        while unit not in self.units:
            self._add(pace)
        mark = self.place[join]
        arriving = self.units[unit]
        arriving.ready[mark] = max(arriving.ready[mark], seconds)
        arriving.lacking[mark] -= 1
        if arriving.lacking[mark] == 0:
            self._settle(unit, mark)

    def ended(self, unit: int, join: int) -> float | None:
        """When a join ends, None as long as somebody has not come."""
        if unit not in self.units:
            return 0.0 if unit < min(self.units, default=0) else None  # long ago, or not yet
        return self.units[unit].end[self.place[join]]

    def forget(self, unit: int) -> None:
        """No live rank asks for units before this one."""
        for old in [number for number in self.units if number < unit - KEPT]:
            del self.units[old]

    def _add(self, pace: Pace) -> None:
        number = max(self.units, default=-1) + 1
        count = len(self.marks)
        delays = [
            [delay * pace(self.marks[source].join, mark.join, back) for source, back, delay in mark.after]
            for mark in self.marks
        ]
        unit = self.units[number] = _Unit(delays, [0] * count, [self.started] * count, [None] * count)
        for place, mark in enumerate(self.marks):
            lacking = self.members.get(mark.join, 0)
            for (source, back, _), delay in zip(mark.after, delays[place], strict=True):
                if back > number:
                    ended: float | None = self.started
                else:
                    ended = self.units[number - back].end[source]
                if ended is None:
                    lacking += 1
                else:
                    unit.ready[place] = max(unit.ready[place], ended + delay)
            unit.lacking[place] = lacking
            if not lacking:
                unit.end[place] = unit.ready[place] + self.seconds[place]

    def _settle(self, number: int, place: int) -> None:
        ended = [(number, place)]
        while ended:
            number, place = ended.pop()
            unit = self.units[number]
            end = unit.end[place] = unit.ready[place] + self.seconds[place]
            for other, back, term in self.after[place]:
                later = self.units.get(number + back)
                if later is None:
                    continue
                later.ready[other] = max(later.ready[other], end + later.delays[other][term])
                later.lacking[other] -= 1
                if later.lacking[other] == 0:
                    ended.append((number + back, other))


@dataclass
class Free:
    """Calls outside of the replay, which only live ranks have to come to."""

    live: frozenset[int]
    came: dict[tuple[object, ...], dict[int, float]] = field(default_factory=dict)
    counts: dict[tuple[object, ...], int] = field(default_factory=dict)

    def arrive(self, rank: int, call: HybridCall, seconds: float) -> tuple[object, ...]:
        """A live rank has come to its next such call; the name of where it meets the others."""
        channel: tuple[object, ...] = (call.ranks,)
        if call.is_message:
            ends = (rank, call.peer) if call.kind == "send" else (call.peer, rank)
            channel = (call.ranks, ends)
        number = self.counts.get((rank, channel), 0)
        self.counts[rank, channel] = number + 1
        name = (*channel, number)
        self.came.setdefault(name, {})[rank] = seconds
        return name

    def ended(self, name: tuple[object, ...]) -> float | None:
        """When all live members have come."""
        ranks = name[1] if len(name) == 3 else name[0]
        here = self.came[name]
        assert isinstance(ranks, tuple)
        return max(here.values()) if self.live.intersection(ranks) <= set(here) else None
