"""The critical path: what the end of the job waited for, from its last instant back to its first.

At every node the walk asks what bound its start: the node before it on its queue, a dependency, the host
that issued it or, for a join, the member that was ready last, to whose rank it then moves. The answer is
found in the times themselves, because a start *is* one of the times it is the maximum of. The pieces found
follow each other without gap, so their lengths add up to the makespan.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TypeVar

import numpy as np
from numpy.typing import NDArray

from windtunnel.engines.replay.engine import pack
from windtunnel.engines.replay.layout import (
    Floats,
    Ints,
    Longs,
    Packed,
    ReplayJob,
    ReplayResult,
    jit,
    jit_inline,
)

N = TypeVar("N", np.int32, np.float64)

RUN = 0
"""The node's own duration, on its queue or on the host."""
ISSUE = 1
"""The host issuing the node."""
TRANSFER = 2
"""A join, from its last member's readiness to its end."""


@dataclass(frozen=True)
class Path:
    """Pieces of the critical path in order of time: ``begin[0]`` is 0, ``end[-1]`` the makespan, and each
    piece begins where the one before it ends. ``reason`` is RUN, ISSUE or TRANSFER, spent by ``rank`` on
    its ``node``; for a TRANSFER the rank is one whose later nodes the path goes through."""

    rank: Ints
    node: Ints
    reason: Ints
    begin: Floats
    end: Floats


def critical_path(job: ReplayJob, result: ReplayResult) -> Path:
    """Walk back from the last end of ``result``, which must be the replay of ``job`` with times kept.

    Where several things bound a start at the same instant, the queue is preferred to a dependency, a
    dependency to the host, and at a join the rank at hand, then the lowest, to the others. Pieces of no
    length are left out.

    Raises:
        ValueError: the result has no times, or is not of this job.
    """
    if len(result.end) != job.rank_ptr[-1]:
        raise ValueError("the critical path needs the times of all nodes of this job")
    if not len(result.end):
        nothing, never = np.zeros(0, np.int32), np.zeros(0)
        return Path(nothing, nothing, nothing, never, never)
    data = pack(job, True)
    order = np.argsort(job.rank_join, kind="stable")
    member_ptr = np.concatenate(
        [np.zeros(1, np.int64), np.cumsum(np.bincount(job.rank_join, minlength=len(job.join_size)))]
    )
    owner = np.repeat(np.arange(job.ranks), np.diff(job.rank_join_ptr))
    last = int(np.argmax(result.end))
    rank = int(np.searchsorted(job.rank_ptr, last, side="right")) - 1
    before = [_before(data, program, job) for program in range(len(job.programs))]
    ranks, nodes, reasons, begins, ends = _walk(
        data, np.concatenate([np.zeros(0, np.int32), *before]), order, member_ptr, owner, result.start,
        result.end, result.join_ready, rank, last - int(job.rank_ptr[rank]),
    )  # fmt: skip
    return Path(ranks[::-1], nodes[::-1], reasons[::-1], begins[::-1], ends[::-1])


def _before(data: Packed, program: int, job: ReplayJob) -> Ints:
    """For each node of a program the one before it on its queue, or -1."""
    queue = job.programs[program].queue
    before = np.full(len(queue), -1, np.int32)
    order = np.argsort(queue, kind="stable").astype(np.int32)
    same = queue[order[1:]] == queue[order[:-1]]
    before[order[1:][same]] = order[:-1][same]
    return before


