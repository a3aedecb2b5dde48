"""How often to save to memory where a bound is set on what that may cost.

A save takes from training what the step after it is longer than one without, whatever the reason (the stall,
the copies beside it, the cores and the memory that it shares). With one save every n steps the mean step is
longer by an n-th of that. The least n is taken that keeps this under the bound, a ``share`` of a step. What
is given up for it: a failure may take the work of n steps, which are done again.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from statistics import median

MOST = 10_000
"""Steps between two saves; a bound that asks for more is kept to no longer."""


def every_for(share: float, plain: Sequence[float], saving: Sequence[float]) -> int:
    """Steps from one save to the next.

    ``plain``: seconds of steps after which nothing was saved before, ``saving``: of those that follow a save;
    none of them empty. ``share``: above 0.
    """
    alone = median(plain)
    more = median(saving) - alone
    if more <= 0 or alone <= 0:
        return 1
    # A product that rounds up would ask for one step more than there need be.
    return max(1, min(MOST, math.ceil(more / (share * alone) - 1e-9)))
