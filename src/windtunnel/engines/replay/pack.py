"""From a job to the records of `layout`: checked, laid end to end, and without redundant dependencies.

A dependency on the node's own queue is kept by first in, first out; one on a host node by issue order; and of
several on one queue only the latest can matter. What remains is a few for each hundred nodes, and only the
nodes that others depend on need their end remembered.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np

from windtunnel.engines.replay.data import Ints, Longs, Program, ReplayJob
from windtunnel.engines.replay.layout import DEP, JOIN, MEMBER, MOVES, NODE, QUEUE, RANK, Packed, Records, jit


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
        wanted = np.unique(dep_node)
        slot, slots = np.full(n, -1, np.int32), len(wanted)
        slot[wanted] = np.arange(slots)
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
