"""What a job on a cluster should do about failures: copies, placement, intervals, and how to go on.

Copies: as few as make the losses that memory does not cover rare enough, by the copy sets of the placement
and the time in which losses count as simultaneous. Intervals: to memory as often as the network
replicates and the copy is worth, to storage as often as the failures that memory does not cover are worth
(`checkpoint.policy.interval`). How to go on: every scheme goes through the same trace, and the best is named.

*What memory does not cover* falls back to storage. Losses count as simultaneous from the first until the host
is replaced and its copies are made again, the *window*. Hosts that fail one by one are fatal when the last of
a copy set falls within the windows of the others; how likely that is among the losses of one window is
counted by `policy.placement`. With horizon / window windows side by side a set of m hosts is counted once in
m times, since others lie across a border. What takes a whole domain is fatal if all copies of a shard are in
it.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence

from windtunnel.base.errors import UserError
from windtunnel.base.units import amount
from windtunnel.traces.failures import HostChange
from windtunnel.training.checkpoint.model import Placement
from windtunnel.training.checkpoint.policy.interval import best_every
from windtunnel.training.checkpoint.policy.placement import (
    Kind,
    fatal_alike,
    pair_survives,
    place,
    survives,
)
from windtunnel.training.checkpoint.policy.slots import explain, needed
from windtunnel.training.goodput.model import Choice, Question, RecoveryAdvice
from windtunnel.training.goodput.twin.restart import (
    PeerMemory,
    StorageRestart,
    copy_time,
    regroup_time,
    save_stall,
    storage_every,
    write_time,
)
from windtunnel.training.goodput.twin.simulate import (
    MEMORY,
    STORAGE,
    TEMPLATES,
    WITH_SPARE,
    JobModel,
    Scheme,
    SimulationResult,
    simulate,
)
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
    to_storage = storage_every(job, costs, question.mtbf, question.longest)
    for_layers = storage_every(
        job, costs, between_falls(question, template_falls(question)), question.longest
    )
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
    memory = needed(share, replica_bytes)
    replicate = replica_bytes / costs.peer_bandwidth
    copy = copy_time(job, costs)
    every = best_every(copy, question.mtbf, job.step_time, replicate, question.longest)
    falls = memory_falls(question, placement, every)
    to_storage = storage_every(job, costs, between_falls(question, falls), question.longest)
    waste = falls * (to_storage * job.step_time / 2 + write_time(job, costs))
    waste += falls * job.state_bytes / costs.storage_bandwidth
    waste += question.horizon / question.mtbf * every * job.step_time / 2
    waste += copy * question.horizon / (every * job.step_time)
    waste += save_stall(job, costs) * question.horizon / (to_storage * job.step_time)
    pair = pair_survives(placement) if job.hosts > 1 else 0.0
    words = explain(share, replica_bytes, free=int(question.host_memory))
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


def placed(hosts: int, copies: int, domains: Sequence[str]) -> Placement:
    """Across failure domains where there are several; else in groups, mixed where they do not divide."""
    kind: Kind = "group" if hosts % copies == 0 else "mixed"
    if len(set(domains)) > 1 and copies > 1:
        kind = "domains"
    return place(hosts, copies, kind, domains if kind == "domains" else ())


def memory_falls(question: Question, placement: Placement, every: int) -> float:
    """Falls to storage that are to be expected within the horizon, with checkpoints in the memory of peers
    every so many steps."""
    job, costs, copies = question.job, question.costs, placement.copies
    if copies == 1:
        return question.hardware
    window = costs.detect + _away(question) + costs.start + regroup_time(costs, job.hosts)
    window += every * job.step_time + job.state_bytes / job.hosts / costs.peer_bandwidth
    fatal = fatal_alike(placement, _chance(question, window))
    return _falls(question, window, copies, fatal, lambda inside: not survives(placement, inside))


def template_falls(question: Question) -> float:
    """The same for pipelines, where every layer is in each of them. That those which are left take other
    hosts in meanwhile is not counted: there are rather fewer falls."""
    job, costs = question.job, question.costs
    pipelines = job.hosts // job.stages
    if pipelines == 1:
        return question.horizon / question.mtbf
    window = costs.detect + _away(question) + regroup_time(costs, job.hosts)
    window += job.state_bytes / job.stages / costs.peer_bandwidth
    layers = _chance(question, window) ** pipelines  # all holders of the layers of one stage
    fatal = -math.expm1(job.stages * math.log1p(-layers)) if layers < 1 else 1.0
    whole = (pipelines - 1) * job.stages  # more hosts in a row than that hold all of some layer
    return _falls(question, window, pipelines, fatal, lambda inside: len(inside) > whole)


def _falls(
    question: Question, window: float, holders: int, fatal: float, fatal_inside: Callable[[list[int]], bool]
) -> float:
    """``fatal``: the probability that all of some ``holders`` are lost within one window. ``fatal_inside``:
    whether the loss of all hosts of a domain is."""
    # a domain is struck by way of one of its hosts: the larger, the oftener
    struck = sum(len(inside) for inside in _members(question) if fatal_inside(inside))
    wide = question.hardware * question.domain_share * struck / question.job.hosts
    return min(question.hardware, holders * question.horizon / window * fatal + wide)


def between_falls(question: Question, falls: float) -> float:
    """Mean seconds between two failures that fall back to storage, of which there are so many; infinite
    without any."""
    return max(question.mtbf, question.horizon / falls) if falls > 0 else math.inf


def _away(question: Question) -> float:
    """Seconds until a host stands in for a lost one."""
    if question.spares:
        return 0.0
    return question.costs.replace if question.away is None else question.away


def _chance(question: Question, window: float) -> float:
    """That a host is lost within ``window``, alone."""
    alone = question.hardware * (1.0 - question.domain_share)
    return -math.expm1(-alone / question.horizon / question.job.hosts * window)


def _members(question: Question) -> list[list[int]]:
    members: defaultdict[str, list[int]] = defaultdict(list)
    for host, domain in enumerate(question.domains):
        members[domain].append(host)
    return list(members.values())


def worth(result: SimulationResult, job: JobModel) -> float:
    """The goodput of a scheme for the hosts that it holds: a spare is one more."""
    hosts = job.hosts + (result.scheme == WITH_SPARE)
    return result.goodput * job.hosts / hosts


def reasons(
    question: Question,
    choices: Sequence[Choice],
    chosen: Choice,
    intervals: Mapping[str, int],
    results: Sequence[SimulationResult],
    best: SimulationResult,
) -> tuple[str, ...]:
    """Sentences for `Advice.reasons`."""
    return (
        _copies(question, choices, chosen),
        *_placement(question, chosen),
        _to_memory(question, chosen),
        _to_storage(question, chosen, intervals),
        *_ways(question, results, best),
    )


def _copies(question: Question, choices: Sequence[Choice], chosen: Choice) -> str:
    others = "".join(
        f", {other.fallbacks:.3g} with {other.copies}" + ("" if other.fits else " (does not fit)")
        for other in choices
        if abs(other.copies - chosen.copies) == 1
    )
    return (
        f"Keep {chosen.copies} copies: {chosen.fallbacks:.3g} recoveries from storage are expected in"
        f" {question.horizon / 86400:.3g} days{others}. Memory of a host: {chosen.sum_in_words}."
    )


def _placement(question: Question, chosen: Choice) -> list[str]:
    if chosen.copies == 1:
        return []
    names = len(set(question.domains))
    if names == 1:
        return [f"Placement {chosen.placement.kind}: the fewest copy sets that two losses could hit."]
    weak = sum(not survives(chosen.placement, inside) for inside in _members(question))
    text = f"{weak} of them hold all copies of a shard" if weak else "no domain holds all copies of a shard"
    return [f"Placement across the {names} failure domains: {text}."]


def _to_memory(question: Question, chosen: Choice) -> str:
    job, costs = question.job, question.costs
    took = (chosen.copies - 1) * job.state_bytes / job.hosts / costs.peer_bandwidth
    often = "step" if chosen.every == 1 else f"{chosen.every} steps"
    return (
        f"Checkpoint to memory every {often}: the copy within a host stops training for"
        f" {copy_time(job, costs):.3g} s. Replication takes {took:.3g} s beside training."
    )


def _to_storage(question: Question, chosen: Choice, intervals: Mapping[str, int]) -> str:
    job, costs = question.job, question.costs
    seconds = chosen.storage_every * job.step_time
    least = write_time(job, costs)
    falls = chosen.fallbacks
    often = f"{question.horizon / question.mtbf / falls:.3g}" if falls > 0 else "more than can be counted"
    if seconds < least + job.step_time:
        bound = ", as long as a save takes"
    elif seconds > question.longest - job.step_time:
        bound = ", the longest allowed"
    else:
        bound = ""
    return (
        f"Checkpoint to storage every {chosen.storage_every} steps ({seconds / 3600:.3g} h{bound}):"
        f" one failure in {often} needs it. A save stops training for"
        f" {save_stall(job, costs):.3g} s, and is complete after {least:.3g} s. Without copies in memory"
        f" the interval would be {intervals[STORAGE]} steps"
        f" ({intervals[STORAGE] * job.step_time / 60:.3g} min)."
    )


def _ways(question: Question, results: Sequence[SimulationResult], best: SimulationResult) -> list[str]:
    by_name = {result.scheme: result.goodput for result in results}
    others = ", ".join(f"{goodput:.1%} {name}" for name, goodput in by_name.items() if name != best.scheme)
    sentences = [f"Recover by {best.scheme}: goodput {best.goodput:.1%} (emulated), compared with {others}."]
    if best.scheme == WITH_SPARE:
        sentences.append(f"The spare is one host more than the {question.job.hosts} that train.")
    if best.scheme == TEMPLATES:
        rest = (result for result in results if result.scheme != TEMPLATES)
        other = max(rest, key=lambda result: worth(result, question.job))
        sentences.append(
            "Templates need a program with a PipelineTrainer that takes --checkpoint and --checkpoint-every,"
            f" as examples/train_pipeline.py. Any other program uses {other.scheme} ({other.goodput:.1%})."
        )
    return sentences
