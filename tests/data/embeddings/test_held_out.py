"""Slow accesses are forecast on samples that the counts behind the forecast have not seen."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from typer.testing import CliRunner

from windtunnel.cli.main import app
from windtunnel.data.embeddings import profile, synthetic
from windtunnel.data.embeddings.files import read_statistics, write_statistics
from windtunnel.data.embeddings.model import EmbeddingTable, TableShard
from windtunnel.data.embeddings.twin import accesses

BATCH = 16_384
TABLES = [
    EmbeddingTable(f"f{number}", rows, 64, pooling=8.0, coverage=0.7, ranks=ranks, shares=shares)
    for number, (rows, exponent) in enumerate(((60_000, 1.05), (20_000, 0.8), (3_000, 0.2)))
    for ranks, shares in [synthetic.zipf(rows, exponent)]
]
ORDERS = {one.name: synthetic.order(one.rows, seed=3) for one in TABLES}


def log(path: Path, samples: int, seed: int) -> None:
    columns = {}
    for number, one in enumerate(TABLES):
        rng = np.random.default_rng([seed, number])
        offsets, columns[f"{one.name}.ids"] = synthetic.draw(one, samples, rng, ORDERS[one.name])
        columns[f"{one.name}.offsets"] = offsets
    np.savez(path, **columns)


def plan(*words: str) -> dict[str, object]:
    call = ["embeddings", "plan", "--cluster", "a100-80:1x2", "--host-memory", "1GB", *words]
    done = CliRunner().invoke(app, [*call, "--json"])
    assert done.exit_code == 0, done.output
    shown = " ".join(CliRunner().invoke(app, call).stdout.split())
    return {**json.loads(done.stdout), "shown": shown}


def slow(shards: tuple[TableShard, ...], orders: dict[str, np.ndarray], path: Path, samples: int) -> float:
    """Of a batch of the samples in ``path``: lookups of rows that the shards have in slow memory."""
    held, found = np.load(path), 0
    for one in shards:
        fast = np.zeros(len(orders[one.table]), bool)
        fast[orders[one.table][: one.fast_rows]] = True
        found += int((~fast[held[f"{one.table}.ids"]]).sum())
    return found * BATCH / samples


@pytest.mark.parametrize("memory", ["1.5MB", "2.5MB"])
def test_a_plan_says_what_samples_to_come_find(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, memory: str
) -> None:
    monkeypatch.setenv("WINDTUNNEL_HOME", str(tmp_path / "home"))
    log(tmp_path / "log.npz", 6_000, 1)
    log(tmp_path / "later.npz", 6_000, 2)
    sizes = {one.name: one.rows for one in TABLES}
    profile.profile([str(tmp_path / "log.npz")], rows=sizes).save(tmp_path / "stats")
    statistics = read_statistics(tmp_path / "stats")
    told = plan("--statistics", str(tmp_path / "stats"), "--memory", memory)
    shards = tuple(TableShard(**one) for one in told["plan"]["shards"])  # type: ignore[index]
    orders = {name: np.asarray(statistics.order(name)) for name in sizes}
    truth = slow(shards, orders, tmp_path / "later.npz", 6_000)
    said = told["summary"]["slow_accesses"]  # type: ignore[index]
    assert said == pytest.approx(truth, rel=0.1)
    in_sample = slow(shards, orders, tmp_path / "log.npz", 6_000)
    assert in_sample < 0.85 * truth, "else this shows nothing"
    unseen = sum(one.held_out.unseen for one in statistics.tables if one.held_out)
    assert told["forecast"] == {"from": "held-out samples", "samples": 1_200, "unseen_rows": unseen}
    assert f"forecast from the held-out samples, 1,200 in all; {unseen:,} rows" in str(told["shown"])


def test_made_up_tables_are_forecast_from_their_distribution(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("WINDTUNNEL_HOME", str(tmp_path))
    told = plan("--synthetic", "small", "--memory", "20MB")
    assert told["forecast"] == {"from": "distribution", "samples": 0, "unseen_rows": 0}
    assert "slow accesses are forecast from the distribution of the synthetic tables" in str(told["shown"])
    tables = {one.name: one for one in synthetic.tables("small")}
    found, rng = 0, np.random.default_rng(7)
    for one in told["plan"]["shards"]:  # type: ignore[index]
        found += int((synthetic.draw(tables[one["table"]], BATCH, rng)[1] >= one["fast_rows"]).sum())
    assert told["summary"]["slow_accesses"] == pytest.approx(found, rel=0.05)  # type: ignore[index]
    write_statistics(tmp_path / "old", synthetic.tables("small"), {})
    told = plan("--statistics", str(tmp_path / "old"), "--memory", "20MB")
    assert "forecast from the counted samples, which is too low" in str(told["shown"])


BAGS = st.lists(st.lists(st.integers(0, 12), max_size=4), min_size=5, max_size=40)


@given(BAGS, st.integers(0, 15), st.integers(1, 9), st.integers(1, 9))
@settings(max_examples=60, deadline=None)
def test_the_last_fifth_is_held_out_exactly(
    bags: list[list[int]], fast: int, block: int, window: int
) -> None:
    """However the log is cut. Rows that were asked for equally often share what is asked of them later."""
    import io

    import fsspec

    for number, first in enumerate(range(0, len(bags), block)):
        part = bags[first : first + block]
        sink = io.BytesIO()
        np.savez(sink, **{
            "f.ids": np.array([one for bag in part for one in bag], np.int64),
            "f.offsets": np.cumsum([0, *map(len, part)]),
        })  # fmt: skip
        with fsspec.open(f"memory://held/{number:02d}.npz", "wb") as file:
            file.write(sink.getvalue())
    named = [f"memory://held/{number:02d}.npz" for number in range(-(-len(bags) // block))]
    found = profile.profile(named, rows={"f": 15}, window=window)
    cut = len(bags) - len(bags) // 5
    before, later = (Counter(one for bag in some for one in bag) for some in (bags[:cut], bags[cut:]))
    held = found.tables[0].held_out
    if not later:
        assert held is None
        return
    assert held is not None
    assert (held.samples, held.counted) == (len(bags) // 5, len(before))
    assert held.unseen == len(set(later) - set(before))
    missed, left = 0.0, min(fast, len(before)) if fast < 15 else 15
    for many in sorted({before[row] for row in range(15)}, reverse=True):
        alike = [row for row in range(15) if before[row] == many]
        part = min(1.0, left / len(alike))
        missed += (1 - part) * sum(later[row] for row in alike)
        left -= min(left, len(alike))
    raw = accesses(found.tables, (TableShard("f", 0, 0, 64, fast),), 1).raw[0]
    assert raw[1] / raw.sum() == pytest.approx(missed / later.total(), abs=1e-9)
