"""How many microbatches each pipeline of a step works on.

Pipeline ``i`` takes ``fill[i] + b times[i]`` seconds for ``b`` microbatches. The next microbatch always goes
to the pipeline that would finish first with it, which makes the last one to finish as early as it can be: any
other division gives some pipeline a microbatch that this one has put later. (Oobleck solves a mixed-integer
program for the least variance of ``b times[i]``, Jang et al., SOSP 2023, section 4.3; the least maximum is
what a synchronous step waits for.) Thousands of pipelines are served at once: up to a level below the last
microbatches' all are full, and only those that are left are handed out one by one.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from windtunnel.base.errors import UserError

_TICKS = 10**15
"""Times are compared in femtoseconds: equal pipelines are equal, and ties go to the first."""


def distribute(times: Sequence[float], fill: Sequence[float], total: int) -> tuple[int, ...]:
    """``total`` microbatches over pipelines with the least time of the last to finish; at least 1 for each.

    ``times``: seconds for each microbatch more; ``fill``: seconds beside them.

    Raises:
        UserError: there are fewer microbatches than pipelines, or a time is not positive.
    """
    if len(times) != len(fill) or not times:
        raise UserError(f"{len(times)} times and {len(fill)} fills; one of each is needed for each pipeline")
    if total < len(times):
        raise UserError(
            f"{total} microbatches for {len(times)} pipelines; each pipeline needs at least one microbatch"
        )
    pipelines = list(zip(times, fill, strict=True))
    counts = Counter(pipelines)
    kinds = {kind: (round(kind[0] * _TICKS), round(kind[1] * _TICKS)) for kind in counts}
    steps, bases = [s for s, _ in kinds.values()], [b for _, b in kinds.values()]
    if min(steps) < 1:
        raise UserError(f"a microbatch takes {min(times)} seconds; a positive time is needed")

    def done(level: int) -> int:
        return sum(count * max(1, (level - kinds[k][1]) // kinds[k][0]) for k, count in counts.items())

    # The highest level at which not too many are handed out.
    low, high = min(bases), max(bases) + max(steps) * total
    while high - low > 1:
        level = (low + high) // 2
        if done(level) <= total:
            low = level
        else:
            high = level
    each = {kind: max(1, (low - b) // s) for kind, (s, b) in kinds.items()}
    # One tick later, each of these finishes one more at the same moment; the first ones get it.
    ready = {kind for kind, (s, b) in kinds.items() if (high - b) // s > each[kind]}
    shares = [each[kind] for kind in pipelines]
    left = total - sum(count * each[kind] for kind, count in counts.items())
    for i, kind in enumerate(pipelines):
        if not left:
            break
        if kind in ready:
            shares[i] += 1
            left -= 1
    return tuple(shares)
