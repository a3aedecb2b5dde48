"""Classes of like ranks against refinement by brute force, and the quotient's times against the whole job."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from replay_reference import make_program, random_job

from windtunnel.engines.replay import ReplayJob, Stalled, colour, job_colours, quotient, replay

seeds = st.integers(0, 2**32 - 1)


def csr(rows: list[list[int]]) -> tuple[np.ndarray, np.ndarray]:
    return np.cumsum([0] + [len(row) for row in rows]), np.array([x for row in rows for x in row], np.int64)


def colours_by_force(key: list[int], slots: list[list[int]], group_key: list[int]) -> list[int]:
    """Refine with the full multisets as dictionary keys, as the definition says."""
    colours = list(key)
    while True:
        groups: dict[int, list[tuple[int, int]]] = {}
        for r, row in enumerate(slots):
            for slot, g in enumerate(row):
                groups.setdefault(g, []).append((colours[r], slot))
        seen: dict[object, int] = {}
        finer = []
        for r, row in enumerate(slots):
            signature = (colours[r], tuple((group_key[g], tuple(sorted(groups[g]))) for g in row))
            finer.append(seen.setdefault(signature, len(seen)))
        if len(seen) == len(set(colours)):
            return finer
        colours = finer


@settings(max_examples=150, deadline=None)
@given(seeds, st.integers(1, 14), st.integers(1, 8), st.integers(1, 3))
def test_colour_is_the_coarsest_equitable_partition(seed: int, ranks: int, groups: int, keys: int) -> None:
    rng = np.random.default_rng(seed)
    key = rng.integers(0, keys, ranks).tolist()
    slots = [rng.integers(0, groups, int(rng.integers(0, 4))).tolist() for _ in range(ranks)]
    group_key = rng.integers(0, 2, groups).tolist()
    found = colour(np.array(key), *csr(slots), np.array(group_key))
    assert found.tolist() == colours_by_force(key, slots, group_key)


def test_colour_of_a_path_and_of_a_ring() -> None:
    """Messages to the next rank: a ring has one class; in a pipeline every stage is its own."""
    n = 50
    ring = [[r, (r - 1) % n] for r in range(n)]
    assert set(colour(np.zeros(n, np.int64), *csr(ring)).tolist()) == {0}
    path = [([r] if r < n - 1 else []) + ([r - 1] if r else []) for r in range(n)]
    assert len(set(colour(np.zeros(n, np.int64), *csr(path)).tolist())) == n


def grid_job(seed: int, tp: int, pp: int, dp: int, stragglers: int) -> ReplayJob:
    """A random job of symmetric structure: rank (d, p, t) joins its tensor group, its data group, messages
    to the next stage, ring messages in its tensor group, and the world, at places given by its stage."""
    rng = np.random.default_rng(seed)
    ranks = tp * pp * dp
    index: dict[tuple[object, ...], int] = {}
    names: list[tuple[object, ...]] = []
    rounds = [str(rng.choice(["tp", "dp", "ring", "world", "pp"])) for _ in range(int(rng.integers(1, 8)))]
    programs = []
    for stage in range(pp):
        kinds: list[tuple[bool, int]] = []
        for what in rounds:
            kinds += [(False, int(rng.integers(0, 3))) for _ in range(int(rng.integers(0, 4)))]
            if what == "ring":
                kinds += [(True, 3), (True, 4)]
            elif what == "pp":
                kinds += [(True, 5)] * ((stage > 0) + (stage < pp - 1))
            else:
                kinds.append((True, int(rng.integers(1, 3))))
        kinds += [(False, 1)] * 2
        programs.append(make_program(rng, kinds))

    def name_to_join(*name: object) -> int:
        if name not in index:
            index[name] = len(names)
            names.append(name)
        return index[name]

    sequences = []
    for r in range(ranks):
        d, p, t = r // (tp * pp), r // tp % pp, r % tp
        sequence = []
        for k, what in enumerate(rounds):
            if what == "tp":
                sequence.append(name_to_join(k, what, d, p))
            elif what == "dp":
                sequence.append(name_to_join(k, what, p, t))
            elif what == "world":
                sequence.append(name_to_join(k, what))
            elif what == "ring":
                sequence += [name_to_join(k, what, d, p, t), name_to_join(k, what, d, p, (t - 1) % tp)]
            else:
                sequence += [name_to_join(k, what, d, q, t) for q in (p - 1, p) if 0 <= q < pp - 1]
        sequences.append(sequence)
    ptr, rank_join = csr(sequences)
    rank = np.arange(ranks)
    scale = np.ones(ranks)
    scale[rng.integers(0, ranks, stragglers)] = 1.5
    issue = np.where((rank // tp % 2 == 1) & (stragglers > 1), 2.0, 1.0)
    durations: dict[tuple[object, ...], float] = {}
    of_kind = [durations.setdefault(name[:2], rng.random()) for name in names]
    return ReplayJob(
        programs=programs,
        rank_program=(rank // tp % pp).astype(np.int32),
        compute_scale=scale,
        issue_scale=issue,
        rank_join_ptr=ptr,
        rank_join=rank_join,
        join_size=np.bincount(rank_join, minlength=len(names)).astype(np.int32),
        join_duration=np.array(of_kind),
    )


def check_quotient(case: ReplayJob) -> int:
    colours = job_colours(case)
    small = quotient(case, colours)
    assert small.ranks == colours.max() + 1
    try:
        full = replay(case)
    except Stalled as stalled:
        with pytest.raises(Stalled) as caught:
            replay(small)
        rows = set(zip(colours[stalled.rank].tolist(), stalled.node.tolist(), strict=True))
        assert rows == set(zip(caught.value.rank.tolist(), caught.value.node.tolist(), strict=True))
        return small.ranks
    result = replay(small)
    for r in range(case.ranks):
        for whole, part in zip(full.of(r), result.of(colours[r]), strict=True):
            assert np.array_equal(whole, part)
        assert np.array_equal(
            full.ready[full.rank_ptr[r] : full.rank_ptr[r + 1]],
            result.ready[result.rank_ptr[colours[r]] : result.rank_ptr[colours[r] + 1]],
        )
    assert np.array_equal(full.rank_end, result.rank_end[colours])
    assert np.array_equal(full.queue_busy, result.queue_busy[colours])
    return small.ranks


@settings(max_examples=100, deadline=None)
@given(seeds, st.integers(1, 4), st.integers(1, 4), st.integers(1, 4), st.integers(0, 2))
def test_quotient_has_the_same_times(seed: int, tp: int, pp: int, dp: int, stragglers: int) -> None:
    classes = check_quotient(grid_job(seed, tp, pp, dp, stragglers))
    if stragglers == 0:
        assert classes <= pp


def test_alike_ranks_are_one_class_a_stage() -> None:
    assert check_quotient(grid_job(3, tp=4, pp=3, dp=4, stragglers=0)) == 3


@settings(max_examples=60, deadline=None)
@given(seeds, st.integers(1, 5), st.integers(1, 6), st.booleans(), st.booleans())
def test_quotient_of_jobs_without_symmetry(
    seed: int, ranks: int, joins: int, shuffle: bool, drop: bool
) -> None:
    check_quotient(random_job(seed, ranks, joins, shuffle=shuffle, drop=drop))


def test_slower_join_of_one_group_tells_its_ranks_apart() -> None:
    case = grid_job(3, tp=2, pp=1, dp=4, stragglers=0)
    duration = case.join_duration.copy()
    duration[case.rank_join[0]] *= 2
    before = len(set(job_colours(case).tolist()))
    changed = replace(case, join_duration=duration)
    assert len(set(job_colours(changed).tolist())) >= before
    check_quotient(changed)


def test_wrong_colours_are_refused() -> None:
    case = grid_job(3, tp=2, pp=2, dp=2, stragglers=0)
    with pytest.raises(ValueError, match="rank_program"):
        quotient(case, np.zeros(8, np.int32))
    one_program = replace(random_job(5, 2, 6), rank_program=np.zeros(2, np.int32))
    with pytest.raises(ValueError, match="differ in"):
        quotient(one_program, np.zeros(2, np.int32))
    with pytest.raises(ValueError, match="jitter"):
        quotient(replace(case, jitter=0.1), job_colours(case))
