"""Which job a free worker takes next, which checkpoints may be forgotten, and what room sandboxes may take.

What sandboxes write goes into the pool, whose bytes are taken from the disk when it is made. A sandbox of
which nobody said how much it may write gets a bound that fits the pool: one that runs wild must not stop the
others.

Source: Crab (arXiv 2604.28138), section 5: queues, retention.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field

from windtunnel.agents.sandbox.model import CheckpointManifest, PolicyInput


@dataclass(frozen=True)
class Queued(PolicyInput["Pick"]):
    """A worker is free. Names of the jobs that wait, each queue in the order of arrival; a job is urgent when
    somebody already waits for it (the model's reply has arrived). ``in_a_row``: urgent ones taken since the
    last normal one; ``most_urgent``: how many may be."""

    urgent: tuple[str, ...]
    normal: tuple[str, ...]
    in_a_row: int
    most_urgent: int


@dataclass(frozen=True)
class Pick:
    """The job that runs next."""

    job: str


def picked(queued: Queued) -> Pick:
    """Urgent ones first, but after ``most_urgent`` in a row one normal one."""
    turn_of_normal = queued.in_a_row >= queued.most_urgent and queued.normal
    return Pick(queued.urgent[0] if queued.urgent and not turn_of_normal else queued.normal[0])


@dataclass
class Queues:
    """The jobs that wait for a worker, named by strings."""

    most_urgent: int = 4
    _normal: deque[str] = field(default_factory=deque, init=False)
    _urgent: deque[str] = field(default_factory=deque, init=False)
    _in_a_row: int = field(default=0, init=False)

    def __len__(self) -> int:
        return len(self._normal) + len(self._urgent)

    def add(self, job: str, *, urgent: bool = False) -> None:
        (self._urgent if urgent else self._normal).append(job)

    def promote(self, job: str) -> bool:
        """Make a waiting job urgent; False when it does not wait here (any more)."""
        if job not in self._normal:
            return False
        self._normal.remove(job)
        self._urgent.append(job)
        return True

    def remove(self, job: str) -> bool:
        """Forget a waiting job; False when it does not wait here."""
        for queue in (self._normal, self._urgent):
            if job in queue:
                queue.remove(job)
                return True
        return False

    def queued(self) -> Queued | None:
        """What there is to pick from; None where nothing waits."""
        if not len(self):
            return None
        return Queued(tuple(self._urgent), tuple(self._normal), self._in_a_row, self.most_urgent)

    def take(self, pick: Pick) -> str:
        """Let the picked job go; its name."""
        if pick.job in self._urgent:
            self._in_a_row += 1
        else:
            self._in_a_row = 0
        self.remove(pick.job)
        return pick.job


RETENTION = 20
"""How much of the past is kept: the newest so many checkpoints of each sandbox, and every one that is pinned,
labelled, the tip of a sandbox, or the base of a fork that lives."""


@dataclass(frozen=True)
class StoredCheckpoint:
    """A checkpoint that is there. ``named``: pinned or labelled; ``tip``: the newest of some sandbox."""

    id: str
    created: float
    named: bool
    tip: bool


@dataclass(frozen=True)
class CheckpointHistory(PolicyInput["Forget"]):
    """The checkpoints of one sandbox, and whether it ``exists`` still. ``keep``: as `RETENTION`."""

    checkpoints: tuple[StoredCheckpoint, ...]
    exists: bool
    keep: int


@dataclass(frozen=True)
class Forget:
    """Ids of the checkpoints that go, oldest first."""

    checkpoints: tuple[str, ...]


def forgotten(past: CheckpointHistory) -> Forget:
    """What neither `RETENTION` nor anything alive needs."""
    # by time, not by turn: after a rollback the new branch counts from an earlier turn
    oldest_first = sorted(past.checkpoints, key=lambda stored: (stored.created, stored.id))
    recent = {stored.id for stored in oldest_first[-past.keep :]} if past.exists and past.keep else set()
    return Forget(
        tuple(stored.id for stored in oldest_first if not (stored.id in recent or stored.named or stored.tip))
    )


def forgettable(
    manifests: Iterable[CheckpointManifest],
    tips: Mapping[str, str],
    retention: int,
    decide: Callable[[str, CheckpointHistory], Forget] = lambda _, past: forgotten(past),
) -> tuple[list[str], frozenset[str]]:
    """Checkpoints to drop, oldest first, and the ids of snapshots and images that those that stay need.

    ``tips``: for every sandbox that exists, its newest checkpoint. ``decide`` is asked of each sandbox, by
    its name. A checkpoint that stays keeps the snapshot and the image that it names, even when the checkpoint
    that made them is dropped.
    """
    by_box: dict[str, list[CheckpointManifest]] = {}
    for manifest in manifests:
        by_box.setdefault(manifest.box, []).append(manifest)
    live = set(tips.values())
    dropped: list[CheckpointManifest] = []
    needed: set[str] = set()
    for box, own in by_box.items():
        stored = (
            StoredCheckpoint(
                manifest.id, manifest.created, bool(manifest.pinned or manifest.label), manifest.id in live
            )
            for manifest in own
        )
        gone = set(decide(box, CheckpointHistory(tuple(stored), box in tips, retention)).checkpoints)
        for checkpoint in own:
            if checkpoint.id in gone:
                dropped.append(checkpoint)
            else:
                needed |= {part.id for part in (checkpoint.files, checkpoint.image) if part is not None}
    dropped.sort(key=lambda manifest: (manifest.created, manifest.id))
    return [manifest.id for manifest in dropped], frozenset(needed)


USUAL = 10 << 30
MOST_SHARE = 0.8
"""Of the pool, for one sandbox."""
HOSTS_CHOICE = 0
"""As a limit: what the host gives."""


def disk_limit(requested: int | None, pool: int, *, bounded: bool) -> int | None:
    """Bytes that a sandbox may use beyond its image, in a pool of so many; None for no bound."""
    if requested != HOSTS_CHOICE:
        return requested
    return min(USUAL, int(pool * MOST_SHARE)) if bounded else None
