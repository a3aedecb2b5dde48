"""The replay itself: one pass over all nodes of all ranks, each visited when its start is known.

A rank runs in issue order for as long as everything it meets is settled. Where a join still lacks members
the rank steps aside; the last member to come settles the join and wakes the others. Only when no rank can
run are ranks that stepped aside sent *ahead* of what they wait for: their hosts go on issuing, one join
further at a time, and nodes on standing queues keep their issue time until the queue moves. So the common
job, in which ranks meet their joins in the same order, streams through memory, and a job that crosses joins
on several queues is still replayed exactly as first-in-first-out queues would run it. When nobody can run
or go ahead, the job has ended or hangs.

Which rank is taken first never changes a time: every time is a maximum and a sum over settled times.
"""

from __future__ import annotations

import numpy as np

from windtunnel.base.compiled import jit, jit_inline
from windtunnel.engines.replay.layout import MOVES, Packed


@jit_inline
def jitter_factor(sigma: float, seed: np.uint64, rank: int, node: int) -> float:
    """Lognormal factor of mean one. The hash is SplitMix64's finaliser (Steele et al., OOPSLA 2014), the
    normal variate Box and Muller's."""
    word = seed * np.uint64(0x9E3779B97F4A7C15) + (np.uint64(rank) << np.uint64(32)) + np.uint64(node)
    for _ in range(2):
        word = (word ^ (word >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
        word = (word ^ (word >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
        word = (word ^ (word >> np.uint64(31))) + np.uint64(0x9E3779B97F4A7C15)
    radius = np.sqrt(-2.0 * np.log((np.float64(word >> np.uint64(32)) + 0.5) / 4294967296.0))
    angle = 2.0 * np.pi * np.float64(word & np.uint64(0xFFFFFFFF)) / 4294967296.0
    return np.exp(sigma * radius * np.cos(angle) - 0.5 * sigma * sigma)  # type: ignore[no-any-return]


@jit_inline
def _join(data: Packed, top: int, r: int, i: int, ready: float) -> int:
    """Rank r, which stands before its join node i, has come to it. Settles the join if it is the last member.

    Returns the new height of the stack of runnable ranks, on which the other members are put then.
    """
    rank = data.ranks[r]
    k = rank.member_base + data.nodes[rank.node_base + i].join
    member = data.members[k]
    join = data.joins[member.join]
    member.rank = r
    member.earlier = join.last_member
    join.last_member = k
    join.latest = max(join.latest, ready)
    join.lacking -= 1
    if data.keep:
        data.join_ready[k] = ready
    if join.lacking > 0:
        return top
    start = join.latest
    end = start + join.duration
    k = join.last_member
    while k >= 0:
        member = data.members[k]
        rank = data.ranks[member.rank]
        i = data.join_node[rank.join_node_base + k - rank.member_base]
        node = data.nodes[rank.node_base + i]
        queue = data.queues[rank.queue_base + node.queue]
        if data.keep:
            data.start[rank.start_base + i] = start
        if node.slot >= 0:
            data.end[rank.end_base + node.slot] = end
        queue.tail = end
        queue.busy += join.duration
        queue.arrived = 0
        if node.queue == 0:
            rank.clock = end
            rank.host_node = i + 1
        if node.queue > 0 and node.after < rank.host_node:
            queue.front = node.after
        else:
            queue.front = MOVES
            rank.standing -= 1
        if rank.is_runnable == 0:
            rank.is_runnable = 1
            data.runnable[top] = member.rank
            top += 1
        k = member.earlier
    return top


@jit_inline
def _drain(data: Packed, top: int, r: int) -> int:
    """Move the standing device queues of rank r as far as they go. Returns the height of the runnable
    stack."""
    rank = data.ranks[r]
    moved = True
    while moved and rank.standing > 0:
        moved = False
        for q in range(1, rank.queues):
            queue = data.queues[rank.queue_base + q]
            while queue.front != MOVES and queue.arrived == 0:
                i = queue.front
                node = data.nodes[rank.node_base + i]
                begin = max(queue.tail, data.start[rank.start_base + i])
                settled = True
                for d in range(node.dep_begin, node.dep_end):
                    dep = data.deps[d]
                    if data.queues[rank.queue_base + dep.queue].front <= dep.node:
                        settled = False
                        break
                    begin = max(begin, data.end[rank.end_base + dep.slot])
                if not settled:
                    break
                moved = True
                if node.join >= 0:
                    queue.arrived = 1
                    top = _join(data, top, r, i, begin)
                    continue
                length = node.duration * rank.compute_scale
                if data.sigma > 0.0:
                    length *= jitter_factor(data.sigma, data.seed, r, i)
                end = begin + length
                if data.keep:
                    data.start[rank.start_base + i] = begin
                if node.slot >= 0:
                    data.end[rank.end_base + node.slot] = end
                queue.busy += length
                queue.tail = end
                if node.after < rank.host_node:
                    queue.front = node.after
                else:
                    queue.front = MOVES
                    rank.standing -= 1
    return top


@jit_inline
def _issue(data: Packed, top: int, r: int, ahead: bool) -> tuple[int, bool, bool]:
    """Let the host of rank r issue nodes until one must wait or, with ``ahead``, past one join.

    Returns the height of the runnable stack, whether the host could issue more, and whether the last join
    that it came to was settled at once.
    """
    rank = data.ranks[r]
    queues = data.queues[rank.queue_base : rank.queue_base + rank.queues]
    nodes = data.nodes[rank.node_base : rank.node_base + rank.node_count]
    start_base, end_base = rank.start_base, rank.end_base
    compute_scale, issue_scale = rank.compute_scale, rank.issue_scale
    keep, sigma = data.keep, data.sigma
    clock = rank.clock
    standing = rank.standing
    host_busy = queues[0].busy
    more = True
    settled_join = False
    i = int(rank.host_node)
    while i < len(nodes):
        node = nodes[i]
        q = node.queue
        queue = queues[q]
        cost = node.issue * issue_scale
        issued = clock + cost
        if q == 0:
            begin = clock
        else:
            if standing > 0 and queue.front != MOVES:
                data.start[start_base + i] = issued
                clock = issued
                host_busy += cost
                i += 1
                continue
            begin = max(issued, queue.tail)
        settled = True
        for d in range(node.dep_begin, node.dep_end):
            dep = data.deps[d]
            if standing > 0 and queues[dep.queue].front <= dep.node:
                settled = False
                break
            begin = max(begin, data.end[end_base + dep.slot])
        if q > 0:
            clock = issued
        elif not settled:
            more = False
            break
        host_busy += cost
        if settled and node.join < 0:
            length = node.duration * (issue_scale if q == 0 else compute_scale)
            if sigma > 0.0:
                length *= jitter_factor(sigma, data.seed, r, i)
            if q == 0:
                end = (begin + cost) + length
                clock = end
                host_busy += length
            else:
                end = begin + length
                queue.busy += length
                queue.tail = end
            if keep:
                data.start[start_base + i] = begin
            if node.slot >= 0:
                data.end[end_base + node.slot] = end
            i += 1
            continue
        # The node must wait, if only for an instant: its queue stands before it.
        queue.front = i
        standing += 1
        rank.standing = standing
        if not settled:
            data.start[start_base + i] = issued
            i += 1
            continue
        queue.arrived = 1
        rank.clock = clock
        queues[0].busy = host_busy
        if q == 0:
            rank.host_node = i
            begin += cost
        else:
            rank.host_node = i + 1
        top = _join(data, top, r, i, begin)
        clock = rank.clock
        host_busy = queues[0].busy
        i = int(rank.host_node)
        more = bool(queues[0].arrived == 0)
        settled_join = rank.standing < standing
        standing = rank.standing
        if ahead or not settled_join:
            break
    rank.clock = clock
    rank.host_node = i
    queues[0].busy = host_busy
    return top, more and i < len(nodes), settled_join


@jit
def run(data: Packed) -> None:
    """Replay until nobody can move; ``data.runnable`` holds all ranks at the start."""
    count = len(data.ranks)
    top = count
    waiting = np.empty(count + 1, np.int32)  # a ring of ranks that stepped aside, to be sent ahead
    first, filled = 0, 0
    while True:
        ahead = top == 0
        if not ahead:
            top -= 1
            r = data.runnable[top]
        elif filled > 0:
            r = waiting[first]
            first = first + 1 if first < count else 0
            filled -= 1
            data.ranks[r].is_waiting = 0
        else:
            return
        rank = data.ranks[r]
        rank.is_runnable = 1  # while it is at work it need not be woken
        if rank.standing > 0:
            top = _drain(data, top, r)
        more, settled = data.queues[rank.queue_base].arrived == 0, False
        if rank.standing == 0 or (ahead and more):
            top, more, settled = _issue(data, top, r, ahead and rank.standing > 0)
        rank.is_runnable = 0
        if settled:
            rank.is_runnable = 1
            data.runnable[top] = r
            top += 1
        elif more and rank.is_waiting == 0:
            place = first + filled
            waiting[place if place <= count else place - count - 1] = r
            filled += 1
            rank.is_waiting = 1
