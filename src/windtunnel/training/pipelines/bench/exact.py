"""A second way to the planner's optimum, which shares nothing with it: the check of what the bench times.

With one device a host and enough memory, a plan is a cut of the layers into so many stages. Its slowest
stage (the rightmost of equals) is some range of layers ``a..b``, in time ``w``. The stages before it take
``w`` at most, those after it less. Packing layers greedily gives the fewest stages on either side, and any
number up to one a layer is possible too, since a stage can always be split. By the published formula (Jang et
al., SOSP 2023, section 4.2) the time is then

    sum of all + (N - S + k - 1) w + sum of the layers from a on

with ``k`` stages before the slowest; it grows with ``k``, so the fewest possible ones are best. That is one
number for each of L^2 / 2 ranges, in whole microseconds.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate, combinations, pairwise

FORMULA_MICROBATCHES = 4  # a stage


def certificate(times: Sequence[int], stages: int) -> int:
    """The least time of any cut of layers that take ``times`` into ``stages``, for four microbatches a stage.

    Raises:
        ValueError: there are fewer layers than stages.
    """
    layers = len(times)
    if not 1 <= stages <= layers:
        raise ValueError(f"{layers} layers make no {stages} stages")
    sums = [0, *accumulate(times)]
    rounds = FORMULA_MICROBATCHES * stages
    best: int | None = None
    for a in range(layers):
        for b in range(a + 1, layers + 1):
            slowest = sums[b] - sums[a]
            before = _fewest(times[:a], slowest)
            after = _fewest(times[b:], slowest - 1)
            if before is None or after is None:
                continue
            # k stages before it, and stages - 1 - k after it, of which there may be one a layer at most
            k = max(before, stages - 1 - (layers - b))
            if k > min(a, stages - 1 - after):
                continue
            time = sums[-1] + (rounds - stages + k - 1) * slowest + sums[-1] - sums[a]
            best = time if best is None else min(best, time)
    assert best is not None  # the slowest stage of any cut is among the ranges
    return best


def _fewest(times: Sequence[int], limit: int) -> int | None:
    """The fewest stages of ``limit`` at most; None where a layer alone takes longer."""
    count, room = 0, 0
    for time in times:
        if time > limit:
            return None
        if count == 0 or time > room:
            count, room = count + 1, limit
        room -= time
    return count


def formula(times: Sequence[int], cuts: Sequence[int]) -> int:
    """The published time of the plan with these ``cuts`` (0 and the number of layers among them)."""
    sums = [0, *accumulate(times)]
    stages = [sums[v] - sums[u] for u, v in pairwise(cuts)]
    count = len(stages)
    k = max(range(count), key=lambda stage: (stages[stage], stage))
    rounds = FORMULA_MICROBATCHES * count
    return sum(stages) + (rounds - count + k - 1) * stages[k] + sum(stages[k:])


def brute_force(times: Sequence[int], stages: int) -> int:
    """The least time, by trying every cut."""
    inner = combinations(range(1, len(times)), stages - 1)
    return min(formula(times, (0, *cuts, len(times))) for cuts in inner)


def even_cuts(layers: int, stages: int) -> tuple[int, ...]:
    """Stages of as equal a number of layers as can be."""
    return tuple(layers * stage // stages for stage in range(stages + 1))
