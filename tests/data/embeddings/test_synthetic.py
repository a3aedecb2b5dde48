"""Synthetic tables: the published totals and histogram, and lookups that follow what a table says."""

from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.special import gammainc

from windtunnel.base.errors import UserError
from windtunnel.data.embeddings import synthetic
from windtunnel.data.embeddings.model import EmbeddingTable, checked

REUSE_2021 = (
    0.069, 0.044, 0.068, 0.101, 0.121, 0.104, 0.073, 0.058, 0.052,
    0.050, 0.049, 0.048, 0.048, 0.043, 0.031, 0.023, 0.019,
)  # fmt: skip
"""dlrm_datasets, embedding_bag/locality_stats.txt, one batch of 65,536: the share of lookups that go to rows
which are asked for (0, 1], (1, 2], (2, 4] ... (16384, 32768] and more times."""


@pytest.mark.parametrize(("name", "gigabytes"), [("rm1", 318), ("rm2", 635), ("rm3", 1270)])
def test_models_of_recshard_have_their_published_sizes(name: str, gigabytes: int) -> None:
    tables = synthetic.tables(name)
    checked(tables, name)
    assert len(tables) == 397
    assert sum(table.rows for table in tables) == synthetic.ROWS[name]
    assert sum(table.total_bytes for table in tables) / 2**30 == pytest.approx(gigabytes, rel=0.002)
    assert tables == synthetic.tables(name)
    assert tables != synthetic.tables(name, 1)
    assert np.mean([table.coverage for table in tables]) == pytest.approx(0.45, abs=0.06)
    assert np.mean([table.pooling for table in tables]) == pytest.approx(26, abs=5)


def test_larger_hashes_leave_more_rows_unused() -> None:
    def used(name: str) -> float:
        tables = synthetic.tables(name)
        wanted = sum(table.ranks[-2] if table.shares[-2] == 1 else table.rows for table in tables)
        return wanted / sum(table.rows for table in tables)

    assert used("rm1") > used("rm2") > used("rm3")
    assert used("rm1") == pytest.approx(1 - np.exp(-1), abs=0.15)


def test_reuse_of_dlrm2021_is_the_published_histogram() -> None:
    edges = np.array([0, *(2.0**power for power in range(16))])
    share, distinct, lookups = np.zeros(17), 0.0, 0.0
    for table in synthetic.tables("dlrm2021"):
        ranks, shares = table.curve()
        rows, wanted = np.diff(ranks), table.lookups * synthetic.SAMPLES_2021
        rate = wanted * np.diff(shares) / rows  # a row's lookups in the batch, which are Poisson's
        more = np.where(edges[:, None] > 0, gammainc(np.maximum(edges[:, None], 1e-9), rate), 1.0)
        share += -np.diff(np.vstack([more, np.zeros_like(rate)]), axis=0) @ (rows * rate)
        distinct += rows @ -np.expm1(-rate)
        lookups += wanted
    assert lookups == pytest.approx(887_017_990, rel=1e-3)
    assert lookups / distinct == pytest.approx(6.9, abs=0.05)
    assert np.abs(share / lookups - REUSE_2021).max() < 0.002


def test_drawn_lookups_follow_curve_pooling_and_coverage() -> None:
    ranks, shares = synthetic.zipf(5000, 1.0, 3000)
    table = EmbeddingTable("t", 5000, 8, pooling=6.0, coverage=0.3, ranks=ranks, shares=shares)
    samples = 60_000
    offsets, looked = synthetic.draw(table, samples, np.random.default_rng(1))
    lengths = np.diff(offsets)
    assert offsets[-1] == len(looked)
    assert looked.max() < 3000
    assert np.mean(lengths > 0) == pytest.approx(0.3, abs=0.01)
    assert lengths[lengths > 0].mean() == pytest.approx(6.0, rel=0.02)
    cumulative = np.cumsum(np.bincount(looked, minlength=5000)) / len(looked)
    assert np.abs(cumulative - table.share(np.arange(1, 5001))).max() < 0.005
    order = synthetic.order(5000, 3)
    again, ids = synthetic.draw(table, samples, np.random.default_rng(1), order)
    assert (again == offsets).all()
    assert (ids == order[looked]).all()


@given(st.integers(1, 300), st.floats(0, 2), st.integers(1, 300), st.integers(0, 3))
@settings(max_examples=30, deadline=None)
def test_curves_are_concave_and_orders_permutations(rows: int, exponent: float, used: int, day: int) -> None:
    used = min(used, rows)
    ranks, shares = synthetic.zipf(rows, exponent, used)
    checked((EmbeddingTable("t", rows, 1, ranks=ranks, shares=shares),), "here")
    exact = np.cumsum(np.arange(1, used + 1, dtype=float) ** -exponent)
    assert np.allclose(
        shares[1 : ranks.index(used) + 1], exact[np.array(ranks[1 : ranks.index(used) + 1]) - 1] / exact[-1]
    )
    order = synthetic.order(rows, 7, day=day, drift=0.2)
    assert np.array_equal(np.sort(order), np.arange(rows))


def test_days_drift_by_the_share_that_is_asked_for() -> None:
    days = [synthetic.order(10_000, 1, day=day, drift=0.1) for day in range(3)]
    assert [(order != other).mean() for order, other in pairwise(days)] == [0.1, 0.1]
    hot = [set(order[:1000].tolist()) for order in days]
    assert len(hot[0] & hot[1]) == pytest.approx(910, abs=25)  # of those that move, one in ten stays hot


def test_what_is_no_synthetic_table_is_refused() -> None:
    with pytest.raises(UserError, match=r"'rm4' are unknown, did you mean rm1\? accepted are rm1, rm2, rm3"):
        synthetic.tables("rm4")
    with pytest.raises(UserError, match=r"coverage is 1\.5, accepted is more than 0 to 1"):
        synthetic.tables("rm1", coverage=1.5)
