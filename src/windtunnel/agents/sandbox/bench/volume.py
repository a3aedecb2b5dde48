"""Bytes of the checkpoints of a session, and how many turns need which class.

A session's bytes are those of all its checkpoints: process images (raw as CRIU writes them, or
what they added to the page store), file data that a snapshot holds and the one before does not, and
manifests. The first image of each session counts, for every policy.

``shares`` counts the classes that were decided. Published: more than 75 % of turns leave nothing that
recovery needs (Crab, arXiv 2604.28138).
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from windtunnel.agents.sandbox.bench.harness import new_name, opened, own_home
from windtunnel.agents.sandbox.bench.sessions import Played, played, sessions
from windtunnel.agents.sandbox.model import Manifest, TurnClass
from windtunnel.agents.sandbox.policy import PolicyName
from windtunnel.agents.sandbox.traces import shipped
from windtunnel.agents.sandbox.traces.replay import Shares, shares
from windtunnel.agents.sandbox.traces.schema import Trace
from windtunnel.bench.rows import Row

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
        shell = {line.number for line in one.played.turns if line.turn_class is TurnClass.SHELL}
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
        decided = shares(line.turn_class for one in chosen for line in one.turns)
        true = shares(turn.true_class for one in chosen for turn in one.trace.turns)
        yield from class_rows(words, decided, true, published=not generated)


def class_rows(words: str, decided: Shares, true: Shares, *, published: bool) -> Iterator[Row]:
    """Shares of the classes as they were decided, with the true ones in the notes."""
    for one in TurnClass:
        none = one is TurnClass.NONE
        yield Row(
            "shares",
            f"turns of class {one.word}, {words}",
            "",
            measured=decided.share(one),
            published=0.75 if none and published else None,
            source=f"{SOURCE}: more than 75 %, on its own traces" if none and published else "",
            note=f"{getattr(decided, one.word)} of {decided.known} turns; true {true.share(one):.1%}"
            + ("; three quarters of none are drawn by choice" if none and not published else ""),
        )
