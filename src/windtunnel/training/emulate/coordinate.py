"""What live ranks say and are answered: their calls held against the graph, and the figures of their steps.

No process and no clock is here: `Coordinator` takes notes in the order in which each rank sent them, and
gives the answers that are known by then.
"""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from windtunnel.base.errors import HangError, ScriptError
from windtunnel.training.emulate.policy.groups import ranks_words
from windtunnel.training.emulate.twin.hybrid import Call, Expected, Free, Virtual

ALONE = 3
"""Steps before the replay joins in: the first has set-up in it, memory is counted up to the second, and the
third tells the pace."""


@dataclass(frozen=True)
class LiveStep:
    """A step of a live rank, in virtual seconds: of these ``own_s`` the program ran, and ``waited_s`` it
    waited. ``backend_s``: CPU seconds of windtunnel in its process, which are in none of these. ``hybrid``:
    the replay had part in it. ``loss``: of the last backward of a scalar."""

    step: int
    seconds: float
    own_s: float
    waited_s: float
    backend_s: float
    calls: int
    loss: float | None
    hybrid: bool


@dataclass
class LiveRank:
    """What is known of a live rank. ``meets[call]``: where call number so and so meets the others."""

    rank: int
    expected: Expected
    period: int
    meets: dict[int, tuple[str, Any, Any]] = field(default_factory=dict)
    calls: int = 0
    waits: int | None = None
    status: int | None = None  # exit status that it has said
    joined: int = -1  # steps after which the replay joins in: -1 before
    position: int = 0  # calls of the replay
    astray: str = ""  # the first call that the graph has otherwise
    steps: list[LiveStep] = field(default_factory=list)
    peak_bytes: int = 0
    last: tuple[float, ...] = (0.0,) * 5

    @property
    def unit(self) -> int:
        return self.position // max(1, len(self.expected.calls))


class Coordinator:
    """See the module. ``first``: the captured step (from 0) with which the sequence that repeats begins, and
    ``period`` its length."""

    def __init__(self, virtual: Virtual, graph: dict[int, Expected], first: int, period: int) -> None:
        self.virtual, self.period = virtual, period
        self.ranks = {rank: LiveRank(rank, one, period) for rank, one in graph.items()}
        self.free = Free(frozenset(graph))
        self.joins_after = next(step for step in range(ALONE, ALONE + period) if (step - first) % period == 0)
        self.paces: list[float] = []
        self.early: list[tuple[int, int, float]] = []  # arrivals before all live ranks were at the beginning
        self.begun = False

    @property
    def pace(self) -> float:
        return statistics.median(self.paces) if self.paces else 1.0

    def take(self, rank: int, notes: Sequence[Sequence[Any]]) -> None:
        """Notes of ``rank``, in order.

        Raises:
            ScriptError: it does not call what the graph has.
        """
        one = self.ranks[rank]
        for name, *content in notes:
            if name == "call":
                kind, ranks, nbytes, peer, seconds = content
                self._called(one, Call(kind, tuple(ranks), nbytes, peer), seconds)
            elif name == "wait":
                one.waits = content[0]
            elif name == "step":
                self._stepped(one, content)
            else:
                one.status = content[0]

    def answers(self) -> list[tuple[int, float]]:
        """Ranks whose wait is over, and when the call that they wait for ended."""
        found = []
        for one in self.ranks.values():
            if one.waits is not None and (end := self._ended(one, one.waits)) is not None:
                found.append((one.rank, end))
                one.meets.pop(one.waits)
                one.waits = None
        return found

    def check(self) -> None:
        """Raises:
        HangError: every live rank has ended or waits for one that has, or that waits as well.
        """
        waiting = [one for one in self.ranks.values() if one.waits is not None]
        ended = [one.rank for one in self.ranks.values() if one.status is not None]
        if waiting and len(waiting) + len(ended) == len(self.ranks):
            call = waiting[0].meets[waiting[0].waits or 0][2]
            others = [rank for rank in self.ranks if rank in call.ranks and rank != waiting[0].rank]
            over = sorted(set(others) & set(ended))
            which = f"{ranks_words(over)}, which ended without it" if over else f"{ranks_words(others)}"
            raise HangError(f"the live ranks would hang: rank {waiting[0].rank} waits in {call} for {which}")

    def _called(self, one: LiveRank, call: Call, seconds: float) -> None:
        number, one.calls = one.calls, one.calls + 1
        calls = one.expected.calls
        if one.joined >= 0 and not one.astray:
            place = one.position % len(calls) if calls else 0
            if calls and call == calls[place]:
                unit, join = one.unit, one.expected.joins[place]
                one.position += 1
                one.meets[number] = ("graph", (unit, join), call)
                if self.begun:
                    self.virtual.arrive(unit, join, seconds, self.pace)
                else:
                    self.early.append((unit, join, seconds))
                return
            wanted = f"{one.expected.words[place]} (call {place + 1} of {len(calls)})" if calls else "no call"
            one.astray = f"it called {call}, and the replayed graph has {wanted}"
        one.meets[number] = ("free", self.free.arrive(one.rank, call, seconds), call)

    def _ended(self, one: LiveRank, number: int) -> float | None:
        if number not in one.meets:
            return 0.0  # waited for before
        kind, where, _ = one.meets[number]
        if kind == "free":
            return self.free.ended(where)
        return self.virtual.ended(*where)

    def _stepped(self, one: LiveRank, content: Sequence[Any]) -> None:
        *figures, peak, loss = content
        number = len(one.steps) + 1
        before = one.last
        one.last = tuple(figures)
        passed = [after - earlier for after, earlier in zip(one.last, before, strict=True)]
        seconds, own_s, waited_s, spent_s, count = passed
        one.steps.append(
            LiveStep(number, seconds, own_s, waited_s, spent_s, int(count), loss, one.joined >= 0)
        )
        one.peak_bytes = peak or one.peak_bytes
        if one.joined >= 0:
            self._held_against(one, number)
        if number >= ALONE and number % self.period == 0 and one.expected.own_s > 0:
            took = sum(step.own_s for step in one.steps[-self.period :])
            self.paces.append(took / one.expected.own_s)
        if number == self.joins_after:
            one.joined = number
            self._begin()

    def _held_against(self, one: LiveRank, number: int) -> None:
        """At the end of a step: it has called all that the graph has of it."""
        calls, wrong = len(one.expected.calls), one.astray
        units, rest = divmod(number - one.joined, self.period)
        if not wrong and not rest and one.position < units * calls:
            place = one.position % calls
            wrong = f"it ended without {one.expected.words[place]} (call {place + 1} of {calls})"
        if wrong:
            raise ScriptError(f"live rank {one.rank} left the job in its step {number}: {wrong}")
        self.virtual.forget(min(other.unit for other in self.ranks.values()))

    def _begin(self) -> None:
        if any(one.joined < 0 for one in self.ranks.values()):
            return
        self.begun = True
        self.virtual.begin(max(self._clock(one) for one in self.ranks.values()))
        for unit, join, seconds in self.early:
            self.virtual.arrive(unit, join, seconds, self.pace)
        self.early.clear()

    def _clock(self, one: LiveRank) -> float:
        """When a rank ended the step after which the replay joins in."""
        return sum(step.seconds for step in one.steps[: one.joined])
