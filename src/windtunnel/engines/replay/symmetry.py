"""Ranks that cannot be told apart: the smallest job whose replay gives the same times.

Two ranks that run the same program at the same speed, and whose k-th joins are with ranks that are alike in
turn, do everything at the same instants, because a time is a maximum and a sum over times of their peers.
Classes of such ranks are the coarsest equitable partition of ranks and groups, found by colour refinement
(Weisfeiler and Leman 1968; Cardon and Crochemore 1982): start from what is given of each rank, and split
for as long as the colours of its groups' members differ. A colour is a 64-bit hash while it is refined.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from windtunnel.engines.replay.engine import starts
from windtunnel.engines.replay.layout import Floats, Ints, Longs, ReplayJob, jit

Hashes = NDArray[np.uint64]


def colour(rank_key: Longs, rank_group_ptr: Longs, rank_group: Longs, group_key: Longs | None = None) -> Ints:
    """The coarsest classes of ranks that cannot be told apart.

    Args:
        rank_key: shape (R,), equal where ranks are alike by themselves (program, speed).
        rank_group_ptr, rank_group: the groups of rank r, slot by slot, are
            ``rank_group[rank_group_ptr[r]:rank_group_ptr[r+1]]``. A group's members are the ranks that list
            it.
        group_key: shape (G,), equal where groups are alike by themselves (placement, cost); all alike if
            None.

    Returns:
        Shape (R,): dense colours, numbered in the order of their first rank. Two ranks have the same colour
        if and only if their keys are equal and, slot by slot, so are the keys of their groups and the
        multisets of (colour, slot) of these groups' members.
    """
    if not len(rank_key):
        return np.zeros(0, np.int32)
    groups = int(rank_group.max(initial=-1)) + 1
    if group_key is None:
        group_key = np.zeros(groups, np.int64)
    ptr = np.ascontiguousarray(rank_group_ptr, np.int64)
    group = np.ascontiguousarray(rank_group, np.int64)
    keys = np.ascontiguousarray(group_key, np.int64).view(np.uint64)
    colours, count = _dense(np.asarray(rank_key))
    while True:
        finer, finer_count = _dense(
            _rank_hashes(colours, ptr, group, _group_hashes(colours, ptr, group, keys))
        )
        if finer_count == count:
            return finer
        colours, count = finer, finer_count


def job_colours(job: ReplayJob) -> Ints:
    """The colours of a job's ranks by its programs, scales and joins: `quotient` with them is exact."""
    columns = np.column_stack([job.rank_program, job.compute_scale, job.issue_scale])
    _, key = np.unique(columns, axis=0, return_inverse=True)
    return colour(key.reshape(-1), job.rank_join_ptr, job.rank_join, _join_keys(job, _member_counts(job)))


def quotient(job: ReplayJob, colours: Ints) -> ReplayJob:
    """The job of one rank a colour, whose rank c does what every rank of colour c does in ``job``, at the
    same times.

    Joins whose members have the same colours at the same ordinals become one join, which has one member for
    each colour and ordinal.

    Raises:
        ValueError: ranks of one colour differ in program, scale or in what they join, or the job has
            jitter, which tells all ranks apart.
    """
    if job.jitter > 0:
        raise ValueError("jitter tells all ranks apart: take the quotient without it")
    _, first = np.unique(colours, return_index=True)
    like = first[colours]
    for name in ("rank_program", "compute_scale", "issue_scale"):
        values = getattr(job, name)
        if np.any(values != values[like]):
            raise ValueError(f"ranks of one colour differ in {name}")
    ptr = np.ascontiguousarray(job.rank_join_ptr, np.int64)
    counts = _member_counts(job)
    hashes = _group_hashes(
        colours.astype(np.int32), ptr, job.rank_join, _join_keys(job, counts).view(np.uint64)
    )
    if not _same_joins(like, ptr, job.rank_join, hashes):
        raise ValueError("ranks of one colour differ in what they join")
    kept = np.concatenate([np.zeros(0, np.int64), *(job.rank_join[ptr[r] : ptr[r + 1]] for r in first)])
    _, one, join = np.unique(hashes[kept], return_index=True, return_inverse=True)
    original = kept[one]
    absent = job.join_size[original] - counts[original]
    return ReplayJob(
        programs=job.programs, rank_program=job.rank_program[first], compute_scale=job.compute_scale[first],
        issue_scale=job.issue_scale[first], rank_join_ptr=starts(np.diff(ptr)[first]),
        rank_join=join.reshape(-1).astype(np.int64),
        join_size=(np.bincount(join.reshape(-1), minlength=len(original)) + absent).astype(np.int32),
        join_duration=job.join_duration[original], seed=job.seed,
    )  # fmt: skip


def _member_counts(job: ReplayJob) -> Longs:
    return np.bincount(job.rank_join, minlength=len(job.join_size))


def _join_keys(job: ReplayJob, counts: Longs) -> Longs:
    """Equal where joins last equally long and lack equally many members."""
    lacking = (job.join_size - counts).astype(np.int64)
    durations: Floats = np.ascontiguousarray(job.join_duration, np.float64) + 0.0
    return durations.view(np.int64) ^ (lacking << 32)


def _dense(values: NDArray[Any]) -> tuple[Ints, int]:
    """Number equal values alike, in the order of their first appearance."""
    _, first, inverse = np.unique(values, return_index=True, return_inverse=True)
    place = np.empty(len(first), np.int32)
    place[np.argsort(first)] = np.arange(len(first), dtype=np.int32)
    return place[inverse.reshape(-1)], len(first)


@jit
def _mix(word: np.uint64) -> np.uint64:
    """SplitMix64's finaliser (Steele et al., OOPSLA 2014)."""
    word = (word ^ (word >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    word = (word ^ (word >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return word ^ (word >> np.uint64(31))


@jit
def _group_hashes(colours: Ints, ptr: Longs, group: Longs, keys: Hashes) -> Hashes:
    """Hash of each group's key and its multiset of (member's colour, member's slot)."""
    hashes = np.zeros(len(keys), np.uint64)
    for r in range(len(colours)):
        own = _mix(np.uint64(colours[r]) + np.uint64(0x9E3779B97F4A7C15))
        for k in range(ptr[r], ptr[r + 1]):
            hashes[group[k]] += _mix(own + np.uint64(k - ptr[r]))
    for g in range(len(keys)):
        hashes[g] = _mix(hashes[g] ^ _mix(keys[g] + np.uint64(0x632BE59BD9B4E019)))
    return hashes


@jit
def _rank_hashes(colours: Ints, ptr: Longs, group: Longs, hashes: Hashes) -> Hashes:
    """Hash of each rank's colour and the hashes of its groups, slot by slot."""
    found = np.empty(len(colours), np.uint64)
    for r in range(len(colours)):
        word = _mix(np.uint64(colours[r]) + np.uint64(0xD1B54A32D192ED03))
        for k in range(ptr[r], ptr[r + 1]):
            word = _mix(word * np.uint64(3) + hashes[group[k]])
        found[r] = word
    return found


@jit
def _same_joins(like: Longs, ptr: Longs, join: Longs, hashes: Hashes) -> bool:
    """Whether the joins of every rank r hash as those of rank ``like[r]``, by ordinal."""
    for r in range(len(like)):
        s = like[r]
        if ptr[r + 1] - ptr[r] != ptr[s + 1] - ptr[s]:
            return False
        for x in range(ptr[r + 1] - ptr[r]):
            if hashes[join[ptr[r] + x]] != hashes[join[ptr[s] + x]]:
                return False
    return True
