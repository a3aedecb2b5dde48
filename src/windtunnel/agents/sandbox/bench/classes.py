"""Is a class ever weaker than the truth? Every turn against two independent judges.

The referee compares two full looks at the sandbox, before and after the turn, taken from the host: every
file, descriptor, process, port and shell. The generator (and whoever wrote the shipped sessions) knows the
true class of each turn, also where only memory changed.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial

from windtunnel.agents.sandbox.bench.harness import new_name, opened, own_home
from windtunnel.agents.sandbox.bench.sessions import Seat, sessions
from windtunnel.agents.sandbox.errors import SandboxError
from windtunnel.agents.sandbox.live.host import Host
from windtunnel.agents.sandbox.model import Turn, TurnClass
from windtunnel.agents.sandbox.traces.observe import Observation
from windtunnel.agents.sandbox.traces.replay import Output, replay
from windtunnel.agents.sandbox.traces.schema import Trace, TraceTurn
from windtunnel.agents.sandbox.traces.score import weaker
from windtunnel.bench.measure import side_by_side
from windtunnel.bench.rows import Row

SECTION = "false-none"


@dataclass(frozen=True)
class Judged:
    """A turn, what was decided, what is true, and the referee's objection (empty: none)."""

    trace: str
    turn: TraceTurn
    decided: Turn
    objection: str

    @property
    def words(self) -> str:
        truth = self.turn.true_class.word if self.turn.true_class is not None else "unknown"
        return (
            f"{self.trace} turn {self.turn.turn} ({self.turn.command.splitlines()[0][:60]!r}): "
            f"{self.decided.turn_class.word}, in truth {truth}"
        )


def false_none_rows(quick: bool) -> Iterator[Row]:
    with own_home() as home, opened(home) as host:
        traces = sessions(quick, generated=8)
        found = side_by_side([partial(judged, host, trace) for trace in traces], os.cpu_count() or 1)
    turns = [one for session in found for one in session]
    yield from rows(turns)


def rows(turns: list[Judged]) -> Iterator[Row]:
    objected = [one for one in turns if one.objection]
    known = [one for one in turns if one.turn.true_class is not None]
    weak = [one for one in known if one.decided.turn_class < (one.turn.true_class or TurnClass.NONE)]
    strong = [one for one in known if one.decided.turn_class > (one.turn.true_class or TurnClass.NONE)]
    yield Row(
        SECTION,
        f"weaker than two full looks allow, of {len(turns)} turns",
        "turns",
        measured=len(objected),
        target="0",
        met=not objected,
        note="; ".join(f"{one.words}: {one.objection}" for one in objected[:8]),
    )
    yield Row(
        SECTION,
        f"weaker than the true class, of {len(known)} turns",
        "turns",
        measured=len(weak),
        target="0",
        met=not weak,
        note="; ".join(one.words for one in weak[:8]),
    )
    yield Row(
        SECTION,
        f"stronger than the true class, of {len(known)} turns",
        "turns",
        measured=len(strong),
        note="costs bytes, loses nothing; " + causes(strong),
    )


def causes(strong: list[Judged]) -> str:
    """Why classes were stronger than needed, the most frequent cause first."""
    counts: dict[str, int] = {}
    for one in strong:
        truth = one.turn.true_class or TurnClass.NONE
        reason = one.decided.reasons[0] if one.decided.reasons else "no reason"
        cause = "wrote memory and received input" if "received input" in reason else reason
        key = f"{truth.word} as {one.decided.turn_class.word}: {cause}"
        counts[key] = counts.get(key, 0) + 1
    order = sorted(counts.items(), key=lambda item: -item[1])
    return "; ".join(f"{number} × {cause}" for cause, number in order[:4])


def judged(host: Host, trace: Trace) -> list[Judged]:
    """Play ``trace``; judge each turn by what the host sees before and after it."""
    seat = Seat.new(host, new_name("judged"))
    found: list[Judged] = []
    before: list[Observation] = []
    programs = ""

    def open_() -> None:
        nonlocal programs
        seat.save()
        programs = seat.programs()
        before.append(seat.watch())

    def end(turn: TraceTurn, _: Output) -> None:
        line = seat.end_turn()
        after = seat.watch()
        found.append(Judged(trace.name, turn, line, weaker(line.turn_class, before.pop(), after)))
        before.append(after)

    try:
        replay(trace, seat, on_open=open_, on_turn=end)
        if seat.programs() != programs:
            raise SandboxError(f"session {trace.name} wrote where the referee does not look")
    finally:
        host.remove(seat.box.name)
    return found
