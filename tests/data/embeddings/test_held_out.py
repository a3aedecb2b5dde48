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
ORDERS = {table.name: synthetic.order(table.rows, seed=3) for table in TABLES}


def log(path: Path, samples: int, seed: int) -> None:
    columns = {}
    for number, table in enumerate(TABLES):
        rng = np.random.default_rng([seed, number])
        offsets, columns[f"{table.name}.ids"] = synthetic.draw(table, samples, rng, ORDERS[table.name])
        columns[f"{table.name}.offsets"] = offsets
    np.savez(path, **columns)


def plan(*words: str) -> dict[str, object]:
    call = ["embeddings", "plan", "--cluster", "a100-80:1x2", "--host-memory", "1GB", *words]
    done = CliRunner().invoke(app, [*call, "--json"])
    assert done.exit_code == 0, done.output
    shown = " ".join(CliRunner().invoke(app, call).stdout.split())
    return {**json.loads(done.stdout), "shown": shown}


def slow(shards: tuple[TableShard, ...], orders: dict[str, np.ndarray], path: Path, samples: int) -> float:
    """Of a batch of the samples in ``path``: lookups of rows that the shards have in slow memory."""
    held, lookups = np.load(path), 0
    for shard in shards:
        fast = np.zeros(len(orders[shard.table]), bool)
        fast[orders[shard.table][: shard.fast_rows]] = True
        lookups += int((~fast[held[f"{shard.table}.ids"]]).sum())
    return lookups * BATCH / samples


@pytest.mark.parametrize("memory", ["1.5MB", "2.5MB"])
def test_a_plan_says_what_samples_to_come_find(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, memory: str
) -> None:
    monkeypatch.setenv("WINDTUNNEL_HOME", str(tmp_path / "home"))
    log(tmp_path / "log.npz", 6_000, 1)
    log(tmp_path / "later.npz", 6_000, 2)
    sizes = {table.name: table.rows for table in TABLES}
    profile.profile([str(tmp_path / "log.npz")], rows=sizes).save(tmp_path / "stats")
    statistics = read_statistics(tmp_path / "stats")
    report = plan("--statistics", str(tmp_path / "stats"), "--memory", memory)
    shards = tuple(TableShard(**row) for row in report["plan"]["shards"])  # type: ignore[index]
    orders = {name: np.asarray(statistics.order(name)) for name in sizes}
    truth = slow(shards, orders, tmp_path / "later.npz", 6_000)
    said = report["summary"]["slow_accesses"]  # type: ignore[index]
    assert said == pytest.approx(truth, rel=0.1)
    in_sample = slow(shards, orders, tmp_path / "log.npz", 6_000)
    assert in_sample < 0.85 * truth, "else this shows nothing"
    unseen = sum(table.held_out.unseen for table in statistics.tables if table.held_out)
    assert report["forecast"] == {"from": "held-out samples", "samples": 1_200, "unseen_rows": unseen}
    assert f"forecast from the held-out samples, 1,200 in all; {unseen:,} rows" in str(report["shown"])


def test_made_up_tables_are_forecast_from_their_distribution(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("WINDTUNNEL_HOME", str(tmp_path))
    report = plan("--synthetic", "small", "--memory", "20MB")
    assert report["forecast"] == {"from": "distribution", "samples": 0, "unseen_rows": 0}
    assert "slow accesses are forecast from the distribution of the synthetic tables" in str(report["shown"])
    tables = {table.name: table for table in synthetic.tables("small")}
    lookups, rng = 0, np.random.default_rng(7)
    for shard in report["plan"]["shards"]:  # type: ignore[index]
        lookups += int((synthetic.draw(tables[shard["table"]], BATCH, rng)[1] >= shard["fast_rows"]).sum())
    assert report["summary"]["slow_accesses"] == pytest.approx(lookups, rel=0.05)  # type: ignore[index]
    write_statistics(tmp_path / "old", synthetic.tables("small"), {})
    report = plan("--statistics", str(tmp_path / "old"), "--memory", "20MB")
    assert "forecast from the counted samples, which is too low" in str(report["shown"])


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
            "f.ids": np.array([row for bag in part for row in bag], np.int64),
            "f.offsets": np.cumsum([0, *map(len, part)]),
        })  # fmt: skip
        with fsspec.open(f"memory://held/{number:02d}.npz", "wb") as file:
            file.write(sink.getvalue())
    named = [f"memory://held/{number:02d}.npz" for number in range(-(-len(bags) // block))]
    profiles = profile.profile(named, rows={"f": 15}, window=window)
    cut = len(bags) - len(bags) // 5
    before, later = (Counter(row for bag in some for row in bag) for some in (bags[:cut], bags[cut:]))
    held = profiles.tables[0].held_out
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
    raw = accesses(profiles.tables, (TableShard("f", 0, 0, 64, fast),), 1).raw[0]
    assert raw[1] / raw.sum() == pytest.approx(missed / later.total(), abs=1e-9)
