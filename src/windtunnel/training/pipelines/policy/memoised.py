"""The published planner, as a baseline: divide and conquer that keeps one best plan of each part.

The layers are split in two at every cut, the stages likewise; of all pairs of best halves the one with the
least `times.iteration_time` is kept (Oobleck, Jang et al., SOSP 2023, section 4.2). Its plan may be up to a
few percent slower than the best one (`planner` has the example and the reason), and the search takes O(L^3
S^2) steps.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache

from windtunnel.training.pipelines.model import LayerProfile, Stage, Template
from windtunnel.training.pipelines.policy.planner import MICROBATCHES_A_STAGE
from windtunnel.training.pipelines.policy.times import iteration_time


def memoised_plan(
    profile: Sequence[LayerProfile],
    hosts: int,
    memory: float = float("inf"),
    *,
    microbatches: int | None = None,
) -> Template | None:
    """The published search for ``hosts`` hosts of one device, None where it finds nothing.

    ``memory``: bytes a device, which a stage needs to hold with one microbatch in flight (as published).
    """
    times = [layer.forward + layer.backward for layer in profile]

    def cost(stages: tuple[tuple[int, int], ...]) -> float:
        rounds = MICROBATCHES_A_STAGE * len(stages) if microbatches is None else microbatches
        return iteration_time([sum(times[u:v]) for u, v in stages], rounds)

    @cache
    def best(u: int, v: int, stages: int) -> tuple[tuple[int, int], ...] | None:
        if v - u < stages:
            return None
        if stages == 1:
            need = sum(layer.state_bytes + layer.activation_bytes for layer in profile[u:v])
            return ((u, v),) if need <= memory else None
        found: tuple[tuple[int, int], ...] | None = None
        least = float("inf")
        for middle in range(u + 1, v):
            for first in range(1, stages):
                left = best(u, middle, first)
                right = best(middle, v, stages - first)
                if left is None or right is None:
                    continue
                time = cost(left + right)
                if time < least:
                    found, least = left + right, time
        return found

    cuts = best(0, len(profile), hosts)
    if cuts is None:
        return None
    stages = tuple(Stage(u, v, 1, sum(times[u:v])) for u, v in cuts)
    rounds = MICROBATCHES_A_STAGE * hosts if microbatches is None else microbatches
    return Template(hosts, stages, tuple(range(hosts)), cost(cuts), rounds)
