"""What checkpoints hold, in bytes: process images (raw as CRIU writes them, or what they added to the page
store), file data that a snapshot holds and the one before does not, and manifests. The first image of each
session counts, for every policy.
"""

from __future__ import annotations

import operator
from collections.abc import Iterator, Sequence
from dataclasses import astuple, dataclass
from functools import partial
from pathlib import Path

from benchmarks.agents.sandbox.harness import SOURCE, Seat, new_name, opened, own_home, sessions
from benchmarks.agents.sandbox.sessions import replay
from benchmarks.harness.rows import Row, figure
from windtunnel.agents.sandbox.host import Host
from windtunnel.agents.sandbox.model import Manifest
from windtunnel.agents.sandbox.policy import PolicyName
from windtunnel.agents.sandbox.traces import Trace

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
            f"bytes less than full every turn, {name}", "", 1 - amount / full.without_store, goal,
            published=0.87 if goal else None, source=SOURCE, note=f"{amount / len(traces):,.0f} B of"
            f" {full.without_store / len(traces):,.0f} B a session; {of}",
        )  # fmt: skip


def _all(home: Path, policy: PolicyName, traces: Sequence[Trace]) -> Bytes:
    """Each session on a host of its own, so that none finds another's pages in the store."""
    total = Bytes()
    for trace in traces:
        with opened(home / policy / trace.name, policy=policy) as host:
            seat = Seat.new(host, new_name("bytes"))
            replay(trace, seat, on_open=seat.save, on_turn=partial(_end, seat))
            for manifest in seat.box.log().checkpoints:
                total += bytes_of(manifest, _stored(host, manifest.id))
    return total


def _stored(host: Host, id: str) -> int:
    """Bytes of a manifest on the disk."""
    with host.context.store.reading() as db:
        (count,) = db.execute("SELECT length(data) FROM manifest WHERE id=?", (id,)).fetchone()
    return int(count)


def _end(seat: Seat, *_: object) -> None:
    seat.end_turn()
