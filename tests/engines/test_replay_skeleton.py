"""A step without its computing gives the times of the replay with it, whatever joins last."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from replay_reference import random_job

from windtunnel.engines.replay import Program, ReplayJob, replay
from windtunnel.engines.replay.skeleton import skeleton

COPIES = 4


def tiled(job: ReplayJob, rng: np.random.Generator) -> ReplayJob:
    """The job's step several times in a row; some nodes also wait for one of the step before."""
    programs = []
    for program in job.programs:
        n, joins = len(program), int(program.join.max(initial=-1)) + 1
        extra = {int(node): int(rng.integers(n)) for node in rng.permutation(n)[: n // 4]}
        deps, counts = [], []
        for copy in range(COPIES):
            for node in range(n):
                own = [
                    d + copy * n
                    for d in program.dep[program.dep_ptr[node] : program.dep_ptr[node + 1]].tolist()
                ]
                own += [extra[node] + (copy - 1) * n] if copy and node in extra else []
                deps += own
                counts.append(len(own))
        shift = np.repeat(np.arange(COPIES), n)
        programs.append(
            Program(
                np.tile(program.queue, COPIES),
                np.tile(program.duration, COPIES),
                np.tile(program.issue, COPIES),
                np.cumsum([0, *counts]).astype(np.int32),
                np.array(deps, np.int32),
                np.where(
                    np.tile(program.join, COPIES) >= 0, np.tile(program.join, COPIES) + shift * joins, -1
                ).astype(np.int32),
            )
        )
    count = len(job.join_size)
    ranks = [job.rank_join[a:b] for a, b in zip(job.rank_join_ptr, job.rank_join_ptr[1:], strict=False)]
    rows = [np.concatenate([own + copy * count for copy in range(COPIES)]) for own in ranks]
    return ReplayJob(
        programs, job.rank_program, job.compute_scale, job.issue_scale, job.rank_join_ptr * COPIES,
        np.concatenate([np.zeros(0, np.int64), *rows]), np.tile(job.join_size, COPIES),
        np.tile(job.join_duration, COPIES),
    )  # fmt: skip


@settings(max_examples=60)
@given(st.integers(0, 2**32 - 1), st.integers(1, 4), st.integers(0, 12))
def test_the_times_are_those_of_the_replay(seed: int, ranks: int, joins: int) -> None:
    rng = np.random.default_rng(seed)
    job = tiled(random_job(seed, ranks, joins), rng)
    reduced = skeleton(job, COPIES)
    count = len(job.join_size) // COPIES
    lasting = rng.exponential(1.0, count) * 10.0 ** rng.integers(-3, 2)
    job.join_duration[:] = np.tile(lasting, COPIES)
    result = replay(job)
    times = reduced.times(
        {join + (COPIES - 1) * count: float(lasting[join]) for join in range(count)}, COPIES
    )
    for rank in range(job.ranks):
        ends = result.of(rank)[1].reshape(COPIES, -1)
        if ends.shape[1]:
            expected = np.maximum.accumulate(ends.max(axis=1))
            times_of_rank = [step[reduced.ends[rank]] for step in times]
            np.testing.assert_allclose(times_of_rank, expected, rtol=1e-9, atol=1e-12)


def test_who_receives_does_not_hold_back_who_sends() -> None:
    """Two ranks send to each other before they receive: only without a meeting does that end."""
    queue = np.array([1, 2], np.int32)
    program = Program(
        queue, np.zeros(2), np.zeros(2), np.array([0, 0, 1], np.int32), np.array([0], np.int32),
        np.array([0, 1], np.int32),
    )  # fmt: skip
    whole = np.ones(2)
    job = ReplayJob(
        [program], np.zeros(2, np.int32), whole, whole, np.array([0, 2, 4]), np.array([0, 1, 1, 0]),
        np.full(2, 2, np.int32), whole,
    )  # fmt: skip
    with pytest.raises(ValueError, match="in a circle"):
        skeleton(job, 1, barrier=True)
    reduced = skeleton(job, 1, barrier=True, receives={(0, 1), (1, 1)})
    ends = [max(step[mark] for mark in reduced.ends) for step in reduced.times({0: 3.0, 1: 5.0}, 3)]
    assert ends == [5.0, 10.0, 15.0]
