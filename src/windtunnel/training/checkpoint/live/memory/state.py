"""What the parts of a memory service share: the membership, the slots, who holds what of which step, what is
committed, and the one lock.

A rank's step is *done* when each of its shards has reached all the hosts that are to hold it; that is posted,
and when every rank has posted, the step is committed.
"""

from __future__ import annotations

import mmap
import os
import struct
import threading
import time
from collections.abc import Collection, Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

from windtunnel.base.keys import Keys
from windtunnel.training.checkpoint.live.memory.folder import Folder
from windtunnel.training.checkpoint.live.memory.messages import StaleGeneration
from windtunnel.training.checkpoint.settings import MemoryLimits
from windtunnel.training.elastic.model import Membership


@dataclass
class _Shard:
    lacks: set[int]
    course: int


@dataclass
class Ledger:
    """``steps[rank][step][shard]``: where its copies are still to go."""

    _steps: dict[tuple[int, int], dict[str, _Shard]] = field(default_factory=dict)

    def saved(self, rank: int, step: int, shard: str, holders: Iterable[int], course: int) -> None:
        """This host has ``shard``, of the generation ``course``; the hosts ``holders`` are to get it."""
        self._steps.setdefault((rank, step), {})[shard] = _Shard(set(holders), course)
        # Only the newest steps of a rank can still be committed.
        for old in [key for key in self._steps if key[0] == rank and key[1] < step - 8]:
            del self._steps[old]

    def arrived(self, rank: int, step: int, shard: str, host: int) -> None:
        """``host`` has verified its copy."""
        entry = self._steps.get((rank, step), {}).get(shard)
        if entry is not None:
            entry.lacks.discard(host)

    def done(self, rank: int, step: int, shards: Collection[str]) -> int | None:
        """The generation that the copies of the rank's ``shards`` carry, the first time that all of them are
        where they are to be; else None."""
        entries = self._steps.get((rank, step), {})
        if not set(shards) <= entries.keys() or any(entries[shard].lacks for shard in shards):
            return None
        del self._steps[rank, step]
        return max(entry.course for entry in entries.values())


_BOARD = struct.Struct("<qq")


class Context(Protocol):
    """What a memory service needs of the agent around it. Called from any thread, never under a lock."""

    def post(self, key: str, rank: int, value: Any) -> None:
        """Contribute to an agreement, on behalf of a rank of this host."""

    def event(self, kind: str, **fields: Any) -> None:
        """For the run's log."""


@dataclass(frozen=True)
class RankReservation:
    """What a rank reserved. ``nbytes``: of its shards. ``holders``: ids of the hosts that hold copies of its
    own shard, without the own host."""

    nbytes: dict[str, int]
    holders: tuple[int, ...]


class Board:
    """The newest committed step, in a file that trainers map: they look without asking.

    The number is there twice; a reader that finds two different ones looks again.
    """

    def __init__(self, path: Path, *, create: bool = False) -> None:
        fd = os.open(path, os.O_RDWR | (os.O_CREAT if create else 0) | os.O_CLOEXEC, 0o600)
        try:
            if create:
                os.ftruncate(fd, _BOARD.size)
            self._map = mmap.mmap(fd, _BOARD.size)
        finally:
            os.close(fd)
        if create:
            self.write(-1)

    def write(self, step: int) -> None:
        """The number for all to see."""
        self._map[: _BOARD.size] = _BOARD.pack(step, step)

    def read(self) -> int:
        """The number now."""
        while True:
            first, second = _BOARD.unpack(self._map[: _BOARD.size])
            if first == second:
                return int(first)

    def close(self) -> None:
        """Unmap it."""
        self._map.close()


class State:
    """Hold ``changed`` (a condition that is notified after every change) around what is not a method."""

    def __init__(self, path: Path, keys: Keys, context: Context, limits: MemoryLimits) -> None:
        self.keys = keys
        self.changed = threading.Condition()
        self.folder = Folder(path, self.changed)
        self.context = context
        self.limits = limits
        self.board = Board(path / "committed", create=True)
        self.membership: Membership | None = None
        self.place: int | None = None
        self.committed = -1
        self.base = -1  # the step that all went back to last
        self.course = 0  # how often they did in this generation
        self.specs: dict[int, RankReservation] = {}
        self.ledger = Ledger()
        self.closed = False

    @property
    def generation(self) -> int:
        return -1 if self.membership is None else self.membership.generation

    @property
    def world(self) -> int:
        return 0 if self.membership is None else self.membership.world

    def saves(self, shard: str) -> bool:
        """Whether a rank of this host saves ``shard``."""
        with self.changed:
            return any(shard in spec.nbytes for spec in self.specs.values())

    def require(self, generation: int) -> None:
        """Go on only in ``generation``; wait for word of a newer one.

        Raises:
            StaleGeneration: another one is in force.
        """
        end = time.monotonic() + self.limits.membership
        with self.changed:
            while self.generation < generation and not self.closed:
                left = end - time.monotonic()
                if left <= 0:
                    raise StaleGeneration(f"generation {generation} is not known here yet")
                self.changed.wait(left)
            if self.generation != generation or self.closed:
                raise StaleGeneration(f"generation {generation} is over, {self.generation} is in force")

    def change(self, membership: Membership, place: int | None) -> None:
        """A new generation: what was under way in the old one is void; slots stay."""
        with self.changed:
            self.membership, self.place = membership, place
            self.specs = {}
            self.base, self.course = -1, 0
            self.ledger = Ledger()
            self.changed.notify_all()

    def commit(self, step: int, course: int) -> bool:
        """All ranks have posted ``step`` in this generation, whose copies carry ``course``; whether that is
        news."""
        with self.changed:
            if self.closed or step < self.committed:
                return False
            self._set(step)
            dropped = self.folder.retire(step, course, self.generation)
        if dropped:
            threading.Thread(target=dropped.clear, name="retired", daemon=True).start()
        return True

    @property
    def term(self) -> str:
        """What is agreed on counts for: the generation, and how often all went back in it."""
        return f"{self.generation}.{self.course}"

    def go_back(self, step: int, course: int) -> bool:
        """All ranks go on from ``step``: whatever lies after it is of an abandoned course. ``course``: how
        often they have gone back in this generation; whether that is news.

        Nothing is committed until a step has all its copies in this generation, ``step`` itself first: it
        may have been complete without having been committed, and what held copies of it may be lost.
        """
        with self.changed:
            news = course != self.course
            if news:  # what was posted or under way is of what they left
                self.ledger = Ledger()
            self.base, self.course = step, course
            self._set(-1)
            return news

    def _set(self, step: int) -> None:
        self.committed = step
        self.board.write(step)
        self.changed.notify_all()
