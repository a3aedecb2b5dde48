"""Sizes and shares of pipelines against trying all of them."""

from __future__ import annotations

import random
from collections.abc import Sequence

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pipeline_oracles import even_set, shares, sums

from windtunnel.base.errors import UserError
from windtunnel.training.pipelines.model import TemplateSet
from windtunnel.training.pipelines.policy.compose import (
    choose_sizes,
    compose,
    distribute,
    fill_and_step,
    share,
    step_seconds,
    usable,
)
from windtunnel.training.pipelines.policy.templates import largest_size

whole = st.integers(1, 9).map(float)


def shares_of(pipelines: Sequence[tuple[float, float]], total: int) -> tuple[int, ...]:
    """Microbatches of pipelines with these (seconds a microbatch, beside them)."""
    return distribute(pipelines, {kind: kind for kind in pipelines}, total)


def seconds_of(set: TemplateSet, sizes: tuple[int, ...], microbatches: int) -> float:
    shapes = [fill_and_step(set.of(size)) for size in sizes]
    dealt = shares_of([(step, fill) for fill, step in shapes], microbatches)
    return max(fill + b * step for (fill, step), b in zip(shapes, dealt, strict=True))


@given(st.lists(st.tuples(whole, st.integers(0, 20).map(float)), min_size=1, max_size=4), st.integers(0, 7))
@settings(max_examples=300, deadline=None, derandomize=True)
def test_shares_are_optimal(pipelines: list[tuple[float, float]], more: int) -> None:
    times, fill = [t for t, _ in pipelines], [f for _, f in pipelines]
    total = len(pipelines) + more
    dealt = shares_of(pipelines, total)

    def last(each: tuple[int, ...]) -> float:
        return max(f + b * t for f, b, t in zip(fill, each, times, strict=True))

    assert sum(dealt) == total and min(dealt) >= 1
    assert last(dealt) == min(last(each) for each in shares(len(pipelines), total))


def test_shares_of_equal_pipelines_differ_by_one_at_most() -> None:
    assert shares_of([(0.1, 0.3)] * 3, 8) == (3, 3, 2)


def test_shares_of_very_many_pipelines() -> None:
    dealt = shares_of([(0.3 + 0.01 * (i % 7), 1.0) for i in range(2000)], 50_000)
    assert sum(dealt) == 50_000 and max(dealt) <= 29


def test_a_microbatch_that_takes_no_time_is_refused() -> None:
    with pytest.raises(UserError, match="positive"):
        shares_of([(0.0, 1.0)], 1)


@pytest.mark.parametrize("seed", range(12))
def test_sizes_are_near_the_best_of_all_sums(seed: int) -> None:
    draw = random.Random(seed)
    n0, count, f = draw.randint(1, 3), draw.randint(1, 5), draw.randint(0, 2)
    templates = even_set(n0, count, f, layers=48)
    for hosts in range(n0, 13):
        microbatches = draw.choice([1, 3, 7, 20])
        possible = [s for s in sums(hosts, range(n0, n0 + count)) if len(s) <= microbatches]
        enough = [s for s in possible if len(s) > f]
        # Fewer than f + 1 pipelines only where there is no other way: then as many as there can be.
        wanted = enough or [s for s in possible if len(s) == max(map(len, possible))]
        if not wanted:
            with pytest.raises(UserError, match="no sum"):
                choose_sizes(templates, hosts, microbatches)
            continue
        sizes = choose_sizes(templates, hosts, microbatches)
        assert sizes in wanted and sizes[-1] - sizes[0] <= 1
        best = min(seconds_of(templates, each, microbatches) for each in wanted)
        assert best <= seconds_of(templates, sizes, microbatches) <= 1.1 * best
        alike = [each for each in wanted if each[-1] - each[0] <= 1]
        assert seconds_of(templates, sizes, microbatches) == pytest.approx(
            min(seconds_of(templates, each, microbatches) for each in alike), rel=1e-12
        )


@pytest.mark.parametrize(("hosts", "microbatches"), [(8192, 16384), (8191, 3000), (1000, 250), (300, 90)])
def test_large_jobs(hosts: int, microbatches: int) -> None:
    templates = even_set(4, 5, 2, layers=24)
    layout = compose(templates, range(hosts), microbatches)
    assert sorted(host for p in layout.pipelines for host in p) == list(range(hosts))
    assert sum(layout.microbatches) == microbatches and min(layout.microbatches) >= 1
    assert len(layout.pipelines) >= 3
    # No pipelines of one size alone, nor the fewest or the most of them, are better.
    seconds = step_seconds(templates, layout)
    for size in range(4, 9):
        count, rest = divmod(hosts, size)
        if rest == 0 and count <= microbatches:
            assert seconds <= seconds_of(templates, (size,) * count, microbatches) + 1e-9


@given(st.integers(1, 4), st.integers(1, 5), st.integers(0, 3), st.integers(1, 30), st.integers(1, 40))
@settings(max_examples=300, deadline=None, derandomize=True)
def test_layouts_are_sound(n0: int, count: int, f: int, hosts: int, microbatches: int) -> None:
    templates = even_set(n0, count, f)
    if hosts < n0:
        with pytest.raises(UserError, match="do not hold"):
            compose(templates, range(hosts), microbatches)
        return
    ids = range(100, 100 + hosts)
    layout = compose(templates, ids, microbatches)
    used = [host for pipeline in layout.pipelines for host in pipeline]
    assert used == list(ids[: usable(templates, hosts, microbatches)])
    if count >= n0 and microbatches >= hosts // n0:
        assert len(used) == hosts
    sizes = [len(pipeline) for pipeline in layout.pipelines]
    assert all(n0 <= size <= largest_size(templates) for size in sizes)
    assert sum(layout.microbatches) == microbatches and min(layout.microbatches) >= 1
    assert layout == compose(templates, ids, microbatches)
    assert share(templates, sizes, microbatches) == layout.microbatches


def test_no_microbatch() -> None:
    with pytest.raises(UserError, match="microbatches is 0"):
        compose(even_set(1, 2, 0), [1, 2], 0)
