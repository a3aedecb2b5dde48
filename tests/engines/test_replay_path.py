"""The critical path: it tiles the time, and every piece is something that really took that long."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from replay_reference import random_job

from windtunnel.engines.replay import ISSUE, RUN, TRANSFER, Path, Program, ReplayJob, critical_path, replay


def check_path(case: ReplayJob) -> Path:
    result = replay(case)
    path = critical_path(case, result)
    if result.makespan == 0.0:
        assert len(path.rank) == 0
        return path
    assert path.begin[0] == 0.0 and path.end[-1] == result.makespan
    assert np.array_equal(path.begin[1:], path.end[:-1])
    assert np.all(path.end > path.begin)
    for rank, node, reason, begin, end in zip(
        path.rank, path.node, path.reason, path.begin, path.end, strict=True
    ):
        program = case.programs[case.rank_program[rank]]
        at = case.rank_ptr[rank] + node
        on_host = program.queue[node] == 0
        joins = program.join[node] >= 0
        cost = program.issue[node] * case.issue_scale[rank]
        if reason == RUN:
            assert not joins and end == result.end[at]
            assert begin == (result.start[at] + cost if on_host else result.start[at])
        elif reason == TRANSFER:
            assert joins and begin == result.start[at] and end == result.end[at]
            join = case.rank_join[case.rank_join_ptr[rank] + program.join[node]]
            assert end - begin == pytest.approx(case.join_duration[join])
        else:
            assert reason == ISSUE and end - begin == pytest.approx(cost)
            assert end <= (result.ready[at] if not on_host or joins else result.end[at])
    if np.all(case.join_duration > 0):  # then a path goes from one rank to another only through a transfer
        assert np.all(path.reason[1:][np.diff(path.rank) != 0] == TRANSFER)
    return path


@settings(max_examples=150, deadline=None)
@given(st.integers(0, 2**32 - 1), st.integers(1, 5), st.integers(0, 10), st.booleans())
def test_path_tiles_the_makespan(seed: int, ranks: int, joins: int, coarse: bool) -> None:
    check_path(random_job(seed, ranks, joins, coarse=coarse))


@settings(max_examples=100, deadline=None)
@given(st.integers(0, 2**32 - 1), st.integers(1, 4), st.integers(1, 8), st.floats(0.01, 5.0))
def test_longer_pieces_delay_the_end(seed: int, ranks: int, joins: int, more: float) -> None:
    """Lengthening a node on the path moves the end by as much: that is what makes a path critical."""
    case = random_job(seed, ranks, joins)
    path = check_path(case)
    for rank, node in {(int(r), int(n)) for r, n in zip(path.rank, path.node, strict=True)}:
        program = case.programs[rank]
        if program.join[node] >= 0:
            longer = case.join_duration.copy()
            longer[case.rank_join[case.rank_join_ptr[rank] + program.join[node]]] += more
            changed = replace(case, join_duration=longer)
        elif RUN in path.reason[(path.rank == rank) & (path.node == node)]:
            on_host = program.queue[node] == 0
            duration = program.duration.copy()
            duration[node] += more / (case.issue_scale if on_host else case.compute_scale)[rank]
            programs = [*case.programs]
            programs[rank] = replace(program, duration=duration)
            changed = replace(case, programs=programs)
        else:
            continue
        if TRANSFER in path.reason[(path.rank == rank) & (path.node == node)] or program.join[node] < 0:
            assert replay(changed).makespan >= path.end[-1] + more * (1 - 1e-9)


def test_path_by_hand() -> None:
    """Rank 1 issues for 3 and runs for 4; both exchange for 2; rank 0 then runs for 5."""
    send = Program(
        queue=np.array([1, 2, 1], np.int32),
        duration=np.array([1.0, 0.0, 5.0]),
        issue=np.array([1.0, 1.0, 1.0]),
        dep_ptr=np.array([0, 0, 1, 2], np.int32),
        dep=np.array([0, 1], np.int32),
        join=np.array([-1, 0, -1], np.int32),
    )
    receive = replace(send, duration=np.array([4.0, 0.0, 0.5]), issue=np.array([3.0, 0.0, 0.0]))
    case = ReplayJob(
        programs=[send, receive],
        rank_program=np.array([0, 1], np.int32),
        compute_scale=np.ones(2),
        issue_scale=np.ones(2),
        rank_join_ptr=np.array([0, 1, 2]),
        rank_join=np.array([0, 0]),
        join_size=np.array([2], np.int32),
        join_duration=np.array([2.0]),
    )
    path = check_path(case)
    assert path.rank.tolist() == [1, 1, 0, 0]
    assert path.node.tolist() == [0, 0, 1, 2]
    assert path.reason.tolist() == [ISSUE, RUN, TRANSFER, RUN]
    assert path.end.tolist() == [3, 7, 9, 14]


def test_a_long_path_without_host_nodes_takes_linear_time() -> None:
    n = 200_000
    chain = Program(
        queue=np.ones(n, np.int32),
        duration=np.ones(n),
        issue=np.full(n, 0.5),
        dep_ptr=np.zeros(n + 1, np.int32),
        dep=np.zeros(0, np.int32),
        join=np.full(n, -1, np.int32),
    )
    one = np.ones(1)
    case = ReplayJob(
        programs=[chain],
        rank_program=np.zeros(1, np.int32),
        compute_scale=one,
        issue_scale=one,
        rank_join_ptr=np.zeros(2, np.int64),
        rank_join=np.zeros(0, np.int64),
        join_size=np.zeros(0, np.int32),
        join_duration=np.zeros(0),
    )
    path = critical_path(case, replay(case))
    assert path.reason.tolist() == [ISSUE] + [RUN] * n
    slow_host = replace(case, issue_scale=4 * one)
    path = critical_path(slow_host, replay(slow_host))
    assert path.reason.tolist() == [ISSUE] * n + [RUN]


def test_path_needs_times() -> None:
    case = random_job(1, 2, 3)
    with pytest.raises(ValueError, match="times"):
        critical_path(case, replay(case, keep_times=False))
