"""The engine against a plain simulator, against jobs worked out by hand, and on jobs that hang."""

from __future__ import annotations

import pickle
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from replay_reference import random_job, reference

from benchmarks.training.emulate.speed import events_per_second, synthetic_job
from windtunnel.engines.replay import Program, ReplayJob, Stalled, replay

seeds = st.integers(0, 2**32 - 1)


def program(*rows: tuple[int, float, float, list[int], bool]) -> Program:
    """Rows of (queue, duration, issue, deps, is a join)."""
    joins = np.array([row[4] for row in rows], bool)
    return Program(
        queue=np.array([row[0] for row in rows], np.int32),
        duration=np.array([row[1] for row in rows], float),
        issue=np.array([row[2] for row in rows], float),
        dep_ptr=np.cumsum([0] + [len(row[3]) for row in rows]).astype(np.int32),
        dep=np.array([d for row in rows for d in row[3]], np.int32),
        join=np.where(joins, np.cumsum(joins) - 1, -1).astype(np.int32),
    )


def job(
    programs: list[Program], rank_join: list[list[int]], size: list[int], duration: list[float]
) -> ReplayJob:
    """One rank a program."""
    ranks = len(programs)
    return ReplayJob(
        programs=programs,
        rank_program=np.arange(ranks, dtype=np.int32),
        compute_scale=np.ones(ranks),
        issue_scale=np.ones(ranks),
        rank_join_ptr=np.cumsum([0] + [len(joins) for joins in rank_join]).astype(np.int64),
        rank_join=np.array([j for joins in rank_join for j in joins], np.int64),
        join_size=np.array(size, np.int32),
        join_duration=np.array(duration, float),
    )


def check_against_reference(case: ReplayJob) -> None:
    start, ready, end = reference(case)
    done = [None not in times for times in end]
    for keep in (True, False):
        if all(done):
            result = replay(case, keep_times=keep)
            assert result.rank_end.tolist() == [max(times, default=0.0) for times in end]
            assert result.makespan == max(result.rank_end)
            assert result.events == sum(map(len, end))
        else:
            with pytest.raises(Stalled) as caught:
                replay(case, keep_times=keep)
            assert_standing(case, caught.value, ready, end)
            return
        if keep:
            busy = result.queue_busy
            assert result.start.tolist() == [t for times in start for t in times]
            assert result.ready.tolist() == [t for times in ready for t in times]
            assert result.end.tolist() == [t for times in end for t in times]
        else:
            assert np.array_equal(busy, result.queue_busy)


def assert_standing(case: ReplayJob, stalled: Stalled, ready: list[list], end: list[list]) -> None:
    """The rows are the first node of each queue that never ends although the host came to it."""
    expected = set()
    pending: dict[int, set[tuple[int, int]]] = {}
    for r, p in enumerate(case.rank_program):
        nodes = case.programs[p]
        queues = set()
        for i in range(len(nodes)):
            q = int(nodes.queue[i])
            if end[r][i] is None and q not in queues:
                queues.add(q)
                join = -1
                if ready[r][i] is not None:
                    join = int(case.rank_join[case.rank_join_ptr[r] + nodes.join[i]])
                    pending[join] = set()
                expected.add((r, i, join))
                if q == 0:
                    break
    for r, p in enumerate(case.rank_program):
        for i in np.flatnonzero(case.programs[p].join >= 0):
            join = int(case.rank_join[case.rank_join_ptr[r] + case.programs[p].join[i]])
            if join in pending and ready[r][i] is None:
                pending[join].add((r, int(i)))
    assert (
        set(zip(stalled.rank.tolist(), stalled.node.tolist(), stalled.join.tolist(), strict=True)) == expected
    )
    assert stalled.pending.tolist() == sorted(pending)
    for x, join in enumerate(stalled.pending):
        part = slice(stalled.missing_ptr[x], stalled.missing_ptr[x + 1])
        missing = list(
            zip(stalled.missing_rank[part].tolist(), stalled.missing_node[part].tolist(), strict=True)
        )
        assert len(missing) == len(set(missing)) and set(missing) == pending[int(join)]
        came = int(np.count_nonzero(case.rank_join == join))
        assert stalled.absent[x] == case.join_size[join] - came


@settings(max_examples=120, deadline=None)
@given(seeds, st.integers(1, 6), st.integers(0, 12), st.booleans())
def test_equals_reference(seed: int, ranks: int, joins: int, coarse: bool) -> None:
    check_against_reference(random_job(seed, ranks, joins, coarse=coarse))


@settings(max_examples=150, deadline=None)
@given(seeds, st.integers(2, 5), st.integers(1, 10))
def test_equals_reference_when_joins_cross(seed: int, ranks: int, joins: int) -> None:
    check_against_reference(random_job(seed, ranks, joins, shuffle=True))


@settings(max_examples=80, deadline=None)
@given(seeds, st.integers(1, 5), st.integers(1, 8))
def test_a_missing_member_stalls(seed: int, ranks: int, joins: int) -> None:
    check_against_reference(random_job(seed, ranks, joins, drop=True))


def test_host_and_stream_by_hand() -> None:
    # Issue 1 each; two kernels of 5 on one stream; the host then waits for the second and works for 2.
    p = program((1, 5, 1, [], False), (1, 5, 1, [], False), (0, 2, 0.5, [1], False), (1, 1, 1, [], False))
    result = replay(job([p], [[]], [], []))
    assert result.start.tolist() == [1, 6, 11, 14.5]
    assert result.end.tolist() == [6, 11, 13.5, 15.5]
    assert result.makespan == 15.5
    assert result.queue_busy.tolist() == [[1 + 1 + 0.5 + 2 + 1, 11]]


