"""What live ranks say: their calls held against the graph, and their virtual clocks.

No process and no clock is here. `Coordinator` takes the notes of each rank in the order in which it wrote
them: its own time at each call, wait and end of a step. It goes through them as far as is known when calls
end: a rank that waits for a call to which another live rank has not come yet stands there.

A call that the graph has otherwise is held against a rank when it ends another step after it: what follows
the last step (a barrier, an evaluation) is not in the graph.
"""

from __future__ import annotations

import statistics
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from windtunnel.base.errors import HangError, ScriptError
from windtunnel.training.emulate.policy.groups import ranks_words
from windtunnel.training.emulate.summary import LiveStep
from windtunnel.training.emulate.twin.hybrid import Expected, Free, HybridCall, Virtual

ALONE = 3
"""Steps before the replay joins in: the first has set-up in it, memory is counted up to the second, and the
third tells the pace."""

UNITS = 16
"""That are remembered of a live rank, for virtual ranks to take."""


Place = tuple[Any, ...]
"""Where a call meets others: (unit, join) of the replay, or the name that `Free` gave it."""


@dataclass
class LiveRank:
    """What is known of a live rank. ``factor``: its device is so much slower. ``notes``: not gone through
    yet. ``now``: its virtual clock, when it had run ``own`` seconds itself. ``meets``: of each call that
    nobody waited for yet, whether the replay has it, and where it meets others. ``astray``: the first call
    that the graph has otherwise."""

    rank: int
    expected: Expected
    factor: float
    notes: deque[Sequence[Any]] = field(default_factory=deque)
    now: float = 0.0
    own: float = 0.0
    meets: dict[int, tuple[bool, Place, HybridCall]] = field(default_factory=dict)
    calls: int = 0
    status: int | None = None  # exit status that it has said
    joined: int = -1  # steps after which the replay joins in: -1 before
    position: int = 0  # calls of the replay
    astray: str = ""
    steps: list[LiveStep] = field(default_factory=list)
    peak_bytes: int = 0
    last: tuple[float, ...] = (0.0,) * 4
    at: list[float] = field(default_factory=list)  # own seconds at each call since the last unit
    units: list[list[float]] = field(default_factory=list)  # the same of whole units, and of their ends

    @property
    def unit(self) -> int:
        return self.position // max(1, len(self.expected.calls))


