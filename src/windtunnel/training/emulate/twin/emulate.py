"""From a stitched world and the costs of its parts to the time of an iteration and where it goes.

The steady step of every class is compiled (`program`), the world becomes a job with one simulated rank for
each colour (`job`), the job is replayed, and the times are mapped back to all ranks. An *iteration* is
the time between the ends of the last two of `COPIES` steps replayed back to back, the end of a step being
that of the last rank. The *split of the critical path* is that of the rank which ends last (of several
the one that computes most), see `walk`.

A replay that stands still is told in words: who waits for whom, in which calls, called from where. Calls that
meet by number can still hang: two groups whose collectives two ranks issue in opposite order on one stream,
or two ranks that both send before they receive.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import numpy as np
from numpy.typing import NDArray

from windtunnel.cluster.model import Cluster
from windtunnel.engines.replay import ReplayResult, Stalled, replay
from windtunnel.training.emulate.graph import EventKind, Note, Slice
from windtunnel.training.emulate.policy.groups import Deadlock, at, call_words, ranks_words
from windtunnel.training.emulate.policy.stitch import StitchedWorld
from windtunnel.training.emulate.twin.findings import CollectiveUse, RankWait, collective_table, largest_waits
from windtunnel.training.emulate.twin.job import CollectiveSeconds, Slow, WorldJob, build, slowness
from windtunnel.training.emulate.twin.program import StepProgram, step_program
from windtunnel.training.emulate.twin.walk import StepSplit, compute_spans, intervals, split_step

Floats = NDArray[np.float64]

# Jitter tells all ranks apart, so that each has to be simulated; beyond this many nodes that is refused.
JITTER_NODES = 40_000_000


@dataclass(frozen=True)
class WorldCosts:
    """What everything costs, class by class.

    ``operators[class]``: seconds of each row of the operator table. ``host_operators[class]``: host
    seconds of each row, by phase; [rows, phases]. ``host_events[class]``: host seconds of the other kinds
    of events, by phase; [kinds, phases]. ``collective(row, group)``: seconds of a collective of that
    group; for a message the group is the pair (sender, receiver). ``beside``: by how many seconds a second
    of a collective delays the operators that run beside it.
    """

    operators: list[Floats]
    host_operators: list[Floats]
    host_events: list[Floats]
    collective: CollectiveSeconds
    beside: float = 0.0


@dataclass(frozen=True)
class Timing:
    """The emulated times of a steady step: where several make a period, of the mean one.

    ``step_s``: of each step of the period. ``rank_iteration_s[rank]``: between the ends of the rank's last
    two periods. ``rank_busy_s[rank]``: of its last one, how long its compute streams ran operators.
    ``critical_path``: seconds by kind, which add up to ``iteration_time_s``; of ``critical_rank``.
    ``window``: of the whole last period. ``simulated``: ranks that were replayed, for all
    ``world_size``.
    """

    iteration_time_s: float
    step_s: tuple[float, ...]
    rank_iteration_s: Floats
    rank_busy_s: Floats
    critical_rank: int
    critical_path: dict[str, float]
    collectives: list[CollectiveUse]
    waits: list[RankWait]
    simulated: int
    events: int
    job: WorldJob
    result: ReplayResult
    split: StepSplit
    window: tuple[float, float]
    notes: list[Note] = field(default_factory=list)


def replay_world(
    world: StitchedWorld, cluster: Cluster, costs: WorldCosts, *, slow: Sequence[Slow] = (),
    jitter: float = 0.0, seed: int = 0, every_rank: bool = False,
) -> Timing:  # fmt: skip
    """Replay the steady step of all ranks of ``world`` on ``cluster``.

    ``jitter``: sigma of a lognormal factor (mean one) on every operator, drawn for each rank by itself from
    ``seed``. ``every_rank``: simulate each rank by itself even where ranks are alike (the times are the
    same).

    Raises:
        Deadlock: the calls meet, but in an order in which streams block each other for ever.
    """
    notes: list[Note] = []
    programs = compile_steps(world, cluster, costs)
    rows = world.classes.rank_class
    if jitter > 0:
        nodes = int(sum(programs[row].nodes * programs[row].copies for row in rows.tolist()))
        every_rank = nodes <= JITTER_NODES
        if not every_rank:
            text = (
                f"jitter was drawn once for all ranks that are alike: {world.size} ranks by themselves"
                f" are {nodes:.0f} events, more than {JITTER_NODES}"
            )
            notes.append(Note(text))
    slower = slowness(slow, cluster, world.size)
    job = build(
        world, cluster, programs, costs.collective, slower, jitter=jitter, seed=seed, every_rank=every_rank
    )
    try:
        result = replay(job.replay)
    except Stalled as stalled:
        raise deadlock_of(job, stalled) from None
    if costs.beside:
        job = delayed(job, result, costs.beside)
        result = replay(job.replay)

    ends = step_ends(job, result)
    begin, end = float(ends[:, -2].max()), float(ends[:, -1].max())
    colours = range(job.replay.ranks)
    busy = np.array([_covered(*compute_spans(job, result, c, *ends[c, -2:].tolist())) for c in colours])
    last = np.flatnonzero(ends[:, -1] >= end * (1 - 1e-12))
    critical = int(last[np.argmax(busy[last])])
    steps = world.classes.classes[0].slice.period
    iteration = (end - begin) / steps
    split = split_step(job, result, critical, begin, end).over(steps)
    return Timing(
        iteration_time_s=iteration, step_s=_step_seconds(job, result, begin),
        rank_iteration_s=(ends[:, -1] - ends[:, -2])[job.colour] / steps,
        rank_busy_s=busy[job.colour] / steps, critical_rank=split.rank, critical_path=dict(split.seconds),
        collectives=collective_table(job, result, split),
        waits=largest_waits(job, cluster, split, iteration), simulated=job.replay.ranks,
        events=result.events, job=job, result=result, split=split, window=(begin, end), notes=notes,
    )  # fmt: skip


def delayed(job: WorldJob, result: ReplayResult, beside: float) -> WorldJob:
    """The job with operators that take longer, by what ran beside them in its last copy of the step.

    The kernels of a collective hold multiprocessors and memory bandwidth while they run. Classes are measured
    by their first simulated rank. A collective that an operator hides lasts no longer for it, so one round is
    enough.
    """
    programs = list(job.programs)
    for row in np.unique(job.replay.rank_program).tolist():
        step = programs[row]
        colour = int(np.flatnonzero(job.replay.rank_program == row)[0])
        last = slice((step.copies - 1) * step.nodes, None)
        start, stop = (times[last] for times in result.of(colour))
        queue, calls = step.program.queue[last], step.is_join[last]
        extra = np.zeros(step.nodes)
        for own in np.unique(queue).tolist():
            beside_it = calls & (queue != own)
            begins, ends = intervals(start[beside_it], stop[beside_it])
            if len(begins):
                at = np.stack([begins, ends], 1).ravel()
                busy = np.cumsum(np.diff(at, prepend=at[0]) * (np.arange(len(at)) % 2))
                shared = np.interp(stop, at, busy) - np.interp(start, at, busy)
                extra += np.where(step.computes[last] & (queue == own), beside * shared, 0.0)
        longer = step.program.duration + np.tile(extra, step.copies)
        programs[row] = replace(step, program=replace(step.program, duration=longer))
    changed = replace(job.replay, programs=[step.program for step in programs])
    return replace(job, replay=changed, programs=programs)


def compile_steps(world: StitchedWorld, cluster: Cluster, costs: WorldCosts) -> list[StepProgram]:
    """The steady step of each class as a program, at the given costs."""
    on_host = cluster.host.device.kind == "cpu"
    spare = cluster.host.cpu_cores > cluster.host.devices
    programs = []
    for row, cls in enumerate(world.classes.classes):
        seconds, host = event_seconds(
            cls.slice, costs.operators[row], costs.host_operators[row], costs.host_events[row]
        )
        programs.append(step_program(cls.slice, seconds, host, on_host, spare_cores=spare))
    return programs


def event_seconds(
    slice_: Slice, operators: Floats, host_operators: Floats, host_events: Floats
) -> tuple[Floats, Floats]:
    """Device seconds (operators only) and host seconds of each event of the steady step."""
    events = slice_.events[slice(*slice_.steady)]
    kind, phase, ref = events["kind"], events["phase"], events["ref"]
    host = host_events[kind, phase]
    seconds = np.zeros(len(events))
    is_op = kind == EventKind.OP
    if is_op.any():
        seconds[is_op] = operators[ref[is_op]]
        host[is_op] = host_operators[ref[is_op], phase[is_op]]
    return seconds, host


def step_ends(job: WorldJob, result: ReplayResult) -> Floats:
    """When each step of each simulated rank ends: [colours, copies]."""
    copies = job.programs[0].copies
    ends = np.zeros((job.replay.ranks, copies))
    for c in range(job.replay.ranks):
        stop = result.of(c)[1]
        if len(stop):
            ends[c] = np.maximum.accumulate(stop.reshape(copies, -1).max(axis=1))
    return ends


def _step_seconds(job: WorldJob, result: ReplayResult, begin: float) -> tuple[float, ...]:
    """Of each step in the last copy of the period, which begins at ``begin``: from the end of the step before
    to that of its last rank."""
    last = np.full(job.programs[0].slice.period, begin)
    for c in range(job.replay.ranks):
        program = job.programs[job.class_of(c)]
        stop = np.maximum.accumulate(np.append(begin, result.of(c)[1][-program.nodes or None :]))
        closes = [end for _, end in program.slice.steps[-len(last) :]]
        last = np.maximum(last, stop[np.searchsorted(program.event, closes)])
    return tuple(np.diff(last, prepend=begin).tolist())


def _covered(starts: Floats, stops: Floats) -> float:
    return float((stops - starts).sum())


def deadlock_of(job: WorldJob, stalled: Stalled) -> Deadlock:
    """The deadlock that ``stalled`` is, told by one call that waits and where those it waits for stand."""
    rows = zip(stalled.rank.tolist(), stalled.join.tolist(), strict=True)
    where: dict[int, int] = {}
    for k, (rank, join) in enumerate(rows):
        if join >= 0:
            where.setdefault(rank, k)
    for p in range(len(stalled.pending)):
        missing = stalled.missing_rank[stalled.missing_ptr[p] : stalled.missing_ptr[p + 1]].tolist()
        waiting = np.flatnonzero(stalled.join == stalled.pending[p])
        late = [rank for rank in missing if rank in where]
        if len(waiting) and late:
            first = _stands(job, stalled, int(waiting[0]))
            second = _stands(job, stalled, where[late[0]])
            return Deadlock(
                f"the job would hang: {first}, while {second}, and neither comes to the other's call: calls"
                " on one stream run in the order in which they are made, so all ranks must make them in one"
                " order (or send and receive in one batch)"
            )
    blocked = job.leader[np.unique(stalled.rank)]
    return Deadlock(f"the job would hang: {ranks_words(blocked.tolist())} wait for each other for ever")


def _stands(job: WorldJob, stalled: Stalled, k: int) -> str:
    colour = int(stalled.rank[k])
    row = job.class_of(colour)
    calls = job.world.calls[row]
    call = job.call_at(row, int(stalled.node[k]))
    rank = int(job.leader[colour])
    alike = int((job.colour == colour).sum()) - 1
    words = f"rank {rank}{f' (and {alike} like it)' if alike else ''} waits in {call_words(call.row)}"
    if call.is_message:
        sender, receiver = call.ranks(rank)
        words += f" to rank {receiver}" if rank == sender else f" from rank {sender}"
    order = 1 + calls.channels[call.channel].tolist().index(call.number)
    return (
        f"{words} (group {call.family.name!r} of {call.family.size} ranks, call {order} of the step)"
        f"{at(calls.slice, int(calls.event[call.number]))}"
    )
