"""How long a model thinks between two turns: a log-normal, drawn where a recording holds no times.

The default parameters come from the six gaps between a tool's answer and the next reply at the start of one
public mini-SWE-agent trajectory (deepseek-chat on django-10914, which records both times): 3.2, 2.6, 2.8,
3.3, 5.7 and 41.2 s, median 3.3 s, standard deviation of the logarithms 1.05. That is little data, and one
model; ``fit`` takes your own.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterable
from dataclasses import dataclass
from random import Random

from windtunnel.base.errors import UserError


@dataclass(frozen=True)
class Think:
    """A log-normal by its median (seconds) and the standard deviation of the logarithm."""

    median: float = 3.3
    sigma: float = 1.05
    longest: float = 600.0
    """A draw beyond this is cut to it: no model service lets a request wait for ever."""

    def __post_init__(self) -> None:
        if not (0 < self.median < math.inf and 0 <= self.sigma < 10 and 0 < self.longest < math.inf):
            raise UserError(
                f"think times: median {self.median}, sigma {self.sigma}, longest {self.longest} are not "
                "accepted; use a positive median and longest, and a sigma from 0 to below 10"
            )

    @property
    def words(self) -> str:
        return f"drawn: log-normal, median {self.median:g} s, sigma {self.sigma:g}"

    def draw(self, random: Random) -> float:
        """One think time, to the millisecond."""
        return round(min(self.longest, self.median * math.exp(self.sigma * random.gauss(0, 1))), 3)


def fit(seconds: Iterable[float]) -> Think:
    """The log-normal of recorded think times (those that are 0 are left out); at least two are needed."""
    logs = [math.log(second) for second in seconds if second > 0]
    if len(logs) < 2:
        raise UserError(f"think times: {len(logs)} positive values given; a fit needs at least 2")
    return Think(median=math.exp(statistics.median(logs)), sigma=statistics.stdev(logs))
