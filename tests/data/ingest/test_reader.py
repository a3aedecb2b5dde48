"""Splits and batches: every row that the filter leaves, once, whatever the cut."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from windtunnel.base.errors import UserError
from windtunnel.data.ingest import reader, session
from windtunnel.data.ingest.model import IngestSession


def table(rows: int = 3000, seed: int = 1) -> pa.Table:
    rng = np.random.default_rng(seed)
    lists = [
        rng.integers(0, 1000, rng.integers(0, 6)).tolist() if rng.random() > 0.1 else None
        for _ in range(rows)
    ]
    maps = [[(1, float(row)), (2, 2.0)] if row % 2 else [(2, float(row))] for row in range(rows)]
    return pa.table(
        {
            "row": np.arange(rows),
            "day": np.arange(rows) // 1000,
            "dense": pa.array(rng.random(rows), mask=rng.random(rows) < 0.3),
            "ids": pa.array(lists, pa.list_(pa.int64())),
            "map": pa.array(maps, pa.map_(pa.int64(), pa.float32())),
            "user": pa.array([{"age": row % 90, "name": f"u{row}"} for row in range(rows)]),
        }
    )


def asked(folder: Path, **fields: Any) -> IngestSession:
    document = {"version": 1, "table": str(folder), "columns": ["row"], "batch": 128, "split_rows": 700}
    return session.check(document | fields, "session.yaml")


def rows_of(session: IngestSession, epoch: int = 0) -> pa.Table:
    batches = [
        batch
        for split in reader.Reader(session).splits()
        for batch in reader.Reader(session).batches(split, epoch)
    ]
    return pa.Table.from_batches(batches, batches[0].schema)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("table")
    whole = table()
    pq.write_table(whole.slice(0, 1600), folder / "a.parquet", row_group_size=300)
    pq.write_table(whole.slice(1600), folder / "b.parquet", row_group_size=250)
    (folder / "_SUCCESS").touch()
    return folder


def test_every_row_once_in_batches_of_the_size_asked_for(folder: Path) -> None:
    session = asked(folder, columns=["row", "map/1", "user/age", "ids"])
    for split in reader.Reader(session).splits():
        sizes = [batch.num_rows for batch in reader.Reader(session).batches(split, 0)]
        assert set(sizes[:-1]) <= {128} and 0 < sizes[-1] <= 128 and sum(sizes) == split.rows
    rows, whole = rows_of(session), table()
    assert rows["row"].to_pylist() == list(range(3000))
    assert rows["map/1"].to_pylist() == [float(row) if row % 2 else None for row in range(3000)]
    assert rows["user/age"].to_pylist() == [row % 90 for row in range(3000)]
    assert rows["ids"].to_pylist() == whole["ids"].to_pylist()


def test_shuffling_changes_places_in_a_split_by_seed_and_epoch(folder: Path) -> None:
    session = asked(folder, columns=["row", "dense"], shuffle=True)
    first, again, later = rows_of(session), rows_of(session), rows_of(session, epoch=1)
    assert first.equals(again)
    assert first["row"].to_pylist() != later["row"].to_pylist()
    assert sorted(first["row"].to_pylist()) == sorted(later["row"].to_pylist()) == list(range(3000))
    whole = table()["dense"].to_pylist()
    assert first["dense"].to_pylist() == [whole[row] for row in first["row"].to_pylist()]
    assert rows_of(replace(session, seed=7))["row"].to_pylist() != first["row"].to_pylist()


def test_the_filter_leaves_what_meets_all_of_it_and_rules_row_groups_out(folder: Path) -> None:
    whole = table()
    cases: list[tuple[list[Any], Any]] = [
        ([["day", ">=", 1], ["row", "<", 1500]], lambda r: r["day"] >= 1 and r["row"] < 1500),
        ([["row", "in", [3, 5, 2999, 10**6]]], lambda r: r["row"] in (3, 5, 2999)),
        ([["row", "not in", list(range(2990))]], lambda r: r["row"] >= 2990),
        ([["dense", "==", None]], lambda r: r["dense"] is None),
        ([["dense", "!=", None], ["dense", ">", 0.5]], lambda r: r["dense"] is not None and r["dense"] > 0.5),
        ([["user/name", "==", "u77"]], lambda r: r["row"] == 77),
        ([["map/1", "!=", 7]], lambda r: r["row"] % 2 and r["row"] != 7),
        ([["day", "<=", 0.5]], lambda r: r["day"] == 0),
    ]
    for where, keeps in cases:
        numbers = rows_of(asked(folder, where=where))["row"].to_pylist()
        assert numbers == [r["row"] for r in whole.to_pylist() if keeps(r)], where
    source = reader.Reader(asked(folder, where=cases[0][0]))
    split_rows = sum(split.rows for split in source.splits())
    assert split_rows == 600, "of 3000: the groups from 900 to 1500, by their statistics"
    assert reader.Reader(asked(folder, where=[["day", ">", 5]])).splits() == ()


def test_a_filter_has_the_same_rows_however_they_are_grouped(tmp_path: Path) -> None:
    """A value is compared as the column has it, by statistics and by rows alike."""
    columns = {
        "x": pa.array([0.1] * 4 + [0.05, 0.1, 0.3, 0.4], pa.float32()),
        "id": pa.array([2**63 + 5, 1, 2, 3, 4, 5, 6, 7], pa.uint64()),
        "price": pa.array([1, 2, 3, 4, 5, 6, 7, 8], pa.decimal128(5, 2)),
    }
    pq.write_table(pa.table(columns), tmp_path / "t.parquet", row_group_size=4)

    def ids(*condition: Any) -> list[int]:
        session = IngestSession(str(tmp_path / "t.parquet"), ("id",), where=(condition,))
        return rows_of(session)["id"].to_pylist()

    whole = columns["id"].to_pylist()
    assert ids("x", "==", 0.1) == ids("x", "in", (0.1,)) == [*whole[:4], 5]
    assert ids("x", "<=", 0.1) == whole[:6]
    assert ids("id", "==", 2**63 + 5) == ids("id", "in", (2**63 + 5,)) == whole[:1]
    assert ids("price", "in", (3, None)) == whole[2:3]
    for condition in (("id", "in", (2.5,)), ("id", "<", None), ("id", "==", 2**64)):
        with pytest.raises(UserError, match=f"where compares column id of uint64 by {condition[1]} with"):
            ids(*condition)


def test_reads_are_joined_over_holes_and_counted(folder: Path) -> None:
    """The counts are those of a file system that counts by itself."""
    session = asked(folder, columns=["row", "user/age"], split_rows=10**6)
    readings = {}
    for hole in (-1, 0, 10**6):
        source = reader.Reader(session, hole=hole)
        ranges: list[tuple[int, int]] = []
        inner = source.files.system.cat_ranges

        def counted(paths: Any, starts: Any, ends: Any, **options: Any) -> Any:
            ranges.extend(zip(starts, ends, strict=True))  # noqa: B023
            return inner(paths, starts, ends, **options)  # noqa: B023

        source.files.system.cat_ranges = counted
        try:
            splits = source.splits()
            rows = sum(batch.num_rows for split in splits for batch in source.batches(split, 0))
        finally:
            del source.files.system.cat_ranges
        meter = source.meter
        assert (len(ranges), sum(last - first for first, last in ranges)) == (
            meter.reads + meter.footers, meter.nbytes + meter.footer_bytes,
        )  # fmt: skip
        readings[hole] = meter.reads, meter.nbytes, meter.wanted
        assert rows == 3000
    groups = 6 + 6
    assert readings[-1] == (2 * groups, readings[-1][2], readings[-1][2]), (
        "a read for each column of each row group"
    )
    assert readings[0][0] <= readings[-1][0] and readings[0][1] == readings[0][2]
    assert readings[10**6][0] == 2 and readings[10**6][1] > readings[10**6][2] == readings[0][2]
