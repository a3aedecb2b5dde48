"""What a job on a cluster should do about failures: copies, placement, intervals, and how to go on.

Copies: as few as make the losses that memory does not cover rare enough, by the exact recovery probability of
the placement and the time in which losses count as simultaneous. Intervals: to memory as often as the network
replicates and the copy is worth, to storage as often as the failures that memory does not cover are worth
(`checkpoint.policy.interval`). How to go on: every scheme goes through the same trace, and the best is named.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

from windtunnel.base.errors import UserError
from windtunnel.base.units import amount
from windtunnel.traces.failures import HostChange
from windtunnel.training.checkpoint.policy.interval import Failures, best_every
from windtunnel.training.checkpoint.policy.probability import recovery
from windtunnel.training.checkpoint.policy.slots import explain, needed
from windtunnel.training.goodput.coverage import failures, memory_falls, placed, template_falls
from windtunnel.training.goodput.model import (
    MEMORY,
    STORAGE,
    TEMPLATES,
    WITH_SPARE,
    Choice,
    Question,
    RecoveryAdvice,
)
from windtunnel.training.goodput.reasons import reasons, worth
from windtunnel.training.goodput.twin.restart import (
    PeerMemory,
    StorageRestart,
    copy_time,
    save_stall,
    storage_every,
    write_time,
)
from windtunnel.training.goodput.twin.simulate import Scheme, simulate
from windtunnel.training.goodput.twin.templates import Templates
from windtunnel.training.pipelines.policy.templates import guarantee

MOST_COPIES = 4
NEAR = 1.1


def advise(
    question: Question, trace: Sequence[HostChange], progress: Callable[[str, float], None] | None = None
) -> RecoveryAdvice:
    """Compare all choices on ``trace``; emulated throughout.

    Raises:
        UserError: a host's memory does not even hold its own part of the state twice, or storage is slower
            than its longest interval.
    """
    job, costs = question.job, question.costs
    if write_time(job, costs) > question.longest:
        raise UserError(
            f"plan: a checkpoint takes {write_time(job, costs):.3g} s to storage, more than `storage_within`"
            f" {question.longest:.3g} s; give a longer time, or more of the storage's bandwidth"
        )
    choices = tuple(_choice(question, copies) for copies in range(1, min(MOST_COPIES, job.hosts) + 1))
    fitting = [choice for choice in choices if choice.fits]
    if not fitting:
        raise UserError(
            f"plan: `host_memory` {amount(question.host_memory)} is too little even for one copy:"
            f" {choices[0].sum_in_words}"
        )
    least = min(choice.waste for choice in fitting)
    # a copy more costs memory and traffic: the fewest that waste hardly more than the best
    chosen = next(choice for choice in fitting if choice.waste <= NEAR * least)
    all_fall = failures(question, question.horizon / question.mtbf, 0.0)
    to_storage = storage_every(job, costs, all_fall, question.longest)
    layer_falls = failures(question, template_falls(question), 0.0)
    for_layers = storage_every(job, costs, layer_falls, question.longest)
    templates = Templates(job, costs, for_layers)
    spares = question.spares or 0
    memory = job, costs, chosen.placement, chosen.storage_every
    schemes: list[Scheme] = [
        StorageRestart(job, costs, to_storage, spares),
        PeerMemory(*memory, spares, chosen.every),
        templates,
    ]
    if question.spares is None:
        schemes.insert(2, PeerMemory(*memory, 1, chosen.every, name=WITH_SPARE))
    results = []
    for index, scheme in enumerate(schemes):
        if progress is not None:
            progress(scheme.name, index / len(schemes))
        results.append(simulate(scheme, job, costs, trace, question.horizon))
    intervals = {STORAGE: to_storage, TEMPLATES: for_layers}
    intervals |= dict.fromkeys((MEMORY, WITH_SPARE), chosen.storage_every)
    best = max(results, key=lambda result: worth(result, job))
    why = reasons(question, choices, chosen, intervals, results, best)
    if best.scheme == TEMPLATES:
        why += guarantee(templates.set, job.hosts)
    return RecoveryAdvice(chosen, choices, intervals, templates.set.n0, tuple(results), best.scheme, why)


def _choice(question: Question, copies: int) -> Choice:
    job, costs = question.job, question.costs
    placement = placed(job.hosts, copies, question.domains)
    share = math.ceil(job.state_bytes / job.hosts)
    replica_bytes = (copies - 1) * share
    memory = needed(share, replica_bytes, 2)
    replicate = replica_bytes / costs.peer_bandwidth
    copy = copy_time(job, costs)
    every = best_every(copy, Failures(question.mtbf), job.step_time, replicate, question.longest)
    falls = memory_falls(question, placement, every)
    rates = failures(question, falls, replicate + (every / 2) * job.step_time)
    to_storage = storage_every(job, costs, rates, question.longest)
    waste = falls * (to_storage * job.step_time / 2 + write_time(job, costs))
    waste += falls * job.state_bytes / costs.storage_bandwidth
    waste += question.horizon / question.mtbf * every * job.step_time / 2
    waste += copy * question.horizon / (every * job.step_time)
    waste += save_stall(job, costs) * question.horizon / (to_storage * job.step_time)
    pair = float(recovery(placement, 2)) if job.hosts > 1 else 0.0
    words = explain(share, replica_bytes, 2, free=int(question.host_memory))
    return Choice(
        copies,
        placement,
        memory,
        memory <= question.host_memory,
        words,
        every,
        to_storage,
        pair,
        falls,
        waste,
    )
