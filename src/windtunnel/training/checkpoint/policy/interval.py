"""How often to save.

The optimum, where every failure takes the work since the last checkpoint: each save stops the job for
``stall``, failures come with mean distance ``mtbf`` (exponential), and each costs ``restart`` before work
goes on. The expected time for work W is (Daly, FGCS 2006, equation 20)

    mtbf * exp(restart / mtbf) * (exp((interval + stall) / mtbf) - 1) * W / interval

which is least where exp((interval + stall) / mtbf) * (1 - interval / mtbf) = 1. Young (CACM 1974) has its
first order, sqrt(2 * stall * mtbf).

With copies in memory only some failures, the *falls*, take the work since the last checkpoint in storage; all
others cost a recovery of their own length, whatever the interval of storage is. So the optimum is Daly's with
the mean distance of falls, and Daly's itself where memory covers nothing.
"""

from __future__ import annotations

import math

from scipy.special import lambertw

_SMALL = 1e-9
"""Of the distance: for a stall that is so short the first order is more exact than a difference of floats."""


def best_interval(stall: float, mtbf: float) -> float:
    """The best interval, seconds of work between two saves, with ``mtbf`` seconds between failures that take
    the work since the last one. 0 for a save that costs nothing: save as often as possible. Infinite where
    nothing is ever lost.

    Raises:
        ValueError: a negative stall, or a distance that is not positive.
    """
    if stall < 0 or not mtbf > 0:
        raise ValueError(f"stall={stall} must not be negative, mtbf={mtbf} must be positive")
    if stall == 0 or math.isinf(mtbf):
        return 0.0 if stall == 0 else math.inf
    share = stall / mtbf
    if share < _SMALL:
        return math.sqrt(2 * share) * mtbf
    return mtbf * (1.0 + float(lambertw(-math.exp(-1.0 - share)).real))


def best_every(stall: float, mtbf: float, step: float, write: float = 0.0, longest: float = math.inf) -> int:
    """The best interval in whole steps of ``step`` seconds, at least one.

    ``write``: seconds until a checkpoint is complete; a new one is not begun before. ``longest``: seconds
    between two at most; a save takes place that often even where nothing is ever lost.

    Raises:
        ValueError: neither failures nor ``longest`` bound it.
    """
    best = min(best_interval(stall, mtbf), longest)
    if math.isinf(best):
        raise ValueError("no failure takes work back, and no longest interval is given")
    least = max(1, math.ceil(write / step))
    most = max(least, math.floor(longest / step)) if math.isfinite(longest) else math.inf
    return int(min(max(least, round(best / step)), most))
