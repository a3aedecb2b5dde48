"""What a replay tells a reader: the distinct collectives of a step, and the largest waits.

Waits are gathered from the split of the critical path by what a user can act on: exposed communication by
group, kind and phase; the pipeline's bubble; a late host; the launching of operators. The remedies are a
table of rules, no advice beyond what the split shows.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from dataclasses import dataclass

import numpy as np

from windtunnel.cluster.model import Cluster
from windtunnel.engines.replay import ReplayResult
from windtunnel.training.emulate.graph import Collective, Group, Phase
from windtunnel.training.emulate.twin.job import WorldJob
from windtunnel.training.emulate.twin.walk import StepSplit


@dataclass(frozen=True)
class CollectiveUse:
    """One kind of call.

    ``call``: a row of a slice's table. ``group``: one of those that make it, labelled as its family; of a
    message its sender and receiver. ``group_size``: of the family. ``count``: in a step of a rank that makes
    it (the most of any class). ``seconds_each``: mean time from the last member's readiness to the end.
    ``exposed_seconds``: what of it the critical path holds.
    """

    call: Collective
    group: Group
    group_size: int
    count: int
    seconds_each: float
    exposed_seconds: float


def collective_table(job: WorldJob, result: ReplayResult, split: StepSplit) -> list[CollectiveUse]:
    """All distinct calls of the steady step, the most exposed first, then the longest in all."""
    exposed: dict[tuple[object, ...], float] = defaultdict(float)
    for (kind, row, node), seconds in split.reasons.items():
        if kind.startswith("communication:"):
            exposed[_key(job, row, int(job.programs[row].program.join[node]))] += seconds
    counts: Counter[tuple[object, ...]] = Counter()
    times: dict[tuple[object, ...], list[float]] = defaultdict(list)
    samples: dict[tuple[object, ...], tuple[int, int]] = {}
    for c in range(job.replay.ranks):
        row = job.class_of(c)
        program = job.programs[row]
        start, stop = result.of(c)
        last_step = slice(len(start) - program.nodes, len(start))
        joins = np.flatnonzero(program.is_join[last_step])
        lasting = (stop - start)[last_step][joins].tolist()
        mine: Counter[tuple[object, ...]] = Counter()
        for call, seconds in enumerate(lasting):
            key = _key(job, row, call)
            mine[key] += 1
            times[key].append(seconds)
            samples.setdefault(key, (c, call))
        counts |= mine  # the most of any
    uses = [
        _use(job, *samples[key], counts[key], float(np.mean(times[key])), exposed.get(key, 0.0))
        for key in samples
    ]
    return sorted(uses, key=lambda use: (-use.exposed_seconds, -use.count * use.seconds_each))


def _key(job: WorldJob, row: int, call: int) -> tuple[object, ...]:
    """Calls of one kind: same family, direction, sizes, dtype, backend."""
    _, own, channel, _ = job.call(row, call)
    return channel[0], own.kind, own.in_bytes, own.out_bytes, own.dtype, own.backend


def _use(job: WorldJob, c: int, call: int, count: int, each: float, exposed: float) -> CollectiveUse:
    one_call = job.call(job.class_of(c), call)
    family = one_call.family
    group = Group("", one_call.ranks(int(job.leader[c])), family.name)
    return CollectiveUse(one_call.row, group, family.size, count, each, exposed)


# A wait of less than this share of the iteration is not worth a line.
SMALLEST_SHARE = 0.002
MOST_WAITS = 3
# Bytes of a call that takes no more than its latency: statistics of a norm or a loss, no parameters.
SMALL_CALL = 64 << 10


@dataclass(frozen=True)
class RankWait:
    """A wait of the slowest rank."""

    what: str
    """what the slowest rank waits for"""
    seconds: float
    """of an iteration"""
    share: float
    """of `iteration_time_s`"""
    remedy: str
    """what would change it, a sentence"""


OTHER_WAITS = {
    "launch": (
        "the host thread, which issues operators more slowly than the device runs them",
        "A larger batch, torch.compile, CUDA graphs or fused optimisers make fewer and longer kernels.",
    ),
    "pipeline_bubble": (
        "other pipeline stages (pipeline bubble)",
        "More microbatches, an interleaved or zero-bubble schedule, or fewer stages shrink the bubble.",
    ),
    "idle": (
        "the other ranks' end of the step",
        "Balance the work of the ranks: this one has less than the slowest.",
    ),
}
"""What and remedy of the kinds that need no look at the job."""


def largest_waits(job: WorldJob, cluster: Cluster, split: StepSplit, iteration: float) -> list[RankWait]:
    """The waits that are told, the largest first."""
    causes: dict[tuple[str, str], float] = defaultdict(float)
    for (kind, row, node), seconds in split.reasons.items():
        if kind.startswith("communication:"):
            causes[_communication(job, cluster, row, node)] += seconds
        elif kind == "imbalance":
            causes[_imbalance(job, cluster, split)] += seconds
        elif kind != "compute":
            causes[OTHER_WAITS[kind]] += seconds
    ordered = sorted(causes.items(), key=lambda item: -item[1])[:MOST_WAITS]
    return [
        RankWait(what, seconds, seconds / iteration, remedy)
        for (what, remedy), seconds in ordered
        if seconds > SMALLEST_SHARE * iteration
    ]


def _imbalance(job: WorldJob, cluster: Cluster, split: StepSplit) -> tuple[str, str]:
    late = max(split.late, key=lambda colour: split.late[colour])
    ranks = job.replay
    rank = int(job.leader[late])
    host = cluster.host_of(rank)
    if any(scale[late] > scale.min() for scale in (ranks.compute_scale, ranks.issue_scale)):
        return (f"rank {rank} on host {host}, which is slower than the others", f"Replace host {host}.")
    name = job.world.classes.classes[job.class_of(late)].name
    return (
        f"ranks {name}, which have more to compute",
        "Spread the work evenly: equal shards, equal sequence lengths, balanced experts.",
    )


def _communication(job: WorldJob, cluster: Cluster, row: int, node: int) -> tuple[str, str]:
    program = job.programs[row]
    call = job.call_at(row, node)
    collective, family = call.row, call.family
    phase = Phase(int(program.slice.events["phase"][program.event[node]])).name.lower()
    ranks = call.ranks(int(job.world.classes.classes[row].members[0]))
    crosses = cluster.placement(ranks).hosts > 1
    during = "" if phase == "other" else f" in {phase}"
    what = f"exposed {collective.kind} over {family.name} ({family.size} ranks){during}"
    return what, _remedy(collective, family.label, phase, crosses)


def _remedy(collective: Collective, label: str, phase: str, crosses: bool) -> str:
    kind, large = collective.kind, max(collective.in_bytes, collective.out_bytes) > SMALL_CALL
    network = "a faster network between hosts" if crosses else "a faster link inside the host"
    if kind in ("send", "recv"):
        return f"Overlap the messages between stages, make microbatches smaller, or use {network}."
    if label == "tp":
        if crosses:
            return "Keep tensor parallelism inside one host: make TP at most the number of its devices."
        return (
            "Use a smaller TP, sequence parallelism with asynchronous TP, or a larger hidden size per rank."
        )
    if kind == "all_to_all":
        return f"Keep the expert (or table) group inside a host, overlap it with compute, or use {network}."
    if label == "cp":
        return f"Use a smaller CP, ring attention that overlaps its transfers, or {network}."
    if kind == "all_gather" and large:
        return (
            "Prefetch parameters earlier, keep them after forward (reshard_after_forward=False) where memory"
            f" allows, shard within fewer hosts (HSDP), or use {network}."
        )
    if kind in ("reduce_scatter", "all_reduce") and large and phase != "optimizer":
        return (
            f"Use {network}, a larger batch (or gradient accumulation) for each reduction, reduction in a"
            " smaller dtype, or HSDP; the last bucket has nothing left to hide behind."
        )
    return f"Call it less often, combine small calls into one, or use {network}."
