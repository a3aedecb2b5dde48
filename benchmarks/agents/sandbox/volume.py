"""What checkpoints hold: bytes, how many turns need which class, and whether a class is ever too weak.

``bytes``: a session's bytes are those of all its checkpoints: process images (raw as CRIU writes them, or
what they added to the page store), file data that a snapshot holds and the one before does not, and
manifests. The first image of each session counts, for every policy.

``false-none`` holds every turn against two independent judges. The referee compares two full looks at the
sandbox, before and after the turn, taken from the host: every file, descriptor, process, port and shell. The
generator (and whoever wrote the shipped sessions) knows the true class of each turn, also where only memory
changed.
"""

from __future__ import annotations

import operator
import os
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import astuple, dataclass
from functools import partial
from pathlib import Path

from benchmarks.agents.sandbox.harness import SOURCE, Seat, new_name, opened, own_home, played, sessions
from benchmarks.figures import figure
from benchmarks.harness.measure import side_by_side
from benchmarks.harness.rows import Row
from windtunnel.agents.sandbox.errors import SandboxError
from windtunnel.agents.sandbox.live.host import Host
from windtunnel.agents.sandbox.model import Manifest, Turn, TurnClass
from windtunnel.agents.sandbox.policy import PolicyName
from windtunnel.agents.sandbox.traces.observe import Observation
from windtunnel.agents.sandbox.traces.replay import Output, replay
from windtunnel.agents.sandbox.traces.schema import Trace, TraceTurn
from windtunnel.agents.sandbox.traces.score import weaker

POLICIES: tuple[PolicyName, ...] = ("semantic", "full")


@dataclass(frozen=True)
class Bytes:
    """What checkpoints wrote: images as CRIU wrote them, what these added to the page store, file data, and
    manifests."""

    raw: int = 0
    stored: int = 0
    files: int = 0
    manifests: int = 0

    def __add__(self, other: Bytes) -> Bytes:
        return Bytes(*map(operator.add, astuple(self), astuple(other)))

    @property
    def with_store(self) -> int:
        return self.stored + self.files + self.manifests

    @property
    def without_store(self) -> int:
        return self.raw + self.files + self.manifests


def bytes_of(manifest: Manifest, size: int) -> Bytes:
    """What one checkpoint wrote; parts that it takes over from an earlier one cost nothing. ``size``: of its
    manifest file."""
    image = manifest.image if manifest.image and manifest.image.id == manifest.id else None
    files = manifest.files if manifest.files and manifest.files.id == manifest.id else None
    return Bytes(
        raw=image.bytes_raw if image else 0,
        stored=image.bytes_new if image else 0,
        files=files.bytes_new if files else 0,
        manifests=size,
    )


def bytes_rows(quick: bool) -> Iterator[Row]:
    traces = sessions(quick)
    with own_home() as home:
        semantic, full = (_all(home, policy, traces) for policy in POLICIES)
    of = f"{len(traces)} sessions, {sum(len(trace.turns) for trace in traces)} turns"
    for name, amount, goal in (
        ("semantic: classes, page store, class shell", semantic.with_store, ">= 95%"),
        ("full every turn, with the page store", full.with_store, ""),
        ("semantic without the page store", semantic.without_store, ""),
    ):
        yield figure(
            "bytes", f"bytes less than full every turn, {name}", "", 1 - amount / full.without_store, goal,
            published=0.87 if goal else None, source=SOURCE, note=f"{amount / len(traces):,.0f} B of"
            f" {full.without_store / len(traces):,.0f} B a session; {of}",
        )  # fmt: skip


def _all(home: Path, policy: PolicyName, traces: Sequence[Trace]) -> Bytes:
    """Each session on a host of its own, so that none finds another's pages in the store."""
    total = Bytes()
    for trace in traces:
        with opened(home / policy / trace.name, policy=policy) as host:
            for manifest, size in played(host, trace, new_name("bytes")).manifests:
                total += bytes_of(manifest, size)
    return total


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
            f"{self.decided.wanted.word}, in truth {truth}"
        )


def false_none_rows(quick: bool) -> Iterator[Row]:
    with own_home() as home, opened(home) as host:
        traces = sessions(quick, generated=8)
        found = side_by_side([partial(judged, host, trace) for trace in traces], os.cpu_count() or 1)
    yield from judged_rows([one for session in found for one in session])


def judged_rows(turns: list[Judged]) -> Iterator[Row]:
    objected = [one for one in turns if one.objection]
    known = [one for one in turns if one.turn.true_class is not None]
    weak = [one for one in known if one.decided.wanted < (one.turn.true_class or TurnClass.NONE)]
    strong = [one for one in known if one.decided.wanted > (one.turn.true_class or TurnClass.NONE)]
    for name, of, found, goal, note in (
        ("weaker than two full looks allow", turns, objected, "0", _told(objected)),
        ("weaker than the true class", known, weak, "0", _told(weak)),
        ("stronger than the true class", known, strong, "", causes(strong)),
    ):
        yield figure("false-none", f"{name}, of {len(of)} turns", "turns", len(found), goal, note=note)


def _told(turns: Sequence[Judged]) -> str:
    return "; ".join(f"{one.words} {one.objection}" for one in turns[:8])


def causes(strong: list[Judged]) -> str:
    """Why classes were stronger than needed, the most frequent cause first."""
    counts: Counter[str] = Counter()
    for one in strong:
        truth, reasons = one.turn.true_class or TurnClass.NONE, one.decided.reasons or ("no reason",)
        counts[f"{truth.word} as {one.decided.wanted.word}: {reasons[0]}"] += 1
    return "; ".join(f"{number} × {cause}" for cause, number in counts.most_common(4))


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
        found.append(Judged(trace.name, turn, line, weaker(line.wanted, before.pop(), after)))
        before.append(after)

    try:
        replay(trace, seat, on_open=open_, on_turn=end)
        if seat.programs() != programs:
            raise SandboxError(f"session {trace.name} wrote where the referee does not look")
    finally:
        host.remove(seat.box.name)
    return found
