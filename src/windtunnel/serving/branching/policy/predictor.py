"""How far measured steps are from those that the step model says, learned while serving."""

from __future__ import annotations

from collections import deque

import numpy as np

WEIGHT = 0.05
"""Of a new step in what is known."""
RECENT = 200
"""Steps of which the margins are."""
BUCKETS = 10
"""Of rows: 1, 2 to 3, 4 to 7, …"""
SPANS = tuple(2**at for at in range(7))
"""Steps in a row of which each margin is: 1, 2, 4, …, 64."""


def bucket(count: int) -> int:
    """Rows whose steps are off by the same share, or steps with the same margin, ascending."""
    return min(max(count, 1).bit_length(), BUCKETS) - 1


class Predictor:
    """``gain``: measured over modelled seconds as it is now (an exponential average), ``widths``: what is
    left of that ratio in each `bucket` of rows, and ``margins``: for each of `SPANS` the share by which 95 %
    of so many recent steps in a row did not exceed what was expected of them all when the first began. The
    longer, the more errors cancel out. A step of a host that stood still counts as three times its prediction
    at most."""

    def __init__(self) -> None:
        self.gain = 1.0
        self.widths = (1.0,) * BUCKETS
        self.margins: tuple[float, ...] = (0.0,)
        self._steps: deque[tuple[float, float, float]] = deque(maxlen=RECENT)  # seconds, without gain, gain
        self._since = 0

    def measured(self, rows: int, modelled: float, seconds: float) -> None:
        """One step with ``rows`` took ``seconds``; the model alone said ``modelled``."""
        if modelled <= 0:
            return
        place = bucket(rows)
        shaped = modelled * self.widths[place]
        ratio = min(seconds / (shaped * self.gain), 3.0)
        self._steps.append((ratio * shaped * self.gain, shaped, self.gain))
        self.gain *= 1 + WEIGHT * (ratio - 1)
        widths = list(self.widths)
        widths[place] *= 1 + WEIGHT * (ratio - 1)
        self.widths = tuple(widths)
        self._since += 1
        if self._since >= 10:  # at every step it would cost more than it tells
            self._since = 0
            self.margins = self._margins()

    def _margins(self) -> tuple[float, ...]:
        measured, shaped, gains = np.array(self._steps).T
        measured, shaped = (np.concatenate(([0.0], each.cumsum())) for each in (measured, shaped))
        margins = []
        for span in SPANS:
            if 2 * span > len(gains):  # too few to know
                break
            expected = (shaped[span:] - shaped[:-span]) * gains[: len(gains) - span + 1]
            over = np.sort((measured[span:] - measured[:-span]) / expected) - 1
            margins.append(max(0.0, float(over[int(0.95 * (len(over) - 1))])))
        return tuple(margins)
