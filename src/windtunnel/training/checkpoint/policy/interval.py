"""How often to save, and what a failure costs.

Wasted time per failure (GEMINI, section 2): a failure just after a checkpoint became complete wastes
``complete`` + ``load``, one just before the next a whole interval more, so on average ``complete + interval
/ 2 + load``.

The optimum, where every failure takes the work since the last checkpoint: each save stops the job for
``stall``, failures come with mean distance ``mtbf`` (exponential), and each costs ``restart`` before work
goes on. The expected time for work W is (Daly, FGCS 2006, equation 20)

    mtbf * exp(restart / mtbf) * (exp((interval + stall) / mtbf) - 1) * W / interval

which is least where exp((interval + stall) / mtbf) * (1 - interval / mtbf) = 1. Young (CACM 1974) has its
first order, sqrt(2 * stall * mtbf).

With copies in memory only some failures, the *falls*, take the work since the last checkpoint in storage; all
others cost a recovery of their own length, whatever the interval of storage is. A failure during a recovery
begins it anew, or makes it a fall. So between two falls lies an exponential length of work, of mean ``1 /
n``, and a save that training does not wait for counts ``write`` later. Going on from state to state (work,
recovery, fall) the expected time for work W is (derived here; `Failures` has its terms)

    exp(n * write) * (1 + u * fall') * m * (exp(n * (interval + stall)) - 1) / n * W / interval

with ``u`` the rate of falls in time, ``m = n / u`` the seconds that a second of work takes with its
recoveries, and ``fall'`` the seconds until a fall is over that others may begin anew. Only the last factor
has the interval in it: the optimum is Daly's with ``1 / n`` as the mean distance, and Daly's itself where
memory covers nothing.
"""

from __future__ import annotations

import math
from dataclasses import dataclass


def wasted(complete: float, interval: float, load: float) -> float:
    """Mean seconds that one failure wastes.

    ``complete``: from the state's step until its checkpoint is complete. ``interval``: between checkpoints.
    ``load``: to get the state back.
    """
    return complete + interval / 2 + load


@dataclass(frozen=True)
class Failures:
    """What a job's failures cost, beside the work since its last checkpoint in storage.

    ``mtbf``: mean seconds between failures of any kind. ``uncovered``: the part of them that memory does not
    cover, 0 to 1. ``recovery``: seconds of a failure that it covers, with the steps done again.
    ``fall``: seconds of one that it does not, until work goes on.
    """

    mtbf: float
    uncovered: float = 1.0
    recovery: float = 0.0
    fall: float = 0.0

    def __post_init__(self) -> None:
        if not self.mtbf > 0 or not 0 <= self.uncovered <= 1 or min(self.recovery, self.fall) < 0:
            raise ValueError(f"{self} is impossible")

    @property
    def drag(self) -> float:
        """Seconds that a second of work takes with the recoveries in it."""
        failing = -math.expm1(-self.recovery / self.mtbf)  # that a recovery is struck itself
        again = 1.0 - failing * (1.0 - self.uncovered)
        return 1.0 + (1.0 - self.uncovered) * failing / again if again > 0 else math.inf

    @property
    def between_falls(self) -> float:
        """Mean seconds of work between two falls, infinite without any."""
        return self.mtbf / (self.uncovered * self.drag) if self.uncovered > 0 else math.inf


def slowdown(interval: float, stall: float, failures: Failures, write: float = 0.0) -> float:
    """Expected time with failures and saves over the time of the work alone (1 is perfect); infinite where it
    has no bound in floats.

    ``interval``: seconds of work between two saves to storage; each stops training for ``stall``, and is
    complete ``write`` seconds later (at most ``interval``).
    """
    rate = 1.0 / failures.between_falls
    try:
        fallen = 1.0 + failures.uncovered * math.expm1(failures.fall / failures.mtbf)
        lost = failures.drag * fallen * math.exp(rate * write)
        length = interval + stall
        if length == 0:
            return lost
        spent = math.expm1(rate * length) / rate if rate > 0 else length
        return lost * spent / interval if interval > 0 else math.inf
    except OverflowError:
        return math.inf


def best_interval(stall: float, mtbf: float) -> float:
    """The best interval, seconds of work between two saves: the root of the derivative, by bisection.

    ``mtbf``: mean seconds of work between failures that take the work since the last save
    (`Failures.between_falls`). 0 for a save that costs nothing: save as often as possible. Infinite where
    nothing is ever lost.
    """
    if stall < 0 or not mtbf > 0:
        raise ValueError(f"stall={stall} must not be negative, mtbf={mtbf} must be positive")
    if stall == 0:
        return 0.0
    if math.isinf(mtbf):
        return math.inf
    # In units of mtbf: -x - log(1 - x) rises from 0 at 0 to infinity at 1, through the stall at the optimum.
    share = stall / mtbf
    low, high = 0.0, 1.0
    for _ in range(2000):
        middle = (low + high) / 2
        if middle in (low, high):
            break
        if _excess(middle) < share:
            low = middle
        else:
            high = middle
    return low * mtbf


def _excess(x: float) -> float:
    """-x - log(1 - x); by its series where the difference would be rounded away."""
    return x * x * (1 / 2 + x * (1 / 3 + x * (1 / 4 + x / 5))) if x < 1e-3 else -x - math.log1p(-x)


def best_every(
    stall: float, failures: Failures, step: float, write: float = 0.0, longest: float = math.inf
) -> int:
    """The interval in whole steps of ``step`` seconds with the least `slowdown`, at least one.

    ``write``: seconds until a checkpoint is complete; a new one is not begun before. ``longest``: seconds
    between two at most; a save takes place that often even where nothing is ever lost.

    Raises:
        ValueError: neither failures nor ``longest`` bound it.
    """
    least = max(1, math.ceil(write / step))
    best = min(best_interval(stall, failures.between_falls), longest)
    if math.isinf(best):
        raise ValueError("no failure takes work back, and no longest interval is given")
    most = max(least, math.floor(longest / step)) if math.isfinite(longest) else None
    below = max(least, math.floor(best / step))
    near = [every for every in (below, below + 1) if most is None or every <= most]
    return min(near, key=lambda every: (slowdown(every * step, stall, failures, write), every))
