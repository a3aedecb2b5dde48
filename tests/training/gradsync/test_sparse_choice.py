"""Sparse sums: what each scheme moves, against exact counts; the choice; plans with it."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from made_up import network, profile
from threads import Threads, on_ranks

from windtunnel.training.gradsync.live.sparse import Units, reduce_with
from windtunnel.training.gradsync.model import INDEX, GradientTensor, Sparsity, SumTime
from windtunnel.training.gradsync.policy.plan import make_plan
from windtunnel.training.gradsync.policy.sparse import (
    SCHEMES,
    Order,
    choose,
    growth_of,
    promising,
    seconds,
    slice_length,
    traffic,
)
from windtunnel.training.gradsync.run import verdict


def imbalance(sets: list[Any], order: Order) -> tuple[float, float]:
    """Fullest over mean part, of as many as there are ranks: of what a rank pushes (the worst rank's), and of
    what is pulled. ``sets[r]``: the units of rank r."""
    world = len(sets)
    length = slice_length(order.units, world)
    every = [*sets, np.unique(np.concatenate(sets))]
    uneven = []
    for indices in every:
        parts = np.bincount(order.places(indices) // length, minlength=world)
        uneven.append(float(parts.max() / max(1, len(indices)) * world))
    return max(uneven[:-1]), uneven[-1]


@st.composite
def sparsities(draw: st.DrawFn) -> tuple[Sparsity, int]:
    """With densification as it can be: it at most doubles when ranks do, and no density exceeds one."""
    levels = draw(st.integers(1, 7))
    density = draw(st.floats(1e-4, 1.0))
    growth, now = [], 1.0
    for _ in range(levels):
        now = min(now * draw(st.floats(1.0, 2.0)), 1 / density)
        growth.append(now)
    units, width = draw(st.integers(10_000, 10**7)), draw(st.sampled_from([1, 8, 64]))
    return Sparsity(units, width, 4, density, tuple(growth)), 2**levels


@given(sparsities())
def test_the_two_are_priced_by_the_formulas(case: tuple[Sparsity, int]) -> None:
    sparsity, world = case
    both = sparsity.units * sparsity.density * (sparsity.width * 4 + INDEX)  # M d and the indices
    # a bitmap is shorter than the indices where more than 1/32 of a part is there
    saved = (
        max(0.0, sparsity.units * (INDEX * sparsity.density * gamma - 1 / 8))
        for gamma in (1.0, sparsity.gamma(world))
    )
    expected = (world - 1) / world * ((1 + sparsity.gamma(world)) * both - sum(saved))
    assert traffic("zen", sparsity, world).nbytes == pytest.approx(expected)
    expected = sum(sparsity.gamma(2**level) for level in range(round(math.log2(world)))) * both
    assert traffic("hierarchy", sparsity, world).nbytes == pytest.approx(expected)
    assert traffic("allgather", sparsity, world).nbytes == pytest.approx((world - 1) * both)


def zipf(rng: np.random.Generator, units: int, draws: int, power: float, mixed: bool) -> np.ndarray:  # type: ignore[type-arg]
    """Units that some tokens are: the frequent ones first, or anywhere."""
    chances = np.cumsum(1 / np.arange(1, units + 1) ** power)
    drawn = np.searchsorted(chances, rng.random(draws) * chances[-1])
    return np.unique(drawn * 7919 % units if mixed else drawn)


@pytest.mark.parametrize(
    ("world", "width", "mixed"),
    [
        (3, 16, True),
        (8, 1, False),
    ],
)
def test_estimates_are_near_what_is_sent(world: int, width: int, mixed: bool) -> None:
    """From density and growth."""
    rng, total = np.random.default_rng(world), 200_003
    sets = [zipf(rng, total, 30_000, 0.9, mixed) for _ in range(world)]
    growth = growth_of(sets)
    density = sum(map(len, sets)) / world / total
    values = [torch.ones(len(indices), width) for indices in sets]
    there = [Units(torch.from_numpy(indices), values[rank], total) for rank, indices in enumerate(sets)]
    sparsity = Sparsity(total, width, 4, density, growth)
    tensors = [
        torch.sparse_coo_tensor(each.indices[None], each.values, (total, width), check_invariants=False)
        for each in there
    ]
    for name in SCHEMES:
        if name == "dense":
            continue  # the backend's own

        def work(peers: Threads, name: str = name) -> tuple[int, int]:
            reduce_with(peers, tensors[peers.rank], name)
            return peers.sent, peers.received

        busiest = max(max(each) for each in on_ranks(world, work))  # type: ignore[type-var]
        assert traffic(name, sparsity, world).nbytes == pytest.approx(busiest, rel=0.12), name
    push, pull = imbalance(sets, Order(total, 0))
    assert max(push, pull) < 1.1
    assert mixed or max(imbalance(sets, Order(total, None))) > 1.5


def test_the_choice_follows_overlap_density_and_latency() -> None:
    alike = Sparsity(10**6, 1, 4, 0.01, (1.2, 1.4, 1.6, 1.8))
    apart = replace(alike, growth=(2.0, 4.0, 8.0, 16.0))
    full = replace(alike, density=1.0, growth=(1.0, 1.0, 1.0, 1.0))
    assert choose(alike, 16) == "zen"
    assert choose(full, 16) == "dense"
    slow, far = network(16, 1, 1e6), network(16, 1, 1e10, latency=1e-3)
    few = replace(alike, units=100)
    for sparsity, where, best in (
        (alike, slow, "zen"),
        (few, far, "hierarchy"),  # log2 n rounds, not 2 (n - 1)
    ):
        assert min(SCHEMES, key=lambda name: seconds(name, sparsity, where)) == best
    nothing = replace(apart, density=0.0)
    assert traffic("zen", nothing, 16).nbytes == 0
    # where all take less than what is not predicted, all are tried, and else those that are near the best
    assert promising(alike, network(16, 1, 1e12, latency=0.0)) == [*SCHEMES]
    assert promising(alike, slow) == ["zen"]


def test_a_plan_sums_a_table_by_the_best_scheme() -> None:
    """A sparse gradient is a group of its own between dense ones, and its bytes are those of its scheme."""
    job = profile([10**5, 10**5, 10**5], 1e8, codecs=())
    rows = Sparsity(10**6, 64, 4, density=0.01, growth=(1.4, 1.8, 2.2))
    table = GradientTensor("table", 64 * 10**6, 1e-3, rows)
    job = replace(job, tensors=(job.tensors[0], table, *job.tensors[1:]))
    plan = make_plan(job)
    group = next(group for group in plan.groups if "table" in group.tensors)
    assert group.tensors == ("table",) and group.option.scheme == "sparse"
    best = min(SCHEMES, key=lambda name: seconds(name, rows, job.network))
    assert group.option.codec == best != "dense"
    moved = traffic(group.option.codec, rows, 8).nbytes
    others = sum(tensor.numel for tensor in job.tensors if tensor.name != "table") * 4 * 2 * 7 / 8
    assert plan.forecasts[0].nbytes == pytest.approx(moved + others, rel=1e-6)
    assert len(plan.order) == len(plan.groups)
    # it loses nothing: no codec is advised
    assert verdict(plan).startswith("do not compress")
    # of schemes that were tried there the one that took least is taken
    sums = SumTime("table", "dense", 4.0), SumTime("table", "allgather", 0.4)
    tried = replace(job, network=replace(job.network, sums=sums))
    group = next(group for group in make_plan(tried).groups if "table" in group.tensors)
    assert group.option.codec == "allgather"


def test_a_table_among_dense_gradients_of_its_size_has_options_of_its_own() -> None:
    job = profile([1 << 10] * 3, 1e7)
    rows = Sparsity(1 << 7, 8, 4, density=0.1, growth=(1.5, 2.0, 3.0))
    table = replace(job.tensors[1], name="table", sparsity=rows)
    for sizes in (3, 5, 8):
        dense = profile([1 << 10] * sizes, 1e7).tensors
        for place in range(sizes):
            tensors = (*dense[:place], table, *dense[place + 1 :])
            plan = make_plan(replace(job, tensors=tensors))
            assert [group.tensors for group in plan.groups if group.option.scheme == "sparse"] == [("table",)]
