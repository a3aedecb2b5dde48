"""Counts in one byte a row are exact, and so is what follows from them: held against counting one by one."""

from collections import Counter
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from windtunnel.data.embeddings import counting
from windtunnel.data.embeddings.counting import RowCounts, curve

Lookups = list[tuple[int, int]]
LOOKUPS = st.lists(st.tuples(st.integers(0, 19), st.sampled_from([1, 2, 255, 256, 257, 600])), max_size=12)


@pytest.fixture(autouse=True)
def _small_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(counting, "CHUNK", 7)
    monkeypatch.setattr(counting, "PENDING", 1)


def counted(lookups: Lookups, rows: int) -> tuple[RowCounts, Counter[int]]:
    counter, truth = RowCounts(rows), Counter[int]()
    for row, times in lookups:
        counter.add(np.full(times, row, np.int64))
        truth[row] += times
    return counter, truth


@given(LOOKUPS, LOOKUPS, st.integers(1, 25))
@settings(max_examples=60, deadline=None)
def test_counts_orders_and_curves_are_exact(first: Lookups, second: Lookups, count: int) -> None:
    rows = 20
    counter, truth = counted(first, rows)
    window, also = counted(second, rows)
    counter.fold(window)
    truth += also
    counts = np.array([truth[row] for row in range(rows)])
    assert counter.total == counts.sum()
    assert np.array_equal(counter.of(np.arange(rows)), counts)
    values, many = counter.histogram()
    assert dict(zip(values.tolist(), many.tolist(), strict=True)) == Counter(counts.tolist())
    assert (np.diff(values) < 0).all()
    order = sorted(range(rows), key=lambda row: (-truth[row], row))
    pieces = np.full(rows, -1)
    for place, ids in counter.order():
        pieces[place : place + len(ids)] = ids
    assert pieces.tolist() == order
    wanted = [row for row in order[:count] if truth[row]]
    assert counter.top(count).tolist() == sorted(wanted)
    ranks, shares, error = curve(values, many)
    if counter.total:
        exact = np.concatenate(([0], np.cumsum(counts[order]))) / counter.total
        away = exact - np.interp(np.arange(rows + 1), ranks, shares)
        assert away.min() > -1e-12
        assert away.max() == pytest.approx(error, abs=1e-12)
        assert (ranks[0], ranks[-1], shares[0], shares[-1]) == (0, rows, 0, 1)
    else:
        assert (ranks, shares, error) == ((), (), 0.0)


def test_a_curve_of_many_points_keeps_a_hundred_and_says_what_that_costs() -> None:
    counts = np.sort(np.random.default_rng(1).zipf(1.3, 20_000) % 1_000_000)[::-1]
    values, many = np.unique(counts, return_counts=True)
    ranks, shares, error = curve(values[::-1], many[::-1])
    exact = np.concatenate(([0], np.cumsum(counts))) / counts.sum()
    away = exact - np.interp(np.arange(20_001), ranks, shares)
    assert len(ranks) == counting.POINTS
    assert 0 < away.max() == pytest.approx(error, abs=1e-12)
    assert error < 0.001
    slopes = np.diff(shares) / np.diff(ranks)
    assert (np.diff(slopes) <= 1e-12).all()


def test_rows_grow_and_are_written_as_an_order(tmp_path: Path) -> None:
    counter = RowCounts(0)
    for rows in (3, 4, 900):
        counter.grow(rows)
        counter.add(np.array([rows - 1, rows - 1], np.int64))
    counter.trim(900)
    counter.write_order(tmp_path / "order.npy")
    order = np.load(tmp_path / "order.npy")
    assert order.dtype == np.uint32
    assert order[:3].tolist() == [2, 3, 899]
    assert np.array_equal(np.sort(order), np.arange(900))
