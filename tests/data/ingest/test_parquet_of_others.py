"""Parquet that others wrote reads as the same rows and types; what cannot be read is refused by name."""

from __future__ import annotations

import base64
import datetime as dt
from collections.abc import Callable
from pathlib import Path
from typing import Any

import fsspec
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pyarrow.parquet.encryption as pe
import pytest

from windtunnel.base.errors import UserError
from windtunnel.data.ingest import reader, session
from windtunnel.data.ingest.model import IngestSession

IDS = [[1, None, 3], None, [], [4]] * 25
COLUMNS: dict[str, Any] = {
    "n": [1, None, 3, 4] * 25,
    "x": [0.5, None, -1.0, 2.0] * 25,
    "city": ["a", "b", None, "a"] * 25,
    "when": [dt.datetime(2020, 1, 1 + day % 28) for day in range(100)],
    "ids": IDS,
    "nested": [None if ids is None else [ids, []] for ids in IDS],
}
TABLE = pa.table(COLUMNS)
TYPES = {
    "n": pa.int64(), "x": pa.float64(), "city": pa.string(), "ids": pa.list_(pa.int64()),
    "nested": pa.list_(pa.list_(pa.int64())),
}  # fmt: skip


def by_arrow(**options: Any) -> Callable[[Path], None]:
    return lambda path: pq.write_table(TABLE, path, row_group_size=30, **options)


def typed(name: str, kind: pa.DataType) -> Callable[[Path], None]:
    """A column of another type, which Arrow's own schema in the file keeps."""
    column = TABLE[name]
    cast = column.dictionary_encode() if pa.types.is_dictionary(kind) else column.cast(kind)
    return lambda path: pq.write_table(TABLE.set_column(TABLE.schema.get_field_index(name), name, cast), path)


def by_polars(path: Path) -> None:
    polars = pytest.importorskip("polars", reason="needs the strangers extra")
    frame = polars.DataFrame(COLUMNS).with_columns(polars.col("city").cast(polars.Categorical))
    frame.write_parquet(path, row_group_size=30, statistics="full")


def by_duckdb(path: Path) -> None:
    duckdb = pytest.importorskip("duckdb", reason="needs the strangers extra")
    given = TABLE  # noqa: F841  (the query reads it by its name)
    duckdb.sql(f"copy (select * from given) to '{path}' (format parquet, row_group_size 2048, codec 'zstd')")


def by_pandas(path: Path) -> None:
    pandas = pytest.importorskip("pandas", reason="needs the strangers extra")
    pandas.DataFrame(COLUMNS | {"n": pandas.array(COLUMNS["n"], "Int64")}).to_parquet(path)


WRITERS: dict[str, Callable[[Path], None]] = {
    "spark-like": by_arrow(flavor="spark", use_deprecated_int96_timestamps=True, store_schema=False),
    "int96": by_arrow(use_deprecated_int96_timestamps=True),
    "dictionary": typed("city", pa.dictionary(pa.int32(), pa.string())),
    "large string": typed("city", pa.large_string()),
    "string view": typed("city", pa.string_view()),
    "large list": typed("ids", pa.large_list(pa.int64())),
    "page index": by_arrow(write_page_index=True, data_page_size=64),
    "page v2": by_arrow(data_page_version="2.0", write_page_checksum=True),
    "old lists": by_arrow(use_compliant_nested_type=False, version="1.0"),
    "delta": by_arrow(
        use_dictionary=False, column_encoding={"n": "DELTA_BINARY_PACKED", "city": "DELTA_BYTE_ARRAY"}
    ),
    **{codec: by_arrow(compression=codec) for codec in ("none", "snappy", "zstd", "gzip", "brotli", "lz4")},
}  # fmt: skip


def asked(path: Path | str, columns: tuple[str, ...] = tuple(COLUMNS), **fields: Any) -> IngestSession:
    return session.check(
        {"version": 1, "table": str(path), "columns": list(columns), "batch": 7} | fields, "s.yaml"
    )


