"""Real data between captured ranks: what one rank says to another as a Python object.

Ranks are captured in processes of their own, in a fixed order, so that a rank may wait for what an earlier
one has said and never for a later one: nothing can deadlock, and the result does not depend on timing. A
message is a file, written under another name and renamed.
"""

from __future__ import annotations

import hashlib
import pickle
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from windtunnel.base import atomic

WAIT_SECONDS = 120.0
POLL_SECONDS = 0.002
ANYBODY = -1


@dataclass
class Mailbox:
    """``earlier`` are the ranks whose capture started before this rank's, or is complete."""

    directory: Path
    rank: int
    earlier: frozenset[int]
    counts: dict[str, int] = field(default_factory=dict)

    def post(self, topic: str, content: Any, *, for_all: bool = False) -> None:
        """Say something under a topic; the k-th post of a topic is read by the k-th `read`.

        ``for_all``: what this rank says, any rank that plays the same part would say too, so that it also
        answers who asks a rank that is not captured.
        """
        number = self._next(f"post {topic}")
        for path in [self._path(self.rank, topic, number)] + [self._path(ANYBODY, topic, number)] * for_all:
            atomic.replace(path, pickle.dumps(content))

    def read(self, sender: int, topic: str) -> tuple[bool, Any]:
        """The next thing that ``sender`` said under ``topic``: (True, content), or (False, None) when the
        sender is not captured before this rank or does not say it in time."""
        number = self._next(f"read {sender} {topic}")
        if sender not in self.earlier:
            said = self._path(ANYBODY, topic, number)
            return (True, pickle.loads(said.read_bytes())) if said.exists() else (False, None)
        path = self._path(sender, topic, number)
        done = self.directory / f"done-{sender}"
        give_up = time.monotonic() + WAIT_SECONDS
        while not path.exists():
            if (done.exists() and not path.exists()) or time.monotonic() > give_up:
                return False, None
            time.sleep(POLL_SECONDS)
        return True, pickle.loads(path.read_bytes())

    def close(self) -> None:
        """Nothing more comes from this rank: whoever waits for it goes on."""
        (self.directory / f"done-{self.rank}").touch()

    def _next(self, key: str) -> int:
        number = self.counts.get(key, 0)
        self.counts[key] = number + 1
        return number

    def _path(self, sender: int, topic: str, number: int) -> Path:
        digest = hashlib.sha256(topic.encode()).hexdigest()[:16]
        return self.directory / f"{sender}-{digest}-{number}"
