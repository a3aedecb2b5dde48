"""How far measured steps are from those that the step model says, learned while serving."""

from __future__ import annotations

from collections import deque

WEIGHT = 0.05
"""Of a new step in what is known."""
RECENT = 200
"""Steps whose residuals make the margin."""
BUCKETS = 10
"""Of rows: 1, 2 to 3, 4 to 7, …"""


def bucket(rows: int) -> int:
    """Rows whose steps are off by the same share."""
    return min(max(rows, 1).bit_length(), BUCKETS) - 1


class Predictor:
    """``gain``: measured over modelled seconds as it is now (an exponential average), ``widths``: what is
    left of that ratio in each `bucket` of rows, and ``margin``: the relative residual that 95 % of the recent
    steps did not exceed. A step of a host that stood still counts as three times its prediction at most."""

    def __init__(self) -> None:
        self.gain, self.margin = 1.0, 0.0
        self.widths = (1.0,) * BUCKETS
        self._residuals: deque[float] = deque(maxlen=RECENT)
        self._since = 0

    def measured(self, rows: int, modelled: float, seconds: float) -> None:
        """One step with ``rows`` took ``seconds``; the model alone said ``modelled``."""
        if modelled <= 0:
            return
        place = bucket(rows)
        expected = modelled * self.gain * self.widths[place]
        ratio = min(seconds / expected, 3.0)
        self.gain *= 1 + WEIGHT * (ratio - 1)
        widths = list(self.widths)
        widths[place] *= 1 + WEIGHT * (ratio - 1)
        self.widths = tuple(widths)
        self._residuals.append(ratio - 1)
        self._since += 1
        if self._since >= 10:  # sorting at every step would cost more than it tells
            self._since = 0
            ordered = sorted(self._residuals)
            self.margin = max(0.0, ordered[int(0.95 * (len(ordered) - 1))])
