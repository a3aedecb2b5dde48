"""Tables laid out anew hold the same rows, cost their sessions less, and are whole or not there."""

from __future__ import annotations

import json
import resource
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import typer
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st

from windtunnel.base.errors import HostError, UserError
from windtunnel.cli.main import app
from windtunnel.data.ingest import layout, reader, synthetic
from windtunnel.data.ingest.live.calls import MasterSettings
from windtunnel.data.ingest.live.demo import demo
from windtunnel.data.ingest.model import IngestSession

ROWS = 2000


@pytest.fixture(scope="module")
def table(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("rm3") / "maps"
    synthetic.write(folder, "rm3", ROWS, files=2, group_rows=400)
    return folder


@pytest.fixture(scope="module")
def sessions(table: Path) -> tuple[IngestSession, ...]:
    return tuple(replace(session, batch=512) for session in synthetic.sessions(str(table), "rm3", 3))


def rows_of(session: IngestSession) -> pa.Table:
    return pa.Table.from_batches(
        [
            batch
            for split in reader.Reader(session).splits()
            for batch in reader.Reader(session).batches(split, 0)
        ]
    )


def test_the_same_rows_with_fewer_bytes_and_reads(
    table: Path, sessions: tuple[IngestSession, ...], tmp_path: Path
) -> None:
    outcome = layout.lay_out(str(table), sessions, tmp_path / "new", group_rows=10**6)
    assert [path.name for path in sorted((tmp_path / "new").iterdir())] == [
        "part-00000.parquet",
        "part-00001.parquet",
    ]
    assert pq.read_schema(tmp_path / "new/part-00000.parquet").names == list(outcome.order)
    for session, before, after in zip(sessions, outcome.before, outcome.after, strict=True):
        assert before.rows == after.rows == ROWS
        assert after.nbytes < before.nbytes / 2 and after.reads <= before.reads
        assert rows_of(session).equals(rows_of(replace(session, table=str(tmp_path / "new"))))
    flat = tmp_path / "flat"
    synthetic.write(flat, "rm3", ROWS, files=2, maps=False)
    for session in sessions:
        assert rows_of(session).equals(rows_of(replace(session, table=str(flat)))), (
            "a table written flat is the same"
        )
    assert layout.reuse(sessions).columns == 4 and outcome.reuse.columns == len(outcome.order)
    assert outcome.reuse.popular < 0.5 < layout.reuse(sessions).popular == pytest.approx(0.8, abs=0.01)


def test_a_change_in_one_value_is_found(
    table: Path, sessions: tuple[IngestSession, ...], tmp_path: Path
) -> None:
    new = tmp_path / "new"
    layout.lay_out(str(table), sessions[:1], new)
    name = sessions[0].columns[1]
    part = new / "part-00001.parquet"
    whole = pq.read_table(part)
    values = whole[name].to_pylist()
    values[700] = 0.25 if values[700] is None else None
    pq.write_table(
        whole.set_column(whole.schema.get_field_index(name), name, pa.array(values, pa.float32())), part
    )
    with pytest.raises(UserError, match="differs from"):
        layout.compared(sessions[0], replace(sessions[0], table=str(new)))


def test_nan_is_the_same_as_itself() -> None:
    values = [1.0, float("nan"), None]
    left, right = (
        pa.record_batch({
            "x": values, "y": pa.array([values] * 3, pa.list_(pa.float32())),
            "map": pa.array([[(1, value)] for value in values], pa.map_(pa.int8(), pa.float64())),
            "struct": pa.array([{"a": value} for value in values]),
        })
        for _ in "ab"
    )  # fmt: skip
    assert layout.same(left, right)
    assert not layout.same(left, pa.record_batch({"x": [1.0, 2.0, None], "y": left["y"]}))


def test_a_full_disk_leaves_nothing(table: Path, sessions: tuple[IngestSession, ...], tmp_path: Path) -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (60_000, hard))
    try:
        with pytest.raises(HostError, match="and nothing of it is left"):
            layout.lay_out(str(table), sessions, tmp_path / "new")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert list(tmp_path.iterdir()) == []


@given(
    st.lists(st.tuples(st.sets(st.integers(0, 3)), st.integers(1, 2000)), min_size=1, max_size=12),
    st.integers(0, 300),
)
@settings(max_examples=40, deadline=None)
def test_an_order_has_every_column_and_is_no_worse_than_before(columns: list[Any], hole: int) -> None:
    signatures = {f"c{place}": frozenset(sessions) for place, (sessions, _) in enumerate(columns)}
    sizes = {f"c{place}": float(size) for place, (_, size) in enumerate(columns)}
    order = layout.best_order(signatures, sizes, hole)
    assert sorted(order) == sorted(signatures)

    def read(names: list[str]) -> int:
        ends = np.cumsum([0] + [int(sizes[name]) for name in names]).tolist()
        total = 0
        for session in range(4):
            held: list[tuple[int, int]] = []
            for place, name in enumerate(names):
                if session in signatures[name]:
                    first, last = ends[place], ends[place + 1]
                    near = held and first - held[-1][1] <= hole
                    held[-1:] = [(held[-1][0], last)] if near else [*held[-1:], (first, last)]
            total += sum(last - first for first, last in held)
        return total

    assert read(order) <= read(list(signatures))


def test_the_verbs(table: Path, sessions: tuple[IngestSession, ...], tmp_path: Path, capsys: Any) -> None:
    paths = []
    for place, session in enumerate(sessions[:2]):
        transforms = [{"kind": each.kind, "inputs": list(each.inputs), "output": each.output} | each.options
                      for each in session.transforms]  # fmt: skip
        document = {
            "version": 1,
            "table": str(table),
            "columns": list(session.columns),
            "transforms": transforms,
        }
        paths.append(tmp_path / f"{place}.yaml")
        paths[-1].write_text(yaml.safe_dump(document | {"where": [["day", ">=", 5]]}))
    new = tmp_path / "new"
    asked = [word for path in paths for word in ("--sessions", str(path))]
    run(["layout", str(table), *asked, "--out", str(new), "--json"])
    report = json.loads(capsys.readouterr().out)
    assert len(report["before"]) == 2 and report["folder"] == str(new)
    with pytest.raises(UserError, match=f"--out {new}: is there already"):
        run(["layout", str(table), *asked, "--out", str(new)])
    run(["characterise", str(paths[0]), "--json", "--demand", "1e12"])
    report = json.loads(capsys.readouterr().out)
    model = synthetic.MODELS["rm3"]
    assert (
        report["dense"] == model.dense // model.scale + 2 and report["sparse"] == model.sparse // model.scale
    )
    assert report["table_rows"] == ROWS and report["kept"] == ROWS // 2 and report["rows"] < ROWS
    assert report["read_bytes"] >= report["wanted_bytes"] > 0 and report["amplification"] >= 1
    assert report["stall"] > 0.99 and set(report["cpu"]) == {"read", "decode", "transform", "batch"}
    run(["characterise", str(paths[1])])
    with pytest.raises(UserError, match="ingest demo: `workers` is 0"):
        demo(tmp_path / "demo", MasterSettings(workers=0))
    assert "amplification" in capsys.readouterr().out


def run(words: list[str]) -> None:
    typer.main.get_command(app)(["ingest", *words], standalone_mode=False)