class Coordinator:
    """See the module. ``factors``: of each live rank. ``first``: the captured step (from 0) with which the
    sequence that repeats begins, and ``period`` its length. ``blocking``: every call is waited for at once,
    since messages take their time from the ranks."""

    def __init__(
        self, virtual: Virtual, graph: dict[int, Expected], factors: dict[int, float], first: int,
        period: int, blocking: bool,
    ) -> None:  # fmt: skip
        self.virtual, self.period, self.blocking = virtual, period, blocking
        self.ranks = {rank: LiveRank(rank, expected, factors[rank]) for rank, expected in graph.items()}
        self.free = Free(frozenset(graph))
        self.joins_after = next(step for step in range(ALONE, ALONE + period) if (step - first) % period == 0)
        self.paces: list[float] = []
        self.places = {
            join: (rank, place)
            for rank, expected in reversed(graph.items())
            for place, join in enumerate(expected.joins)
            if join in expected.alike
        }

    @property
    def pace(self) -> float:
        """Measured over modelled seconds of what live ranks do themselves; 1 before it is known."""
        return statistics.median(self.paces) if self.paces else 1.0

    def _between(self, source: int, join: int, back: int) -> float:
        """The pace between two joins, the one so many units before the other: that of the slowest virtual
        rank, where each has one of the live rank's last units. So they vary as that does."""
        (rank, i), (other, k) = self.places.get(source, (-1, 0)), self.places.get(join, (-2, 0))
        if rank != other or not self.ranks[rank].units:
            return self.pace
        model = self.ranks[rank].expected
        modelled = model.at_s[k] - model.at_s[i] + back * model.own_s
        virtual = len(model.calls[k].ranks) - 1
        took = max(unit[k] - unit[i] + back * unit[-1] for unit in self.ranks[rank].units[-virtual:])
        return took / modelled if modelled > 0 and took >= 0 else self.pace

    def take(self, rank: int, notes: Sequence[Sequence[Any]]) -> None:
        """Notes of ``rank``, in order.

        Raises:
            ScriptError: a rank does not call what the graph has.
            HangError: a rank waits for one that has ended.
        """
        self.ranks[rank].notes.extend(notes)
        moved = True
        while moved:
            moved = False
            for live in self.ranks.values():
                moved |= self._go_on(live)
        if any(rank.status is not None for rank in self.ranks.values()):
            self._check()

    def finish(self) -> None:
        """All have ended.

        Raises:
            HangError: their notes do not come to an end: they wait for each other in a circle.
        """
        stuck = [rank.rank for rank in self.ranks.values() if rank.notes]
        if stuck:
            raise HangError(f"live {ranks_words(stuck)} would wait for each other for ever")

    def _go_on(self, live_rank: LiveRank) -> bool:
        """Go through the notes as far as is known; whether that was any."""
        moved = False
        while live_rank.notes:
            name, own, *content = live_rank.notes[0]
            if name == "wait" and not self._waited(live_rank, own, content[0]):
                break
            if name in ("call", "wait") and live_rank.joined >= 0 and not self._begun:
                break
            live_rank.notes.popleft()
            moved = True
            live_rank.now += (own - live_rank.own) * live_rank.factor
            live_rank.own = own
            if name == "call":
                kind, ranks, nbytes, peer = content
                self._called(live_rank, HybridCall(kind, tuple(ranks), nbytes, peer))
                if self.blocking and kind not in ("send", "recv"):
                    live_rank.notes.appendleft(("wait", own, live_rank.calls - 1))
            elif name == "step":
                self._stepped(live_rank, *content)
            elif name == "end":
                live_rank.status = content[0]
        return moved

    def _waited(self, live_rank: LiveRank, own: float, number: int) -> bool:
        """Set the clock on to the end of that call; False if that is not known yet."""
        if number not in live_rank.meets:
            return True  # waited for before
        end = self._end(live_rank.meets[number])
        if end is None:
            return False
        live_rank.now = max(live_rank.now + (own - live_rank.own) * live_rank.factor, end)
        live_rank.own = own
        del live_rank.meets[number]
        return True

    def _end(self, meeting: tuple[bool, Place, HybridCall]) -> float | None:
        replayed, place, _ = meeting
        return self.virtual.ended(*place) if replayed else self.free.ended(place)

    @property
    def _begun(self) -> bool:
        return all(rank.joined >= 0 for rank in self.ranks.values())

    def _called(self, live_rank: LiveRank, call: HybridCall) -> None:
        number, live_rank.calls = live_rank.calls, live_rank.calls + 1
        live_rank.at.append(live_rank.own)
        calls = live_rank.expected.calls
        if live_rank.joined >= 0 and not live_rank.astray:
            place = live_rank.position % len(calls) if calls else 0
            if calls and call == calls[place]:
                unit, join = live_rank.unit, live_rank.expected.joins[place]
                live_rank.position += 1
                live_rank.meets[number] = True, (unit, join), call
                self.virtual.arrive(unit, join, live_rank.now, self._between)
                return
            graph_call = (
                f"{live_rank.expected.words[place]} (call {place + 1} of {len(calls)})"
                if calls
                else "no call"
            )
            live_rank.astray = f"it called {call}, and the replayed graph has {graph_call}"
        live_rank.meets[number] = False, self.free.arrive(live_rank.rank, call, live_rank.now), call

    def _stepped(
        self, live_rank: LiveRank, own: float, spent: float, calls: int, loss: float | None, peak: int
    ) -> None:
        number = len(live_rank.steps) + 1
        # the first step is told when the second begins: its figures are older than the clock
        now = live_rank.now - (live_rank.own - own) * live_rank.factor
        before, live_rank.last = live_rank.last, (now, own, spent, calls)
        seconds, own_s, spent_s, count = (b - a for a, b in zip(before, live_rank.last, strict=True))
        waited = seconds - own_s * live_rank.factor
        hybrid = live_rank.joined >= 0
        live_rank.steps.append(LiveStep(number, seconds, own_s, waited, spent_s, int(count), loss, hybrid))
        live_rank.peak_bytes = peak or live_rank.peak_bytes
        if hybrid:
            self._compare_step(live_rank, number)
        if number >= ALONE and number % self.period == 0 and live_rank.expected.own_s > 0:
            took = sum(step.own_s for step in live_rank.steps[-self.period :])
            self.paces.append(took / live_rank.expected.own_s)
        if (number - self.joins_after) % self.period == 0:
            self._timed(live_rank, own, number)
        if number == self.joins_after:
            live_rank.joined = number
            self.virtual.begin(live_rank.now)

    def _timed(self, live_rank: LiveRank, own: float, number: int) -> None:
        """A unit has ended: remember when its calls came in it."""
        began = sum(step.own_s for step in live_rank.steps[: -self.period])
        if number >= ALONE and len(live_rank.at) == len(live_rank.expected.at_s) > 0:
            live_rank.units = [*live_rank.units[1 - UNITS :], [at - began for at in (*live_rank.at, own)]]
        live_rank.at.clear()

    def _compare_step(self, live_rank: LiveRank, number: int) -> None:
        """At the end of a step: it has called all that the graph has of it."""
        calls, wrong = len(live_rank.expected.calls), live_rank.astray
        units, rest = divmod(number - live_rank.joined, self.period)
        if not wrong and not rest and live_rank.position < units * calls:
            place = live_rank.position % calls
            wrong = f"it ended without {live_rank.expected.words[place]} (call {place + 1} of {calls})"
        if wrong:
            raise ScriptError(f"live rank {live_rank.rank} left the job in its step {number}: {wrong}")
        self.virtual.forget(min(other.unit for other in self.ranks.values()))

    def _check(self) -> None:
        """Whether a rank waits for one that has ended."""
        over = {live.rank for live in self.ranks.values() if live.status is not None}
        for rank in self.ranks.values():
            for meeting in rank.meets.values():
                call = meeting[2]
                ranks = {call.peer} if call.is_message else set(call.ranks)
                gone = sorted(ranks & over - {rank.rank})
                if gone and self._end(meeting) is None:
                    raise HangError(
                        f"the live ranks would hang: rank {rank.rank} waits in {call} for"
                        f" {ranks_words(gone)}, which ended without it"
                    )
