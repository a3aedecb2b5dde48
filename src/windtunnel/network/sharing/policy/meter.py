"""From what was counted to what the policy is told: the same for the kernel's counters and the twin's."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from windtunnel.network.sharing.policy import HELD, Observation, SharingTenant

Counts = NDArray[Any]
PERIOD = 0.005
"""Seconds between decisions."""
WINDOW = 4
"""Turns over which what an entity sends is measured: at 5 ms, 20 ms."""


class RateMeter:
    """Remembers the counts of a few turns. All arrays have a figure for each entity, in one order."""

    def __init__(self) -> None:
        self._past: deque[tuple[float, Counts, Counts]] = deque(maxlen=WINDOW + 1)
        self._last_trouble: dict[int, float] = {}

    def look(
        self, now: float, line: float, entities: Sequence[SharingTenant], offered: Counts, trouble: Counts
    ) -> Observation:
        """``now``: seconds of a clock that does not go back. ``entities``: names, weights and promised rates.
        ``offered``: bytes that ever came; ``trouble``: bytes of them that were dropped or marked."""
        if self._past and len(self._past[-1][1]) != len(offered):  # the others are held back now, or no more
            self._past.clear()
            self._last_trouble.clear()
        if self._past:
            self._last_trouble |= {int(place): now for place in np.flatnonzero(trouble > self._past[-1][2])}
        self._past.append((now, offered, trouble))
        then, before, _ = self._past[0]
        rates = (offered - before).astype(float) / (now - then) if now > then else np.zeros(len(offered))
        return Observation(
            line,
            tuple(
                SharingTenant(entity.name, entity.weight, entity.rate, float(rate), self._since(place, now))
                for place, (entity, rate) in enumerate(zip(entities, rates, strict=True))
            ),
        )

    def _since(self, place: int, now: float) -> float | None:
        since = now - self._last_trouble[place] if place in self._last_trouble else None
        return since if since is not None and since <= 2 * HELD else None