def test_straggler_and_slow_host() -> None:
    p = program((1, 4, 1, [], False), (1, 0, 1, [], True))
    case = job([p, p], [[0], [0]], [2], [3.0])
    case = replace(case, compute_scale=np.array([1.0, 2.0]), issue_scale=np.array([1.0, 3.0]))
    result = replay(case)
    assert result.of(0)[0].tolist() == [1, 11] and result.of(1)[0].tolist() == [3, 11]
    assert result.ready.tolist() == [1, 5, 3, 11]
    assert result.rank_end.tolist() == [14, 14]


def test_joins_that_cross_on_two_queues_do_not_hang() -> None:
    first = program((1, 0, 1, [], True), (2, 0, 1, [], True), (1, 1, 0, [1], False))
    second = program((2, 0, 1, [], True), (1, 0, 1, [], True), (2, 1, 0, [1], False))
    result = replay(job([first, second], [[0, 1], [1, 0]], [2, 2], [10.0, 20.0]))
    assert result.end.tolist() == [12, 22, 23, 22, 12, 23]


def test_joins_that_cross_on_one_queue_hang() -> None:
    p = program((1, 0, 0, [], True), (1, 0, 0, [], True))
    with pytest.raises(Stalled) as caught:
        replay(job([p, p], [[0, 1], [1, 0]], [2, 2], [1.0, 1.0]))
    stalled = pickle.loads(pickle.dumps(caught.value))
    assert stalled.rank.tolist() == [0, 1] and stalled.node.tolist() == [0, 0]
    assert stalled.join.tolist() == [0, 1] and stalled.pending.tolist() == [0, 1]
    assert stalled.missing_rank.tolist() == [1, 0] and stalled.missing_node.tolist() == [1, 1]
    assert stalled.absent.tolist() == [0, 0]
    assert "2 ranks" in str(stalled)


def test_blocking_send_to_each_other_hangs_and_batched_does_not() -> None:
    blocking = program((0, 0, 0, [], True), (0, 0, 0, [], True))
    with pytest.raises(Stalled):
        replay(job([blocking, blocking], [[0, 1], [1, 0]], [2, 2], [1.0, 1.0]))
    batched = program((1, 0, 0, [], True), (2, 0, 0, [], True))
    assert replay(job([batched, batched], [[0, 1], [1, 0]], [2, 2], [1.0, 1.0])).makespan == 1.0


def test_a_rank_may_be_a_join_s_both_ends() -> None:
    p = program((1, 2, 0, [], False), (1, 0, 0, [], True), (2, 0, 0, [], True), (1, 1, 0, [2], False))
    result = replay(job([p], [[0, 0]], [2], [5.0]))
    assert result.end.tolist() == [2, 7, 7, 8]


def test_jitter_is_deterministic_lognormal_of_mean_one() -> None:
    n = 20_000
    p = program(*[(1, 1.0, 0.0, [], False)] * n)
    case = replace(job([p, p], [[], []], [], []), jitter=0.2, seed=7)
    result = replay(case)
    length = np.diff(result.of(0)[1], prepend=0.0)
    assert np.log(length).std() == pytest.approx(0.2, rel=0.03)
    assert length.mean() == pytest.approx(1.0, rel=0.01)
    assert abs(np.corrcoef(length, np.diff(result.of(1)[1], prepend=0.0))[0, 1]) < 0.03
    assert np.array_equal(replay(case).end, result.end)
    assert replay(case, keep_times=False).rank_end.tolist() == result.rank_end.tolist()
    assert replay(replace(case, seed=8)).makespan != result.makespan


def test_empty_jobs() -> None:
    assert replay(job([], [], [], [])).makespan == 0.0
    assert replay(job([program()], [[]], [], [])).rank_end.tolist() == [0.0]


GOOD = program((1, 1, 0, [], False), (2, 0, 0, [0], True))


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"queue": np.array([1, -1], np.int32)}, "queue numbers"),
        ({"duration": np.array([np.nan, 0.0])}, "not negative"),
        ({"issue": np.array([0.0, -1.0])}, "not negative"),
        ({"issue": np.zeros(3)}, "one entry for each of 2 nodes"),
        ({"join": np.array([-1, 1], np.int32)}, "ordinals"),
        ({"dep": np.array([1], np.int32)}, "earlier nodes"),
        ({"dep_ptr": np.array([0, 0, 2], np.int32)}, "dep_ptr"),
    ],
)
def test_bad_programs_are_refused(change: dict, says: str) -> None:
    with pytest.raises(ValueError, match=says):
        replay(job([replace(GOOD, **change)], [[0]], [1], [0.0]))


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"compute_scale": np.ones(3)}, "each of 1 ranks"),
        ({"compute_scale": -np.ones(1)}, "not negative"),
        ({"rank_program": np.array([1], np.int32)}, "rank_program"),
        ({"rank_join_ptr": np.array([0, 0])}, "one join for each join node"),
        ({"rank_join": np.array([1])}, "joins 0 to 0"),
        ({"join_size": np.array([0], np.int32)}, "more members"),
        ({"join_duration": np.zeros(2)}, "agree in length"),
    ],
)
def test_bad_jobs_are_refused(change: dict, says: str) -> None:
    with pytest.raises(ValueError, match=says):
        replay(replace(job([GOOD], [[0]], [1], [0.0]), **change))


def test_bench_measures_a_job_that_replays() -> None:
    case = synthetic_job(20, 300, group=4, join_every=7)
    check_against_reference(case)
    (rate,) = events_per_second(16, 500, repeats=1)
    assert rate > 0
