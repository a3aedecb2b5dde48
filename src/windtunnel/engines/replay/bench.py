"""How many nodes a second the engine replays, on a large synthetic job."""

from __future__ import annotations

import resource
import statistics
import time

import numpy as np

from windtunnel.engines.replay.data import Program, ReplayJob
from windtunnel.engines.replay.engine import replay


def synthetic_job(
    ranks: int, nodes: int, *, group: int = 8, join_every: int = 20, programs: int = 1, slow: bool = True
) -> ReplayJob:
    """``ranks`` ranks of ``nodes`` nodes each. Every ``join_every``-th node is a join on queue 2, in turn
    among ``group`` neighbours and among the ranks of the same place in all groups; the compute queue waits
    for it two nodes later, and the host for the compute queue once in 5,000 nodes. With ``slow`` every rank
    has its own speed, so that joins really wait."""
    rng = np.random.default_rng(0)
    queue = np.ones(nodes, np.int32)
    at = np.arange(join_every - 1, nodes, join_every)
    queue[at] = 2
    queue[4999::5000] = 0
    joins = np.flatnonzero(queue == 2)
    join = np.full(nodes, -1, np.int32)
    join[joins] = np.arange(len(joins))
    waits = {int(node) + 2: int(node) for node in joins if node + 2 < nodes}
    waits |= {int(node): int(node) - 3 for node in np.flatnonzero(queue == 0)}
    has_dep = np.zeros(nodes, np.int64)
    has_dep[list(waits)] = 1
    program = Program(
        queue=queue,
        duration=rng.uniform(1e-5, 1e-4, nodes),
        issue=rng.uniform(2e-6, 8e-6, nodes),
        dep_ptr=np.concatenate([[0], np.cumsum(has_dep)]).astype(np.int32),
        dep=np.array([waits[node] for node in sorted(waits)], np.int32),
        join=join,
    )
    rank = np.arange(ranks)[:, None]
    ordinal = np.arange(len(joins))[None, :]
    groups = -(-ranks // group)
    widest = max(groups, group)
    instance = ordinal * widest + np.where(ordinal % 2 == 0, rank // group, rank % group)
    used, rank_join, size = np.unique(instance, return_inverse=True, return_counts=True)
    return ReplayJob(
        programs=[program] * programs,
        rank_program=(np.arange(ranks) % programs).astype(np.int32),
        compute_scale=rng.uniform(1.0, 1.1, ranks) if slow else np.ones(ranks),
        issue_scale=np.ones(ranks),
        rank_join_ptr=np.arange(ranks + 1, dtype=np.int64) * len(joins),
        rank_join=rank_join.reshape(-1).astype(np.int64),
        join_size=size.astype(np.int32),
        join_duration=rng.uniform(1e-5, 1e-3, len(used)),
    )


def events_per_second(
    ranks: int = 1024, nodes: int = 20_000, *, join_every: int = 20, keep_times: bool = True, repeats: int = 5
) -> dict[str, float]:
    """Replay a `synthetic_job` ``repeats`` times after a first run that compiles.

    Returns ``events_per_second`` (median), ``seconds`` (median), ``events`` and ``peak_bytes`` (the
    process's peak resident memory, the job itself included). Packing the job is part of the time.
    """
    replay(synthetic_job(2, 100), keep_times=keep_times)
    job = synthetic_job(ranks, nodes, join_every=join_every)
    seconds = []
    for _ in range(repeats):
        begin = time.perf_counter()
        events = replay(job, keep_times=keep_times).events
        seconds.append(time.perf_counter() - begin)
    median = statistics.median(seconds)
    return {
        "events_per_second": events / median,
        "seconds": median,
        "events": events,
        "peak_bytes": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024,
    }
