"""What checkpoints hold: bytes, how many turns need which class, and whether a class is ever too weak.

``bytes``: a session's bytes are those of all its checkpoints: process images (raw as CRIU writes them, or
what they added to the page store), file data that a snapshot holds and the one before does not, and
manifests. The first image of each session counts, for every policy.

``shares`` counts the classes that were decided. Published: more than 75 % of turns leave nothing that
recovery needs (Crab, arXiv 2604.28138).

``false-none`` holds every turn against two independent judges. The referee compares two full looks at the
sandbox, before and after the turn, taken from the host: every file, descriptor, process, port and shell. The
generator (and whoever wrote the shipped sessions) knows the true class of each turn, also where only memory
changed.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from benchmarks.agents.sandbox.harness import Played, Seat, new_name, opened, own_home, played, sessions
from benchmarks.harness.measure import side_by_side
from benchmarks.harness.rows import Row
from windtunnel.agents.sandbox.errors import SandboxError
from windtunnel.agents.sandbox.live.host import Host
from windtunnel.agents.sandbox.model import Manifest, Turn, TurnClass
from windtunnel.agents.sandbox.policy import PolicyName
from windtunnel.agents.sandbox.traces import shipped
from windtunnel.agents.sandbox.traces.observe import Observation
from windtunnel.agents.sandbox.traces.replay import Output, replay
from windtunnel.agents.sandbox.traces.schema import Trace, TraceTurn
from windtunnel.agents.sandbox.traces.score import weaker

SOURCE = "arXiv 2604.28138"


@dataclass(frozen=True)
class Bytes:
    """What checkpoints wrote: images as CRIU wrote them, what these added to the page store, file data, and
    manifests."""

    raw: int = 0
    stored: int = 0
    files: int = 0
    manifests: int = 0

    def __add__(self, other: Bytes) -> Bytes:
        return Bytes(
            self.raw + other.raw,
            self.stored + other.stored,
            self.files + other.files,
            self.manifests + other.manifests,
        )

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
        semantic = _all(home, "semantic", traces)
        full = _all(home, "full", traces)
    whole, cut = _sum(full).without_store, _sum(semantic).with_store
    of = f"{len(traces)} sessions, {sum(len(trace.turns) for trace in traces)} turns"
    yield _saved("semantic: classes, page store, class shell", cut, whole, of, target=0.95)
    yield _saved("full every turn, with the page store", _sum(full).with_store, whole, of)
    yield _saved("semantic without the page store", _sum(semantic).without_store, whole, of)
    yield _saved(
        "semantic without the class shell",
        without_shell(semantic, full),
        whole,
        "turns of class shell counted with what the full policy wrote at the same turn",
    )
    for name, found, amount in (
        ("full every turn, no page store", full, whole),
        ("full every turn, with the page store", full, _sum(full).with_store),
        ("semantic", semantic, cut),
    ):
        total = _sum(found)
        images = total.raw if amount == total.without_store else total.stored
        yield Row(
            "bytes",
            f"a session, {name}",
            "bytes",
            measured=amount / len(traces),
            note=f"in all sessions: images {images:,} B, file data {total.files:,} B, manifests "
            f"{total.manifests:,} B",
        )


def _saved(name: str, amount: int, whole: int, note: str, target: float | None = None) -> Row:
    saved = 1 - amount / whole
    return Row(
        "bytes",
        f"bytes less than full every turn, {name}",
        "",
        measured=saved,
        published=0.87 if target else None,
        source=SOURCE if target else "",
        target=f">= {target:.0%}" if target else "",
        met=saved >= target if target else None,
        note=note,
    )


@dataclass(frozen=True)
class Session:
    """A played session, and the bytes of each turn's checkpoint (turn 0: before the first)."""

    played: Played
    bytes: dict[int, Bytes]


def _all(home: Path, policy: PolicyName, traces: Sequence[Trace]) -> list[Session]:
    """Each session on a host of its own, so that none finds another's pages in the store."""
    found = []
    for trace in traces:
        with opened(home / policy / trace.name, policy=policy) as host:
            sizes: dict[str, int] = {}
            name = new_name("bytes")
            one = played(host, trace, name, sizes=sizes)
        amounts: dict[int, Bytes] = {}
        for manifest in one.manifests:
            added = bytes_of(manifest, sizes[manifest.id])
            amounts[manifest.turn] = amounts.get(manifest.turn, Bytes()) + added
        found.append(Session(one, amounts))
    return found


def _sum(found: Iterable[Session]) -> Bytes:
    return sum((amount for one in found for amount in one.bytes.values()), Bytes())


def without_shell(semantic: Sequence[Session], full: Sequence[Session]) -> int:
    """Bytes of the semantic policy if a turn of class shell needed a process image."""
    total = 0
    for one, other in zip(semantic, full, strict=True):
        shell = {line.number for line in one.played.turns if line.wanted is TurnClass.SHELL}
        for turn, amount in one.bytes.items():
            total += (other.bytes[turn] if turn in shell else amount).with_store
    return total


def shares_rows(quick: bool) -> Iterator[Row]:
    traces = sessions(quick)
    with own_home() as home, opened(home) as host:
        found = [played(host, trace, new_name("shares")) for trace in traces]
    own = {trace.name for trace in shipped()}
    for words, generated in (("shipped sessions", False), ("generated sessions", True)):
        chosen = [one for one in found if (one.trace.name not in own) is generated]
        decided = [line.wanted for one in chosen for line in one.turns]
        true = [turn.true_class for one in chosen for turn in one.trace.turns if turn.true_class is not None]
        yield from class_rows(words, decided, true, published=not generated)


def class_rows(
    words: str, decided: Sequence[TurnClass], true: Sequence[TurnClass], *, published: bool
) -> Iterator[Row]:
    """Shares of the classes as they were decided, with the true ones in the notes."""
    for one in TurnClass:
        none = one is TurnClass.NONE
        truth = true.count(one) / max(1, len(true))
        yield Row(
            "shares",
            f"turns of class {one.word}, {words}",
            "",
            measured=decided.count(one) / max(1, len(decided)),
            published=0.75 if none and published else None,
            source=f"{SOURCE}: more than 75 %, on its own traces" if none and published else "",
            note=f"{decided.count(one)} of {len(decided)} turns; true {truth:.1%}"
            + ("; three quarters of none are drawn by choice" if none and not published else ""),
        )


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
    yield Row(
        "false-none",
        f"weaker than two full looks allow, of {len(turns)} turns",
        "turns",
        measured=len(objected),
        target="0",
        met=not objected,
        note="; ".join(f"{one.words}: {one.objection}" for one in objected[:8]),
    )
    yield Row(
        "false-none",
        f"weaker than the true class, of {len(known)} turns",
        "turns",
        measured=len(weak),
        target="0",
        met=not weak,
        note="; ".join(one.words for one in weak[:8]),
    )
    yield Row(
        "false-none",
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
        key = f"{truth.word} as {one.decided.wanted.word}: {cause}"
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
        found.append(Judged(trace.name, turn, line, weaker(line.wanted, before.pop(), after)))
        before.append(after)

    try:
        replay(trace, seat, on_open=open_, on_turn=end)
        if seat.programs() != programs:
            raise SandboxError(f"session {trace.name} wrote where the referee does not look")
    finally:
        host.remove(seat.box.name)
    return found
