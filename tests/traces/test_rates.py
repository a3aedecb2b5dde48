"""Counts of requests a second, read strictly; requests in seconds of such means."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from windtunnel.base.errors import UserError
from windtunnel.traces.rates import arrivals, read_counts


@pytest.mark.parametrize(
    ("text", "said"),
    [("12 x 3", "word 2: 'x'"), ("1 -2", "word 2: '-'"), ("1.5", "word 1: '1.'"), ("", "is empty")],
)
def test_what_is_no_count_is_refused_by_its_place(tmp_path: Path, text: str, said: str) -> None:
    (tmp_path / "load.txt").write_text(text)
    with pytest.raises(UserError, match=r"load\.txt") as refused:
        read_counts(tmp_path / "load.txt")
    assert said in str(refused.value)
    with pytest.raises(UserError, match="cannot be read"):
        read_counts(tmp_path / "none.txt")


def test_requests_fall_into_the_seconds_whose_counts_they_are(tmp_path: Path) -> None:
    (tmp_path / "load.txt").write_text("52 0\n900 ")
    counts = read_counts(tmp_path / "load.txt")
    assert counts.tolist() == [52, 0, 900]
    times = arrivals(counts.astype(float), np.random.default_rng(0))
    assert (np.diff(times) >= 0).all()
    per_second = np.bincount(times.astype(int), minlength=3)
    assert per_second[1] == 0 and abs(per_second[0] - 52) < 25 and abs(per_second[2] - 900) < 120
