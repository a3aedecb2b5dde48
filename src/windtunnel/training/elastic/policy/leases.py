"""Who is silent: the one way in which a part of a job notices that another gives no sign of life.

The supervisor looks so at its hosts, an agent at its trainers and at the supervisor. Silence counts only
while somebody looks: where nobody did for half a lease it was the looker that was stopped, and signs of life
wait for him to be read. Time is handed in (monotonic seconds).

Source: leases (Gray and Cheriton, SOSP 1989).
"""

from __future__ import annotations

from collections.abc import Hashable
from typing import Generic, TypeVar

K = TypeVar("K", bound=Hashable)


class Leases(Generic[K]):
    """Each is silent after ``seconds`` without a sign of life."""

    def __init__(self, seconds: float) -> None:
        self.seconds = seconds
        self.heard: dict[K, float] = {}
        self._looked: float | None = None

    def renew(self, key: K, now: float) -> None:
        """A sign of life."""
        self.heard[key] = max(now, self.heard.get(key, now))

    def end(self, key: K) -> None:
        """Nobody waits for its signs any more."""
        self.heard.pop(key, None)

    def forgive(self, now: float) -> bool:
        """To be called before each look. Whether the looker was stopped: then everybody begins anew."""
        before, self._looked = self._looked, now
        if before is None or now - before <= self.seconds / 2:
            return False
        self.heard = {key: max(now, heard) for key, heard in self.heard.items()}
        return True

    def silent(self, now: float) -> dict[K, float]:
        """Who is, and for how many seconds."""
        return {key: now - heard for key, heard in self.heard.items() if now - heard > self.seconds}
