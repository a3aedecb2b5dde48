"""What checkpoints in memory and on disk are described by.

A *shard* is what one rank saves: ``"rank3"``; state that all ranks hold alike (a DDP replica) is the shard
``"shared"``. A *copy* is a shard of one step in one place: a host's memory, or storage. A step is *complete*
when every shard that it needs has a verified copy.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Tier = Literal["memory", "peer", "storage"]

SLOT_HEADER = 4096
"""Bytes of a slot (a file in memory that holds a copy) before its data."""

SHARED = "shared"
"""The shard of what all ranks hold alike."""


@dataclass(frozen=True)
class Copy:
    """One complete copy of a shard, as its holder lists it.

    ``place``: where the holder stands in the present membership. ``world``: of the job when it was saved, so
    the step needs the shards rank0 .. rank{world-1} (and ``"shared"`` where ``has_shared``). ``layout``:
    digest of what lies where in it. ``nbytes``: its data. ``checksum``: xxh3_128 of the data, hexadecimal.
    """

    place: int
    shard: str
    step: int
    world: int
    has_shared: bool
    generation: int
    layout: str
    nbytes: int
    checksum: str


@dataclass(frozen=True)
class Placement:
    """Where copies lie: ``holders[p]`` are the places that hold the shards of place ``p``, ``p`` itself
    first."""

    kind: str
    copies: int
    holders: tuple[tuple[int, ...], ...]


@dataclass(frozen=True)
class Source:
    """Where a shard is to be read: a tier, and the place that holds it (None for storage)."""

    tier: Tier
    place: int | None


@dataclass(frozen=True)
class Commit:
    """The supervisor's log says that all copies of ``step`` were complete. ``course``: the generation that
    its copies carry."""

    step: int
    course: int


@dataclass(frozen=True)
class Persisted:
    """The supervisor's log says that ``step`` was written to storage by this run; ``check``: the checksum of
    its manifest there."""

    step: int
    course: int
    check: str


@dataclass(frozen=True)
class Log:
    """What the supervisor's log says of checkpoints. ``newest``: the newest step that was ever committed, -1
    for none."""

    committed: tuple[Commit, ...] = ()
    persisted: tuple[Persisted, ...] = ()
    newest: int = -1


@dataclass(frozen=True)
class RestorePlan:
    """The step to go on from, and for every shard of it the sources to try, in this order.

    ``step`` is None where nothing can be restored: the job begins at the beginning, or, where ``failed``
    says why, it ends. ``ignored``: whole steps that were passed over since no log knows of them.
    """

    step: int | None
    world: int = 0
    sources: tuple[tuple[str, tuple[Source, ...]], ...] = ()
    reason: str = ""
    ignored: tuple[str, ...] = ()
    failed: str = ""


@dataclass(frozen=True)
class Health:
    """How well the present state is kept.

    ``committed``: newest step that was committed or that all went back to, -1 for none. ``replication``:
    fewest verified copies that any shard of it has now, as far as is known. ``nbytes``: memory that slots
    take on this host. ``age``: seconds since ``committed`` was committed, None for never.
    """

    committed: int
    replication: int
    wanted: int
    nbytes: int
    age: float | None