def rows_of(session: IngestSession) -> pa.Table:
    return pa.Table.from_batches(
        [
            batch
            for split in reader.Reader(session).splits()
            for batch in reader.Reader(session).batches(split, 0)
        ]
    )


def refused(session: IngestSession) -> str:
    with pytest.raises(UserError) as error:
        rows_of(session)
    assert "\n" not in str(error.value)
    return str(error.value)


@pytest.mark.parametrize("writer", WRITERS)
def test_rows_do_not_depend_on_who_wrote_them(writer: str, tmp_path: Path) -> None:
    WRITERS[writer](tmp_path / "t.parquet")
    read_alike(tmp_path / "t.parquet")


@pytest.mark.conformance
@pytest.mark.parametrize("write", [by_polars, by_duckdb, by_pandas])
def test_rows_of_third_party_engines_are_the_same(write: Callable[[Path], None], tmp_path: Path) -> None:
    write(tmp_path / "t.parquet")
    read_alike(tmp_path / "t.parquet")


def read_alike(path: Path) -> None:
    rows = rows_of(asked(path))
    assert {name: rows.schema.field(name).type for name in TYPES} == TYPES
    assert rows.drop_columns("when").to_pydict() == TABLE.drop_columns("when").to_pydict()
    assert rows["when"].cast(pa.timestamp("us")).to_pylist() == COLUMNS["when"]
    late = rows_of(asked(path, ("n",), where=[["when", ">=", "2020-01-28"], ["city", "==", "a"]]))
    want = [n for n, when, city in zip(*(COLUMNS[c] for c in ("n", "when", "city")), strict=True)
            if when.day == 28 and city == "a"]  # fmt: skip
    assert late["n"].to_pylist() == want


def test_a_fixed_size_list_stays_one(tmp_path: Path) -> None:
    values = pa.array([[1.0, 2.0], None, [None, 4.0]], pa.list_(pa.float32(), 2))
    pq.write_table(pa.table({"v": values}), tmp_path / "t.parquet")
    fill = [{"kind": "clip", "inputs": "v", "output": "c", "high": 2}]
    rows = rows_of(asked(tmp_path, ("v", "c"), transforms=fill))
    assert rows["v"].type == pa.list_(pa.float32(), 2) and rows["v"].to_pylist() == values.to_pylist()
    assert rows["c"].to_pylist() == [[1.0, 2.0], None, [None, 2.0]]


def test_a_table_on_any_file_system() -> None:
    with fsspec.open("memory://lake/t/part.parquet", "wb") as file:
        pq.write_table(TABLE, file)
    try:
        assert rows_of(asked("memory://lake/t", ("n", "ids")))["ids"].to_pylist() == IDS
    finally:
        fsspec.filesystem("memory").rm("/lake", recursive=True)
    assert "nosuch" in refused(asked("nosuch://lake/t"))


class _Kms(pe.KmsClient):
    def __init__(self, _: Any) -> None:
        pe.KmsClient.__init__(self)

    def wrap_key(self, key_bytes: bytes, master_key_identifier: str) -> bytes:
        return base64.b64encode(key_bytes)

    def unwrap_key(self, wrapped_key: bytes, master_key_identifier: str) -> bytes:
        return base64.b64decode(wrapped_key)


def encrypted(path: Path, *, plaintext_footer: bool) -> None:
    factory = pe.CryptoFactory(_Kms)
    how = pe.EncryptionConfiguration(
        footer_key="f",
        column_keys={"c": ["n"]},
        plaintext_footer=plaintext_footer,
        encryption_algorithm="AES_GCM_V1",
    )
    keys = factory.file_encryption_properties(pe.KmsConnectionConfig(), how)
    with pq.ParquetWriter(path, TABLE.schema, encryption_properties=keys) as writer:
        writer.write_table(TABLE)


def test_encryption_is_refused_by_name(tmp_path: Path) -> None:
    encrypted(tmp_path / "whole.parquet", plaintext_footer=False)
    message = refused(asked(tmp_path / "whole.parquet"))
    assert "whole.parquet: its footer is encrypted" in message
    # Arrow ends the process that asks for the place of such a column: it must not come to that
    encrypted(tmp_path / "column.parquet", plaintext_footer=True)
    message = refused(asked(tmp_path / "column.parquet"))
    assert "column.parquet: has columns that are encrypted" in message


