"""From slices and costs to the time that everything takes, by replaying the world of all ranks."""

import math

from windtunnel.training.emulate.policy import CheckedCells, Decision, Observation

UNMEASURED_SECONDS = 10.0
"""That the process of a rank is taken to need before any was measured."""


def cost(observation: Observation, decision: Decision) -> dict[str, float]:
    """What a decision costs: ``ranks`` to run, and the ``seconds`` that takes, ``observation.jobs`` at once.

    A rank takes as long as those before it took in the mean, also where it is only checked.
    """
    ranks = 0 if isinstance(decision, CheckedCells) else len(decision.ranks)
    each = UNMEASURED_SECONDS if observation.seconds_each is None else observation.seconds_each
    return {"ranks": float(ranks), "seconds": math.ceil(ranks / observation.jobs) * each}
