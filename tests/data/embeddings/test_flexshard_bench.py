"""The bench's emulated section: what it must show wherever it runs."""

from __future__ import annotations

import pytest

from benchmarks.harness.run import run


def test_replicas_pay_where_lookups_are_skewed() -> None:
    rows = run("data.embeddings", ["flexshard"], quick=True)
    assert [row.name for row in rows if "failed" in row.name or row.passed is False] == []
    less = {row.name: row.emulated for row in rows if "all-to-all bytes less" in row.name}
    assert list(less.values()) == sorted(less.values(), key=lambda share: share or 0)
    assert less["a100-80:16x8, 10 M rows, Zipf 1.05: all-to-all bytes less than row-wise"] == (
        pytest.approx(0.73, abs=0.03)
    )
