"""Which job a free worker takes next, and which checkpoints may be forgotten.

Source: Crab (arXiv 2604.28138), section 5: queues, retention.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from windtunnel.agents.sandbox.model import Manifest


@dataclass
class Queues:
    """Which job a free worker takes: urgent ones first, but after ``most_urgent`` in a row one normal one.

    A job is urgent when somebody already waits for it (the model's reply has arrived). Within a queue the
    order is that of arrival. Jobs are named by strings.
    """

    most_urgent: int = 4
    fifo: bool = False
    """One queue in the order of arrival: what the urgent queue is compared with."""

    def __post_init__(self) -> None:
        self._normal: deque[str] = deque()
        self._urgent: deque[str] = deque()
        self._in_a_row = 0

    def __len__(self) -> int:
        return len(self._normal) + len(self._urgent)

    def add(self, job: str, *, urgent: bool = False) -> None:
        (self._urgent if urgent and not self.fifo else self._normal).append(job)

    def promote(self, job: str) -> bool:
        """Make a waiting job urgent; False when it does not wait here (any more)."""
        if self.fifo or job not in self._normal:
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

    def take(self) -> str | None:
        """The job to run next, or None."""
        turn_of_normal = self._in_a_row >= self.most_urgent and self._normal
        if self._urgent and not turn_of_normal:
            self._in_a_row += 1
            return self._urgent.popleft()
        self._in_a_row = 0
        return self._normal.popleft() if self._normal else None


@dataclass(frozen=True)
class Retention:
    """How much of the past is kept: the newest ``keep`` checkpoints of each sandbox, and every one that is
    pinned, labelled, the tip of a sandbox, or the base of a fork that lives."""

    keep: int = 20


def forgettable(
    manifests: Iterable[Manifest], tips: Mapping[str, str], retention: Retention
) -> tuple[list[str], frozenset[str]]:
    """Checkpoints to drop, oldest first, and the ids of snapshots and images that those that stay need.

    ``tips``: for every sandbox that exists, its newest checkpoint. A checkpoint that stays keeps the snapshot
    and the image that it names, even when the checkpoint that made them is dropped.
    """
    by_box: dict[str, list[Manifest]] = {}
    for manifest in manifests:
        by_box.setdefault(manifest.box, []).append(manifest)
    kept: list[Manifest] = []
    dropped: list[Manifest] = []
    live = set(tips.values())
    for box, own in by_box.items():
        # by time, not by turn: after a rollback the new branch counts from an earlier turn
        own.sort(key=lambda manifest: (manifest.created, manifest.id), reverse=True)
        for place, manifest in enumerate(own):
            recent = box in tips and place < retention.keep
            if recent or manifest.pinned or manifest.label or manifest.id in live:
                kept.append(manifest)
            else:
                dropped.append(manifest)
    needed = frozenset(
        part.id for manifest in kept for part in (manifest.files, manifest.image) if part is not None
    )
    dropped.sort(key=lambda manifest: (manifest.created, manifest.id))
    return [manifest.id for manifest in dropped], needed
