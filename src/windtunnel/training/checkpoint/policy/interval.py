"""How often to save, and what a failure costs.

Wasted time per failure (GEMINI, section 2): a failure just after a checkpoint became complete wastes
``complete`` + ``load``, one just before the next a whole interval more, so on average ``complete + interval
/ 2 + load``.

The optimum: each save stops the job for ``stall``, failures come with mean distance ``mtbf`` (exponential),
and each costs ``restart`` before work goes on. The expected time for work W is (Daly, FGCS 2006, equation 20)

    mtbf * exp(restart / mtbf) * (exp((interval + stall) / mtbf) - 1) * W / interval

which is least where exp((interval + stall) / mtbf) * (1 - interval / mtbf) = 1. Young (CACM 1974) has its
first order, sqrt(2 * stall * mtbf).
"""

from __future__ import annotations

import math


def wasted(complete: float, interval: float, load: float) -> float:
    """Mean seconds that one failure wastes.

    ``complete``: from the state's step until its checkpoint is complete. ``interval``: between checkpoints.
    ``load``: to get the state back.
    """
    return complete + interval / 2 + load


def best_interval(stall: float, mtbf: float) -> float:
    """The best interval, seconds of work between two saves: the root of the derivative, by bisection.

    0 for a save that costs nothing: save as often as possible.
    """
    if stall < 0 or mtbf <= 0:
        raise ValueError(f"stall={stall} must not be negative, mtbf={mtbf} must be positive")
    if stall == 0:
        return 0.0
    # In units of mtbf: x + s + log(1 - x) falls from s at 0 to minus infinity at 1.
    share = stall / mtbf
    low, high = 0.0, 1.0
    for _ in range(200):
        middle = (low + high) / 2
        if middle in (low, high):
            break
        if middle + share + math.log1p(-middle) > 0:
            low = middle
        else:
            high = middle
    return low * mtbf


def best_every(stall: float, mtbf: float, step: float, complete: float = 0.0) -> int:
    """`best_interval` in whole steps of ``step`` seconds: the better neighbour, at least one.

    ``complete``: seconds until a checkpoint is complete; a new one is not begun before.
    """
    least = max(1, math.ceil(complete / step))
    below = max(least, math.floor(best_interval(stall, mtbf) / step))
    return min((below, below + 1), key=lambda every: (slowdown(every * step, stall, mtbf), every))


def slowdown(interval: float, stall: float, mtbf: float, restart: float = 0.0) -> float:
    """Expected time with failures and saves over the time of the work alone (1 is perfect); infinite where it
    has no bound in floats."""
    if stall == 0 and interval == 0:
        return math.exp(restart / mtbf)
    try:
        return mtbf * math.exp(restart / mtbf) * math.expm1((interval + stall) / mtbf) / interval
    except OverflowError:
        return math.inf
