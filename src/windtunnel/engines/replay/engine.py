"""`replay`: from a job to its times, or to the reason why it hangs; and how a job is checked and packed."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np

from windtunnel.base.compiled import jit
from windtunnel.engines.replay.kernel import run
from windtunnel.engines.replay.layout import (
    DEP,
    JOIN,
    MEMBER,
    MOVES,
    NODE,
    QUEUE,
    RANK,
    Ints,
    Longs,
    Packed,
    Program,
    Records,
    ReplayJob,
    ReplayResult,
    Stalled,
)


def pack(job: ReplayJob, keep: bool) -> Packed:
    """Check and lay out ``job``. With ``keep`` every node has a slot, else only those that others wait for.

    Raises:
        ValueError: an array of the wrong length, a dependency on a later node, a negative time, a join out
            of range or with more members than its size.
    """
    parts = [_pack_program(number, program, keep) for number, program in enumerate(job.programs)]
    _check_ranks(job)
    for part, base in zip(parts, starts([len(part.deps) for part in parts]), strict=False):
        part.nodes["dep_begin"] += base
        part.nodes["dep_end"] += base
    slots = np.array([part.slots for part in parts], np.int64)
    queues = np.array([part.queues for part in parts], np.int64)
    program = np.asarray(job.rank_program)
    ranks = np.zeros(job.ranks, RANK)
    ranks["compute_scale"] = job.compute_scale
    ranks["issue_scale"] = job.issue_scale
    ranks["node_base"] = starts([len(part.nodes) for part in parts])[program]
    ranks["node_count"] = np.diff(job.rank_ptr)
    ranks["start_base"] = job.rank_ptr[:-1]
    ranks["end_base"] = starts(slots[program])[:-1]
    ranks["member_base"] = job.rank_join_ptr[:-1]
    ranks["queue_base"] = starts(queues[program])[:-1]
    ranks["queues"] = queues[program]
    ranks["join_node_base"] = starts([len(nodes) for nodes in job.join_nodes])[program]
    ranks["is_runnable"] = 1

    queue_states = np.zeros(int(queues[program].sum()), QUEUE)
    queue_states["front"] = MOVES
    joins = np.zeros(len(job.join_size), JOIN)
    joins["duration"] = job.join_duration
    joins["lacking"] = job.join_size
    joins["last_member"] = -1
    members = np.empty(len(job.rank_join), MEMBER)
    members["join"] = job.rank_join
    members["rank"] = -1
    return Packed(
        nodes=np.concatenate([np.zeros(0, NODE), *(part.nodes for part in parts)]),
        deps=np.concatenate([np.zeros(0, DEP), *(part.deps for part in parts)]),
        ranks=ranks,
        queues=queue_states,
        joins=joins,
        members=members,
        join_node=np.concatenate(
            [np.zeros(0, np.int32), *(nodes.astype(np.int32) for nodes in job.join_nodes)]
        ),
        runnable=np.arange(job.ranks, dtype=np.int32)[::-1].copy(),
        # Memory that is never written is never taken: without times, `start` is touched only for nodes that
        # wait.
        start=np.empty(int(job.rank_ptr[-1])),
        end=np.empty(int(slots[program].sum())),
        join_ready=np.empty(len(members) if keep else 0),
        keep=keep,
        sigma=float(job.jitter),
        seed=np.uint64(job.seed),
    )


def starts(counts: Any) -> Longs:
    """Where the parts of the given lengths begin when laid end to end, and where the last ends."""
    return np.concatenate([np.zeros(1, np.int64), np.cumsum(counts, dtype=np.int64)])


class _Part(NamedTuple):
    """One program, with the slots and queues that a rank of it has."""

    nodes: Records
    deps: Records
    slots: int
    queues: int


def _pack_program(number: int, program: Program, keep: bool) -> _Part:
    n = len(program.queue)
    queue = np.ascontiguousarray(program.queue, np.int32)
    join = np.asarray(program.join)
    dep_ptr = np.ascontiguousarray(program.dep_ptr, np.int64)
    dep = np.ascontiguousarray(program.dep, np.int32)
    where = f"program {number}"
    if not len(program.duration) == len(program.issue) == len(join) == n or len(dep_ptr) != n + 1:
        raise ValueError(f"{where}: its arrays must have one entry for each of {n} nodes (dep_ptr one more)")
    if n and queue.min() < 0:
        raise ValueError(f"{where}: queue numbers must not be negative")
    if not (np.all(program.duration[join < 0] >= 0) and np.all(program.issue >= 0)):
        raise ValueError(f"{where}: durations and issue times must be numbers that are not negative")
    if not np.array_equal(join[join >= 0], np.arange(np.count_nonzero(join >= 0))):
        raise ValueError(f"{where}: join ordinals must be 0, 1, 2… in issue order")
    if dep_ptr[0] != 0 or dep_ptr[-1] != len(dep) or np.any(np.diff(dep_ptr) < 0):
        raise ValueError(f"{where}: dep_ptr must rise from 0 to {len(dep)}")
    if np.any(dep < 0) or np.any(dep >= np.repeat(np.arange(n), np.diff(dep_ptr))):
        raise ValueError(f"{where}: a node may depend only on earlier nodes")
    queues = 1 + int(queue.max(initial=0))
    after, dep_count, dep_node = _prune(queue, dep_ptr, dep, queues)
    slot, slots = np.arange(n, dtype=np.int32), n
    if not keep:
        targets = np.unique(dep_node)
        slot, slots = np.full(n, -1, np.int32), len(targets)
        slot[targets] = np.arange(slots)
    bounds = starts(dep_count)
    nodes = np.empty(n, NODE)
    nodes["duration"] = program.duration
    nodes["issue"] = program.issue
    nodes["queue"] = queue
    nodes["join"] = join
    nodes["after"] = after
    nodes["slot"] = slot
    nodes["dep_begin"] = bounds[:-1]
    nodes["dep_end"] = bounds[1:]
    deps = np.empty(len(dep_node), DEP)
    deps["node"] = dep_node
    deps["queue"] = queue[dep_node]
    deps["slot"] = slot[dep_node]
    return _Part(nodes, deps, slots, queues)


@jit
def _prune(queue: Ints, dep_ptr: Longs, dep: Ints, queues: int) -> tuple[Ints, Ints, Ints]:
    n = len(queue)
    after = np.full(n, MOVES, np.int32)
    count = np.zeros(n, np.int32)
    node = np.empty(len(dep), np.int32)
    last = np.full(queues, -1, np.int32)
    place = np.full(queues, -1, np.int64)  # where this node's dependency on a queue was put
    total = 0
    for i in range(n):
        own = queue[i]
        if last[own] >= 0:
            after[last[own]] = i
        last[own] = i
        first = total
        for d in range(dep_ptr[i], dep_ptr[i + 1]):
            q = queue[dep[d]]
            if q == own or q == 0:
                continue
            if place[q] < first:
                place[q] = total
                node[total] = dep[d]
                total += 1
            else:
                node[place[q]] = max(node[place[q]], dep[d])
        count[i] = total - first
    return after, count, node[:total].copy()


def _check_ranks(job: ReplayJob) -> None:
    count, joins = job.ranks, len(job.join_size)
    if (
        len(job.compute_scale) != count
        or len(job.issue_scale) != count
        or len(job.rank_join_ptr) != count + 1
    ):
        raise ValueError(f"the arrays over ranks must have one entry for each of {count} ranks")
    if count and (job.rank_program.min() < 0 or job.rank_program.max() >= len(job.programs)):
        raise ValueError(f"rank_program must name programs 0 to {len(job.programs) - 1}")
    per_program = np.array([len(nodes) for nodes in job.join_nodes], np.int64)
    if job.rank_join_ptr[0] != 0 or np.any(np.diff(job.rank_join_ptr) != per_program[job.rank_program]):
        raise ValueError("rank_join must hold one join for each join node of the rank's program")
    if len(job.join_duration) != joins or len(job.rank_join) != job.rank_join_ptr[-1]:
        raise ValueError("join_size and join_duration, rank_join and rank_join_ptr must agree in length")
    if len(job.rank_join) >= MOVES or joins >= MOVES:
        raise ValueError("a job may have fewer than 2^31 join nodes over all ranks")
    if len(job.rank_join) and (job.rank_join.min() < 0 or job.rank_join.max() >= joins):
        raise ValueError(f"rank_join must name joins 0 to {joins - 1}")
    if np.any(np.bincount(job.rank_join, minlength=joins) > job.join_size):
        raise ValueError("a join has more members than its size")
    factors = (job.compute_scale, job.issue_scale, job.join_duration)
    if not all(np.all(values >= 0) for values in factors) or not job.jitter >= 0:
        raise ValueError("scales, join durations and jitter must be numbers that are not negative")


def replay(job: ReplayJob, *, keep_times: bool = True) -> ReplayResult:
    """Replay every queue of every rank of ``job``.

    A host node starts when the host is free and its dependencies have ended, and ends after issue and
    duration. A device node costs the host its issue time, then starts when its queue is free and its
    dependencies have ended. A join node gets ready in the same way (on the host, after its issue time), and
    starts when all members are ready. A node behind a waiting join on the same queue waits, one on another
    queue does not.

    Takes 16 bytes a node of a rank with ``keep_times``; without, only what is proportional to ranks,
    queues, joins and the nodes that others depend on.

    Raises:
        Stalled: some ranks can never go on.
        ValueError: the job's arrays do not fit each other.
    """
    data = pack(job, keep_times)
    run(data)
    ranks = data.ranks
    if np.any(ranks["host_node"] < ranks["node_count"]) or np.any(ranks["standing"] > 0):
        raise _stalled(job, data)
    shape = (job.ranks, int(ranks["queues"].max(initial=1)))
    tail, busy = np.zeros(shape), np.zeros(shape)
    owner, queue = _queue_places(data)
    tail[owner, queue] = data.queues["tail"]
    busy[owner, queue] = data.queues["busy"]
    rank_end = np.maximum(ranks["clock"], tail.max(axis=1, initial=0.0))
    nothing = np.zeros(0)
    return ReplayResult(
        rank_ptr=job.rank_ptr, start=data.start if keep_times else nothing,
        end=data.end if keep_times else nothing, rank_end=rank_end, queue_busy=busy,
        makespan=float(rank_end.max(initial=0.0)), events=int(job.rank_ptr[-1]), join_ready=data.join_ready,
        join_position=_join_positions(job) if keep_times else np.zeros(0, np.int64),
    )  # fmt: skip


def _queue_places(data: Packed) -> tuple[Longs, Longs]:
    """For each entry of ``data.queues``, its rank and its number there."""
    counts = data.ranks["queues"].astype(np.int64)
    owner = np.repeat(np.arange(len(counts)), counts)
    return owner, np.arange(len(owner)) - data.ranks["queue_base"][owner]


def _join_positions(job: ReplayJob) -> Longs:
    """Where the join nodes of all ranks are among all nodes, in the order of ``job.rank_join``."""
    parts = [job.rank_ptr[r] + job.join_nodes[p] for r, p in enumerate(job.rank_program)]
    return np.concatenate([np.zeros(0, np.int64), *parts])


def _stalled(job: ReplayJob, data: Packed) -> Stalled:
    ranks = data.ranks
    # Queues that stand, and hosts that wait for a dependency (these have no front of their own).
    front = data.queues["front"].copy()
    hosts = ranks["queue_base"]
    host_waits = (ranks["host_node"] < ranks["node_count"]) & (front[hosts] == MOVES)
    front[hosts[host_waits]] = ranks["host_node"][host_waits]
    owner, _ = _queue_places(data)
    stands = np.flatnonzero(front != MOVES)
    rank, node = owner[stands], front[stands]
    at_join = data.queues["arrived"][stands] > 0
    ordinal = data.nodes["join"][ranks["node_base"][rank] + node]
    join = np.full(len(rank), -1, np.int64)
    join[at_join] = job.rank_join[(ranks["member_base"][rank] + ordinal)[at_join]]
    pending = np.unique(join[at_join])

    never_came = np.flatnonzero((data.members["rank"] < 0) & np.isin(job.rank_join, pending))
    never_came = never_came[np.argsort(job.rank_join[never_came], kind="stable")]
    per_join = np.bincount(np.searchsorted(pending, job.rank_join[never_came]), minlength=len(pending))
    late = np.searchsorted(job.rank_join_ptr, never_came, side="right") - 1
    members = np.bincount(job.rank_join, minlength=len(job.join_size))[pending]
    return Stalled(
        rank=rank.astype(np.int32), node=node, join=join, pending=pending, missing_ptr=starts(per_join),
        missing_rank=late.astype(np.int32),
        missing_node=data.join_node[ranks["join_node_base"][late] + never_came - ranks["member_base"][late]],
        absent=(job.join_size[pending] - members).astype(np.int32),
    )  # fmt: skip
