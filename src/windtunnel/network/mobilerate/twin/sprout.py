"""A forecast of the link in the manner of Sprout (Winstein et al., NSDI 2013), to stand beside the others.

Every 20 ms: how likely each rate of packets is, by Brownian motion and what was acknowledged (Bayes), and how
many packets will pass within 100 ms and a round trip with a probability of 95 %: so many may be on their way.
*Sprout-like*: the forecast is made by the sender, not by the receiver; where packets found the queue empty, a
count says only that no fewer would have passed.
"""

from __future__ import annotations

import numpy as np
from scipy.stats import norm, poisson

from windtunnel.network.mobilerate.policy import Ack

TICK, HORIZON = 0.02, 0.1
SURE = 0.95
RATES = np.linspace(0.0, 1000.0, 128)
MOVES, ENDS = 200.0, 1.0
BUSY = 0.005
"""Seconds that the last packet waited, from which the link was busy."""


class SproutForecast:
    """``delay``: seconds of a round trip when nothing waits."""

    def __init__(self, delay: float) -> None:
        width = MOVES * np.sqrt(TICK)
        edges = np.concatenate([[-np.inf], (RATES[1:] + RATES[:-1]) / 2, [np.inf]])
        self._moves = np.diff(norm.cdf((edges[None, :] - RATES[:, None]) / width), axis=1)
        stays = np.exp(-ENDS * TICK)  # an outage goes on
        self._moves[0] = (1 - stays) * self._moves[0]
        self._moves[0, 0] += stays
        self._ticks = int(np.ceil((HORIZON + delay) / TICK))
        counts = np.arange(int(RATES[-1] * TICK * 3))
        self._likely = poisson.pmf(counts[:, None], RATES[None, :] * TICK)
        self._least = poisson.sf(counts[:, None] - 1, RATES[None, :] * TICK)
        self._total = poisson.cdf(np.arange(256)[:, None], RATES[None, :] * TICK * self._ticks)
        self._ahead = np.linalg.matrix_power(self._moves, self._ticks // 2)
        self._belief = np.full(len(RATES), 1 / len(RATES))
        self._turn, self._count, self._wait, self._base = 0, 0, 0.0, np.inf
        self._window, self._highest = 10, -1

    def update(self, now: float, acks: tuple[Ack, ...]) -> int:
        """How many packets may go in all."""
        for ack in acks:
            self._base = min(self._base, ack.at - ack.sent)
            self._wait = ack.at - ack.sent - self._base
            self._highest = max(self._highest, ack.number)
        self._count += len(acks)
        if int(now / TICK + 1e-6) > self._turn:
            self._turn += 1
            count = min(self._count, len(self._likely) - 1)
            likely = (self._likely if self._wait > BUSY else self._least)[count]
            belief = (self._belief @ self._moves) * likely + 1e-12
            self._belief, self._count = belief / belief.sum(), 0
            chance = self._total @ (self._belief @ self._ahead)
            self._window = max(int(np.searchsorted(chance, 1 - SURE)), 1)
        return self._highest + 1 + self._window
