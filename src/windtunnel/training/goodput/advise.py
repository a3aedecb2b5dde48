"""What a job on a cluster should do about failures: copies, placement, intervals, and how to go on.

Copies: as few as make the losses that memory does not cover rare enough, by the exact recovery probability of
the placement and the time in which losses count as simultaneous. Intervals: as often as the network
replicates, and to storage as often as the rare rest is worth. How to go on: every scheme goes through the
same trace.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from windtunnel.base.errors import UserError
from windtunnel.base.units import amount
from windtunnel.traces.failures import Change
from windtunnel.training.checkpoint.model import Placement
from windtunnel.training.checkpoint.policy.interval import best_every
from windtunnel.training.checkpoint.policy.placement import Kind, place, survives, weakest_domain
from windtunnel.training.checkpoint.policy.probability import chances, recovery, recovery_given
from windtunnel.training.checkpoint.policy.slots import explain, needed
from windtunnel.training.goodput.twin.model import JobModel, PhaseCosts, SimulationResult
from windtunnel.training.goodput.twin.replicas import Redundant, ReplicaDrop, Rerouting
from windtunnel.training.goodput.twin.restart import (
    PeerMemory,
    StorageRestart,
    copy_time,
    regroup_time,
    storage_every,
)
from windtunnel.training.goodput.twin.simulate import Scheme, simulate
from windtunnel.training.goodput.twin.templates import Templates
from windtunnel.training.pipelines.policy.templates import guarantee

LIVE = ("restart from storage", "peer memory", "templates")
WITH_SPARE = "peer memory, a spare"
MOST_COPIES = 4
NEAR = 1.1


@dataclass(frozen=True)
class Question:
    """A job on hosts that fail.

    ``mtbf``: mean seconds between failures of the whole job. ``software``: part of them that leaves the
    host alive; ``domain_share``: part of the others that takes all hosts of a domain. ``host_memory``:
    bytes of a host that checkpoints may take. ``domains``: failure domain of every host. ``horizon``:
    seconds to look ahead. ``away``: mean seconds until a lost host is back, where ``costs.replace`` is
    infinite since the trace brings hosts itself.
    """

    job: JobModel
    costs: PhaseCosts
    mtbf: float
    horizon: float
    host_memory: float
    domains: tuple[str, ...]
    software: float = 0.0
    spares: int = 0
    domain_share: float = 0.0
    away: float | None = None


@dataclass(frozen=True)
class Choice:
    """One number of copies.

    ``memory``: bytes of a host. ``every``, ``storage_every``: steps between checkpoints to memory and to
    storage. ``pair``: probability to recover from memory when two hosts are lost at once. ``fallbacks``:
    expected recoveries from storage within the horizon. ``waste``: seconds in it that depend on the choice.
    """

    copies: int
    placement: Placement
    memory: int
    fits: bool
    sum_in_words: str
    every: int
    storage_every: int
    pair: float
    fallbacks: float
    waste: float


@dataclass(frozen=True)
class Advice:
    """What is recommended, why, and what the twin saw."""

    chosen: Choice
    choices: tuple[Choice, ...]
    storage_every: int
    results: tuple[SimulationResult, ...]
    scheme: str
    reasons: tuple[str, ...]


def advise(
    question: Question, trace: Sequence[Change], progress: Callable[[str, float], None] | None = None
) -> Advice:
    """Compare all choices on ``trace``; emulated throughout.

    Raises:
        UserError: a host's memory does not even hold its own part of the state twice.
    """
    job, costs = question.job, question.costs
    choices = tuple(_choice(question, copies) for copies in range(1, min(MOST_COPIES, job.hosts) + 1))
    fitting = [choice for choice in choices if choice.fits]
    if not fitting:
        raise UserError(
            f"plan: --host-memory {amount(question.host_memory)} is too little even for one copy:"
            f" {choices[0].sum_in_words}"
        )
    least = min(choice.waste for choice in fitting)
    # a copy more costs memory and traffic: the fewest that waste hardly more than the best
    chosen = next(choice for choice in fitting if choice.waste <= NEAR * least)
    to_storage = storage_every(job, costs, question.mtbf)
    schemes: list[Callable[[], Scheme]] = [
        lambda: StorageRestart(job, costs, to_storage, question.spares),
        lambda: PeerMemory(job, costs, chosen.placement, chosen.storage_every, question.spares, chosen.every),
        lambda: PeerMemory(
            job, costs, chosen.placement, chosen.storage_every, 1, chosen.every, name=WITH_SPARE
        ),
        lambda: Templates(job, costs, to_storage),
        *([lambda: Redundant(job, costs, to_storage)] if job.stages > 1 else []),
        lambda: Rerouting(job, costs, to_storage),
        lambda: ReplicaDrop(job, costs, to_storage),
    ]
    results = []
    for index, make in enumerate(schemes):
        scheme = make()
        if scheme.name == WITH_SPARE and question.spares:
            continue
        if progress is not None:
            progress(scheme.name, index / len(schemes))
        results.append(simulate(scheme, job, costs, trace, question.horizon))
        if isinstance(scheme, Templates):
            promised = guarantee(scheme.set, job.hosts).sentences
    live = [result for result in results if result.scheme in LIVE]
    best = max(live, key=lambda result: result.goodput)
    reasons = _reasons(question, choices, chosen, to_storage, results, best)
    if best.scheme == Templates.name:
        reasons += promised
    return Advice(chosen, choices, to_storage, tuple(results), best.scheme, reasons)


def _placement(hosts: int, copies: int, domains: Sequence[str]) -> Placement:
    """Across failure domains where there are several; else in groups, mixed where they do not divide."""
    kind: Kind = "group" if hosts % copies == 0 else "mixed"
    if len(set(domains)) > 1 and copies > 1:
        kind = "domains"
    return place(hosts, copies, kind, domains if kind == "domains" else ())


def _choice(question: Question, copies: int) -> Choice:
    job, costs = question.job, question.costs
    placement = _placement(job.hosts, copies, question.domains)
    share = math.ceil(job.state_bytes / job.hosts)
    held = (copies - 1) * share
    memory = needed(share, held, 2)
    replicate = held / costs.peer_bandwidth
    every = best_every(copy_time(job, costs), question.mtbf, job.step_time, replicate)
    fallbacks = _fallbacks(question, placement, every)
    rest = question.horizon / max(fallbacks, 1e-9)
    to_storage = storage_every(job, costs, min(rest, question.horizon))
    load = job.state_bytes / costs.storage_bandwidth
    waste = fallbacks * (to_storage * job.step_time / 2 + load)
    waste += question.horizon / question.mtbf * every * job.step_time / 2
    waste += copy_time(job, costs) * question.horizon / (every * job.step_time)
    pair = float(recovery(placement, 2).value) if job.hosts > 1 else 0.0
    words = explain(share, held, 2, free=int(question.host_memory))
    return Choice(
        copies,
        placement,
        memory,
        memory <= question.host_memory,
        words,
        every,
        to_storage,
        pair,
        fallbacks,
        waste,
    )


def _fallbacks(question: Question, placement: Placement, every: int) -> float:
    """Recoveries from storage that are to be expected within the horizon.

    Losses count as simultaneous from the first until the host is replaced and its copies are made again,
    the *window*. Hosts that fail one by one are fatal when the last of a copy set falls within the windows
    of the others. `recovery_given` says how likely that is among the losses of one window; with horizon /
    window windows side by side a set of m hosts is counted once in m times, since others lie across a
    border. What takes a whole domain is fatal if all copies of a shard are in it.
    """
    job, costs, copies = question.job, question.costs, placement.copies
    hardware = question.horizon / question.mtbf * (1.0 - question.software)
    if copies == 1:
        return hardware
    away = costs.replace if question.away is None else question.away
    window = costs.detect + (away if question.spares == 0 else 0.0) + costs.start
    window += regroup_time(costs, job.hosts) + every * job.step_time
    window += job.state_bytes / job.hosts / costs.peer_bandwidth
    own = [str(index) for index in range(job.hosts)]
    alone = hardware * (1.0 - question.domain_share)
    chance = chances(dict.fromkeys(own, alone / question.horizon / job.hosts), window)
    fatal = 1.0 - recovery_given(placement, own, chance).value
    members = defaultdict(list)
    for host, domain in enumerate(question.domains):
        members[domain].append(host)
    # a domain is struck by way of one of its hosts: the larger, the oftener
    struck = sum(len(inside) for inside in members.values() if not survives(placement, inside))
    wide = hardware * question.domain_share * struck / job.hosts
    return min(hardware, copies * question.horizon / window * fatal + wide)


def _reasons(
    question: Question,
    choices: Sequence[Choice],
    chosen: Choice,
    to_storage: int,
    results: Sequence[SimulationResult],
    best: SimulationResult,
) -> tuple[str, ...]:
    job = question.job
    days = question.horizon / 86400
    said = [
        f"{chosen.copies} copies: {chosen.fallbacks:.3g} recoveries from storage are to be expected in"
        f" {days:.3g} days"
        + "".join(
            f", {other.fallbacks:.3g} with {other.copies}" + ("" if other.fits else " (does not fit)")
            for other in choices
            if abs(other.copies - chosen.copies) == 1
        )
        + f"; memory of a host: {chosen.sum_in_words}."
    ]
    names = len(set(question.domains))
    weak = weakest_domain(chosen.placement, question.domains)
    if chosen.copies > 1 and names > 1:
        said.append(
            f"Placement across the {names} failure domains: "
            + ("no domain holds all copies of a shard." if weak is None else f"{weak.why}.")
        )
    elif chosen.copies > 1:
        said.append(f"Placement {chosen.placement.kind}: the fewest copy sets that two losses could hit.")
    took = (chosen.copies - 1) * job.state_bytes / job.hosts / question.costs.peer_bandwidth
    often = "step" if chosen.every == 1 else f"{chosen.every} steps"
    said.append(
        f"A checkpoint every {often}: the copy within a host stops training for"
        f" {copy_time(job, question.costs):.3g} s, replication takes {took:.3g} s beside it."
    )
    said.append(
        f"To storage every {chosen.storage_every} steps"
        f" ({chosen.storage_every * job.step_time / 3600:.3g} h) for what memory does not cover;"
        f" without peer memory it had to be every {to_storage} ({to_storage * job.step_time / 60:.3g} min)."
    )
    by_name = {result.scheme: result for result in results}
    others = ", ".join(f"{by_name[name].goodput:.1%} {name}" for name in LIVE if name != best.scheme)
    said.append(f"Go on by {best.scheme}: goodput {best.goodput:.1%} (emulated), against {others}.")
    if best.scheme == "templates":
        memory = by_name["peer memory"]
        spare = by_name.get(WITH_SPARE)
        said.append(
            "Templates need a pipeline-parallel job; any other takes peer memory"
            + (f", with a spare host ({spare.goodput:.1%})." if spare else f" ({memory.goodput:.1%}).")
        )
    over = [f for f in results if f.scheme not in (*LIVE, WITH_SPARE) and f.goodput > best.goodput + 0.001]
    if over:
        top = max(over, key=lambda result: result.goodput)
        said.append(f"{top.scheme.capitalize()} would reach {top.goodput:.1%}; it is emulated only.")
    return tuple(said)
