"""From what was counted to what the policy is told: the same for the kernel's counters and the twin's."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from windtunnel.network.hostrate.policy import Decision, Observation, WindowSettings, WindowTenant

Counts = NDArray[Any]
PERIOD = 0.002
"""Seconds between decisions (the paper's Delta, which it does not print)."""
TURNS = 10
"""Over which what was sent is measured (its M, not printed either)."""
ROUND = 0.05
"""Seconds in which a flow that sends is acknowledged at least once."""


class WindowMeter:
    """Remembers counts of a few turns, and what is in force. Arrays have a figure for each entity.

    ``round``: its number goes to whoever counts flows; each flow is counted once in every round.
    """

    def __init__(self, settings: WindowSettings, entities: Sequence[tuple[str, float]]) -> None:
        self.settings, self.round = settings, 1
        self._entities = entities
        self._past: deque[tuple[float, Counts]] = deque(maxlen=TURNS + 1)
        self._began: tuple[float, Counts] | None = None
        self._flows = np.zeros(len(entities), np.int64)
        self._total, self._turns = 0, [0] * len(entities)

    def look(self, now: float, backlog: float, acked: Counts, counts: Counts) -> Observation:
        """``now``: seconds of a clock that does not go back; ``backlog``: packets; ``acked``: packets that
        were ever acknowledged; ``counts``: flows that ever were, once for each round."""
        self._past.append((now, acked))
        if self._began is None:
            self._began = (now, counts)
        since = (counts - self._began[1]).astype(np.int64)
        flows = np.maximum(self._flows, since)
        if now - self._began[0] >= ROUND:
            self._flows, self._began = since, (now, counts)
            self.round += 1
        then, before = self._past[0]
        sent = (acked - before) / (now - then) if now > then else np.zeros(len(acked))
        return Observation(
            self.settings, backlog, self._total,
            tuple(
                WindowTenant(name, weight, float(rate), int(count), turn)
                for (name, weight), rate, count, turn in zip(
                    self._entities, sent, flows, self._turns, strict=True
                )
            ),
        )  # fmt: skip

    def took(self, decision: Decision) -> None:
        """What was decided is in force."""
        self._total = decision.total
        self._turns = [
            (share.turn + share.each[1]) % share.flows if share.flows else turn
            for share, turn in zip(decision.shares, self._turns, strict=True)
        ]