def test_what_is_broken_is_refused_by_name(tmp_path: Path) -> None:
    whole = tmp_path / "whole.parquet"
    pq.write_table(TABLE, whole, row_group_size=50, compression="zstd", write_page_checksum=True)
    data = bytearray(whole.read_bytes())
    chunk = pq.read_metadata(whole).row_group(1).column(1)
    at = chunk.data_page_offset + chunk.total_compressed_size // 2
    data[at] ^= 0xFF
    (tmp_path / "corrupt.parquet").write_bytes(data)
    message = refused(asked(tmp_path / "corrupt.parquet"))
    assert "corrupt.parquet: row group 1, column x cannot be decoded (" in message
    assert rows_of(asked(tmp_path / "corrupt.parquet", ("n",))).num_rows == 100
    (tmp_path / "cut.parquet").write_bytes(whole.read_bytes()[:-100])
    assert "cut.parquet: no Parquet file, or a truncated one" in refused(asked(tmp_path / "cut.parquet"))
    (tmp_path / "hole.parquet").write_bytes(whole.read_bytes()[:4] + whole.read_bytes()[1000:])
    assert "hole.parquet: " in refused(asked(tmp_path / "hole.parquet"))
    (tmp_path / "text.parquet").write_text("a,b\n" * 9)
    assert "text.parquet: no Parquet file" in refused(asked(tmp_path / "text.parquet"))
    pq.write_table(TABLE.slice(0, 0), tmp_path / "empty.parquet")
    assert "empty.parquet: has no rows" in refused(asked(tmp_path / "empty.parquet"))
    (tmp_path / "none").mkdir()
    assert "none: has no files" in refused(asked(tmp_path / "none"))
    assert "gone: is not there" in refused(asked(tmp_path / "gone"))
    assert "column idz is not there, did you mean ids?" in refused(asked(whole, ("idz",)))
    assert "where compares column n of int64 by > with 'a'" in refused(asked(whole, where=[["n", ">", "a"]]))
    wrong = [{"kind": "log", "inputs": "city"}]
    assert "log of city: city is of string, accepted are numbers" in refused(asked(whole, transforms=wrong))


def test_files_of_another_schema_are_refused_or_filled(tmp_path: Path) -> None:
    pq.write_table(TABLE, tmp_path / "a.parquet")
    pq.write_table(TABLE.drop_columns("x"), tmp_path / "b.parquet")
    message = refused(asked(tmp_path))
    assert "b.parquet: column x is not there" in message and "a.parquet" in message
    rows = rows_of(asked(tmp_path, drift="fill"))
    assert rows["x"].to_pylist() == COLUMNS["x"] + [None] * 100 and rows["n"].to_pylist() == COLUMNS["n"] * 2
    assert rows_of(asked(tmp_path, ("x",), drift="fill"))["x"].to_pylist() == COLUMNS["x"] + [None] * 100
    pq.write_table(TABLE.set_column(1, "x", TABLE["x"].cast(pa.float32())), tmp_path / "b.parquet")
    message = refused(asked(tmp_path, drift="fill"))
    assert "b.parquet: column x is of float" in message and "a.parquet of double" in message


def test_a_file_that_was_written_anew_is_not_read_as_the_old_one(tmp_path: Path) -> None:
    path = tmp_path / "t.parquet"
    pq.write_table(TABLE, path)
    session = asked(path)
    (split,) = reader.Reader(session).splits()
    pq.write_table(TABLE.slice(0, 10), path)
    with pytest.raises(UserError, match="is another file than when the session began"):
        list(reader.Reader(session).batches(split, 0))
    assert (
        np.sum(
            [
                batch.num_rows
                for split in reader.Reader(session).splits()
                for batch in reader.Reader(session).batches(split, 0)
            ]
        )
        == 10
    )
