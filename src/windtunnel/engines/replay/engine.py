"""`replay`: from a job to its times, or to the reason why it hangs."""

from __future__ import annotations

import numpy as np

from windtunnel.engines.replay.data import Longs, ReplayJob, ReplayResult, Stalled
from windtunnel.engines.replay.kernel import run
from windtunnel.engines.replay.layout import MOVES, Packed
from windtunnel.engines.replay.pack import pack, starts


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
        rank_ptr=job.rank_ptr,
        start=data.start if keep_times else nothing,
        end=data.end if keep_times else nothing,
        rank_end=rank_end,
        queue_busy=busy,
        makespan=float(rank_end.max(initial=0.0)),
        events=int(job.rank_ptr[-1]),
        join_ready=data.join_ready,
        join_position=_join_positions(job) if keep_times else np.zeros(0, np.int64),
    )


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
        rank=rank.astype(np.int32),
        node=node,
        join=join,
        pending=pending,
        missing_ptr=starts(per_join),
        missing_rank=late.astype(np.int32),
        missing_node=data.join_node[ranks["join_node_base"][late] + never_came - ranks["member_base"][late]],
        absent=(job.join_size[pending] - members).astype(np.int32),
    )
