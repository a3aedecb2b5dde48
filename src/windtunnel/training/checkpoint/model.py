"""What checkpoints in memory and on disk are described by.

A *shard* is what one rank saves: ``"rank3"``; state that all ranks hold alike (a DDP replica) is the shard
``"shared"``. A *copy* is a shard of one step in one place: a host's memory, or storage. A step is *complete*
when every shard that it needs has a verified copy.
"""

from __future__ import annotations

from dataclasses import dataclass

SLOT_HEADER = 4096
"""Bytes of a slot (a file in memory that holds a copy) before its data."""

SHARED = "shared"
"""The shard of what all ranks hold alike."""


@dataclass(frozen=True)
class Shard:
    """What one shard of one step is, wherever a copy of it lies: slots, storage, messages and plans have this
    record.

    ``name``: "rank3" or "shared". ``world``: of the job when it was saved, so the step needs the shards rank0
    .. rank{world-1} (and "shared" where ``has_shared``). ``generation``: in which it was saved. ``layout``:
    digest of what lies where in it. ``nbytes``: its data. ``checksum``: xxh3_128 of the data, hexadecimal; ""
    while it is being written.
    """

    name: str
    step: int
    world: int
    has_shared: bool
    generation: int
    layout: str
    nbytes: int
    checksum: str = ""

    @property
    def content(self) -> tuple[str, str, int]:
        """Equal of two shards that are the same to the last bit."""
        return self.checksum, self.layout, self.nbytes

    @property
    def needed(self) -> tuple[str, ...]:
        """The names of all shards of its step."""
        return needed_shards(self.world, self.has_shared)


def needed_shards(world: int, has_shared: bool) -> tuple[str, ...]:
    """The shards of a complete step."""
    return (*(f"rank{rank}" for rank in range(world)), *((SHARED,) if has_shared else ()))


@dataclass(frozen=True)
class Copy:
    """One complete copy of a shard. ``place``: where its holder stands in the present membership, None for
    storage."""

    place: int | None
    shard: Shard


@dataclass(frozen=True)
class StoredStep:
    """A step in storage. ``bad``: why it cannot be used (torn, foreign, of another version), "" if it can.
    ``check``: the checksum of its manifest."""

    step: int
    generation: int = 0
    shards: tuple[Shard, ...] = ()
    bad: str = ""
    check: str = ""


@dataclass(frozen=True)
class Placement:
    """Where copies lie: ``holders[p]`` are the places that hold the shards of place ``p``, ``p`` itself
    first."""

    kind: str
    copies: int
    holders: tuple[tuple[int, ...], ...]


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
    """What the supervisor's log says of checkpoints. ``newest``: the newest step that was ever committed,
    ``due``: the last one that is to be in storage; -1 for none."""

    committed: tuple[Commit, ...] = ()
    persisted: tuple[Persisted, ...] = ()
    newest: int = -1
    due: int = -1


@dataclass(frozen=True)
class RestorePlan:
    """The step to go on from, and for every shard of it the copies to try, in this order.

    ``step`` is None where nothing can be restored: the job begins at the beginning, or, where ``failed``
    says why, it ends. ``ignored``: whole steps that were passed over since no log knows of them. ``store``:
    the step goes to storage, since the last one that was to be there is not, and comes no more. ``unread``:
    storage, which could not be read, may have a newer one.
    """

    step: int | None
    world: int = 0
    sources: tuple[tuple[Copy, ...], ...] = ()
    reason: str = ""
    ignored: tuple[str, ...] = ()
    failed: str = ""
    store: bool = False
    unread: bool = False