@jit
def _walk(
    data: Packed, before: Ints, order: Longs, member_ptr: Longs, owner: Longs, start: Floats, end: Floats,
    join_ready: Floats, r: int, i: int,
) -> tuple[Ints, Ints, Ints, Floats, Floats]:  # fmt: skip
    size = 1024
    ranks = np.empty(size, np.int32)
    nodes = np.empty(size, np.int32)
    reasons = np.empty(size, np.int32)
    begins = np.empty(size)
    ends = np.empty(size)
    count = 0
    longest = data.ranks["node_count"].max()
    clocks = np.empty(longest + 1)
    while True:
        rank = data.ranks[r]
        node = data.nodes[rank.node_base + i]
        at = rank.start_base + i
        k = 0
        finish = end[at]
        instant = start[at]
        reason = RUN
        ready = instant
        if node.join >= 0:
            reason = TRANSFER
            k = rank.member_base + node.join
            ready = join_ready[k]
        elif node.queue == 0:
            instant += node.issue * rank.issue_scale
            ready = instant
        # Room for this piece, the issue of a host node, and a stretch of issues back to the last host node.
        if count + longest + 2 > size:
            grown = 2 * size + longest + 2
            ranks = _grow(ranks, grown)
            nodes = _grow(nodes, grown)
            reasons = _grow(reasons, grown)
            begins = _grow(begins, grown)
            ends = _grow(ends, grown)
            size = grown
        if finish > instant:
            ranks[count], nodes[count], reasons[count] = r, i, reason
            begins[count], ends[count] = instant, finish
            count += 1
        if node.join >= 0:
            if ready < instant:  # another member came last
                for m in range(member_ptr[data.members[k].join], member_ptr[data.members[k].join + 1]):
                    if join_ready[order[m]] == instant:
                        r = owner[order[m]]
                        rank = data.ranks[r]
                        i = data.join_node[rank.join_node_base + order[m] - rank.member_base]
                        node = data.nodes[rank.node_base + i]
                        at = rank.start_base + i
                        break
            ready = instant
        # What bound this readiness?
        h = -2  # the last host node before, once `clocks` are known
        if node.queue == 0:
            bound = start[at]
            if node.join >= 0:
                h = _host_clocks(data, end, r, i, clocks)
                bound = clocks[i]
                for d in range(node.dep_begin, node.dep_end):
                    bound = max(bound, end[rank.start_base + data.deps[d].slot])
            if ready > bound:
                ranks[count], nodes[count], reasons[count] = r, i, ISSUE
                begins[count], ends[count] = bound, ready
                count += 1
            ready = bound
        cause = -1
        if node.queue > 0:
            previous = before[rank.node_base + i]
            if previous >= 0 and end[rank.start_base + previous] == ready:
                cause = previous
        for d in range(node.dep_begin, node.dep_end):
            if cause < 0 and end[rank.start_base + data.deps[d].slot] == ready:
                cause = data.deps[d].node
        if cause >= 0:
            i = cause
            continue
        # The host: what it issued since its last own node.
        if h == -2:
            h = _host_clocks(data, end, r, i, clocks)
        last = i - 1 if node.queue == 0 else i
        for x in range(last, h, -1):
            if clocks[x + 1] > clocks[x]:
                ranks[count], nodes[count], reasons[count] = r, x, ISSUE
                begins[count], ends[count] = clocks[x], clocks[x + 1]
                count += 1
        if h < 0:
            break
        i = h
    return (
        ranks[:count].copy(), nodes[:count].copy(), reasons[:count].copy(), begins[:count].copy(),
        ends[:count].copy(),
    )  # fmt: skip


@jit_inline
def _host_clocks(data: Packed, end: Floats, r: int, i: int, clocks: Floats) -> int:
    """Fill ``clocks[x]``, when the host came to node x, for the nodes since the last host node before i, to
    i + 1.

    Returns that host node, or -1. The sums are those of the replay, so they are equal to the bit.
    """
    rank = data.ranks[r]
    h = i - 1
    while h >= 0 and data.nodes[rank.node_base + h].queue != 0:
        h -= 1
    clocks[h + 1] = end[rank.start_base + h] if h >= 0 else 0.0
    for x in range(h + 1, i + 1):
        clocks[x + 1] = clocks[x] + data.nodes[rank.node_base + x].issue * rank.issue_scale
    return h


@jit
def _grow(values: NDArray[N], size: int) -> NDArray[N]:
    grown = np.empty(size, values.dtype)
    grown[: len(values)] = values
    return grown
