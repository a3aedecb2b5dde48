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
        self.last_signs: dict[K, float] = {}
        self._last_look: float | None = None

    def renew(self, key: K, now: float) -> None:
        """A sign of life."""
        self.last_signs[key] = max(now, self.last_signs.get(key, now))

    def end(self, key: K) -> None:
        """Nobody waits for its signs any more."""
        self.last_signs.pop(key, None)

    def forgive(self, now: float) -> bool:
        """To be called before each look. Whether the looker was stopped: then everybody begins anew."""
        before, self._last_look = self._last_look, now
        if before is None or now - before <= self.seconds / 2:
            return False
        self.last_signs = {key: max(now, sign) for key, sign in self.last_signs.items()}
        return True

    def silent(self, now: float) -> dict[K, float]:
        """Who is, and for how many seconds."""
        return {key: now - sign for key, sign in self.last_signs.items() if now - sign > self.seconds}
