"""Profiles of logs: held against counting in plain Python, over what several writers write and break."""

import json
import math
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.feather as feather
import pyarrow.parquet as pq
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from typer.testing import CliRunner

from windtunnel.base.errors import UserError
from windtunnel.cli.main import app
from windtunnel.data.embeddings import logs, profile, synthetic
from windtunnel.data.embeddings.files import read_statistics
from windtunnel.data.embeddings.model import EmbeddingTable, checked
from windtunnel.data.embeddings.profile import mixed

Bags = list[list[int | None] | None]
RNG = np.random.default_rng(5)
BAGS: Bags = [
    None if draw < 0.2 else [int(row) for row in RNG.zipf(1.3, int(RNG.integers(0, 6))) % 97]
    for draw in RNG.random(400)
]
SINGLES = [None if draw < 0.1 else int(draw * 50) for draw in RNG.random(400)]
DENSE = RNG.random(400).tolist()


def held(profiles: profile.TableProfiles, name: str, bags: Bags) -> None:
    """The profile says of a feature what counting its bags one by one says."""
    table = next(candidate for candidate in profiles.tables if candidate.name == name)
    facts = profiles.facts[name]
    kept = [[row for row in bag or () if row is not None] for bag in bags]
    lengths = sorted(len(bag) for bag in kept if bag)
    truth = Counter(row for bag in kept for row in bag)
    checked(profiles.tables, "here")
    assert facts.samples == len(bags)
    assert facts.lookups == sum(lengths)
    assert table.coverage == len(lengths) / len(bags)
    assert table.pooling == (sum(lengths) / len(lengths) if lengths else 0)
    assert facts.rows_used == len(truth)
    assert facts.null_ids == sum(row is None for bag in bags for row in bag or ())
    if lengths:
        quantiles = [lengths[max(0, math.ceil(share * len(lengths)) - 1)] for share in profile.QUANTILES]
        assert facts.lengths == tuple(quantiles)
    counts = sorted(truth.values(), reverse=True)
    for many in (1, 5, len(counts)) if counts else ():
        assert table.share(many) == pytest.approx(
            sum(counts[:many]) / max(1, sum(counts)), abs=facts.curve_error + 1e-9
        )
    at = profiles.counts[name].of(np.arange(table.rows))
    assert at.tolist() == [truth[row] for row in range(table.rows)]


def ones(values: list[int | None]) -> Bags:
    return [None if value is None else [value] for value in values]


def arrow() -> pa.Table:
    bags, singles = pa.array(BAGS, pa.list_(pa.int64())), pa.array(SINGLES, pa.int32())
    return pa.table({"f": bags, "one": singles, "dense": DENSE})


def spark(path: Path) -> None:
    """As Spark writes: a folder with a marker, version 1 pages and gzip, lists named as it names them."""
    path.mkdir()
    (path / "_SUCCESS").touch()
    (path / ".part-0.crc").write_bytes(b"x")
    for part, first in enumerate(range(0, 400, 150)):
        pq.write_table(
            arrow().slice(first, 150), path / f"part-{part:05}.gz.parquet", row_group_size=64,
            compression="gzip", version="1.0", data_page_version="1.0", store_schema=False,
            use_compliant_nested_type=False,
        )  # fmt: skip


WRITERS: dict[str, Callable[[Path], Any]] = {
    "pages v2": lambda path: pq.write_table(
        arrow(), path, row_group_size=90, data_page_version="2.0", data_page_size=256,
        write_page_index=True, write_page_checksum=True, compression="zstd",
    ),
    "no dictionaries": lambda path: pq.write_table(
        arrow(), path, use_dictionary=False, compression=None,
        column_encoding={"f.list.element": "DELTA_BINARY_PACKED", "one": "BYTE_STREAM_SPLIT"},
    ),
    "feather": lambda path: feather.write_feather(arrow(), str(path), chunksize=33, compression="zstd"),
    "spark": spark,
}  # fmt: skip


def polars(path: Path) -> None:
    pl = pytest.importorskip("polars", reason="needs the strangers extra")
    pl.DataFrame({"f": BAGS, "one": SINGLES, "dense": DENSE}).write_parquet(path, row_group_size=70)


def polars_ipc(path: Path) -> None:
    pl = pytest.importorskip("polars", reason="needs the strangers extra")
    pl.DataFrame({"f": BAGS, "one": SINGLES, "dense": DENSE}).write_ipc(path, compression="lz4")


def pandas(path: Path) -> None:
    pd = pytest.importorskip("pandas", reason="needs the strangers extra")
    pd.DataFrame({"f": BAGS, "one": pd.array(SINGLES, "Int16"), "dense": DENSE}).to_parquet(path)


def duckdb(path: Path) -> None:
    connection = pytest.importorskip("duckdb", reason="needs the strangers extra").connect()
    connection.register("given", arrow()).execute(
        f"COPY given TO '{path}' (FORMAT parquet, ROW_GROUP_SIZE 128, PARQUET_VERSION v2)"
    )


@pytest.mark.conformance
@pytest.mark.parametrize("write", [polars, polars_ipc, pandas, duckdb])
def test_logs_of_third_party_engines_are_read_alike(tmp_path: Path, write: Callable[[Path], None]) -> None:
    write(tmp_path / "log")
    read_alike(tmp_path / "log")


@pytest.mark.parametrize("writer", WRITERS)
def test_logs_of_every_layout_are_read_alike(tmp_path: Path, writer: str) -> None:
    WRITERS[writer](tmp_path / "log")
    read_alike(tmp_path / "log")


def read_alike(path: Path) -> None:
    profiles = profile.profile([str(path)])
    assert [table.name for table in profiles.tables] == ["f", "one"]
    held(profiles, "f", BAGS)
    held(profiles, "one", ones(SINGLES))


def test_lists_of_every_kind(tmp_path: Path) -> None:
    bags: Bags = [[1, None, 2], None, [], [3], [None], [2, 2]]
    pairs: Bags = [[1, 2], None, [3, None], [0, 0], [5, 1], [1, 1]]
    deep = [[[1], [2, 2]], None, [], [[], None, [7]], [[None, 3]], [[0]]]
    plain = pa.array(bags, pa.list_(pa.int64()))
    coded = plain.values.dictionary_encode(null_encoding="encode")  # the null is a word of the dictionary
    columns = {
        "coded": pa.ListArray.from_arrays(plain.offsets, coded, mask=plain.is_null()),
        "large": pa.array(bags, pa.large_list(pa.uint16())),
        "view": pa.array(bags, pa.list_view(pa.int8())),
        "fixed": pa.array(pairs, pa.list_(pa.int32(), 2)),
        "words": pa.array(bags, pa.list_(pa.dictionary(pa.int8(), pa.uint64()))),
        "deep": pa.array(deep, pa.list_(pa.large_list(pa.int64()))),
        "text": pa.array(["a"] * 6),
    }
    whole = pa.table(columns)
    path = tmp_path / "log.arrows"
    with pa.ipc.new_stream(path, whole.schema) as stream:
        for batch in pa.concat_tables([whole, whole]).slice(1, 10).to_batches(max_chunksize=4):
            stream.write_batch(batch)
    profiles = profile.profile([str(path)])
    assert [table.name for table in profiles.tables] == ["coded", "large", "view", "fixed", "words", "deep"]
    flat: Bags = [[1, 2, 2], None, [], [7], [None, 3], [0]]
    for name in columns:
        if name != "text":
            held(profiles, name, ({"fixed": pairs, "deep": flat}.get(name, bags) * 2)[1:11])


BAG = st.none() | st.lists(st.none() | st.integers(0, 30), max_size=5)


@given(st.lists(BAG, min_size=1, max_size=30), st.integers(1, 9))
@settings(max_examples=25, deadline=None)
def test_any_bags_are_counted_exactly(bags: Bags, group: int) -> None:
    sink = pa.BufferOutputStream()
    pq.write_table(pa.table({"f": pa.array(bags, pa.list_(pa.int64()))}), sink, row_group_size=group)
    name = "memory://windtunnel-profile.parquet"
    import fsspec

    with fsspec.open(name, "wb") as file:
        file.write(sink.getvalue().to_pybytes())
    held(profile.profile([name], rows={"f": 40}, window=4), "f", bags)


def test_numpy_archives(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(logs, "BATCH", 7)
    bags = [bag or [] for bag in BAGS[:100]]
    flat = np.array([row for bag in bags for row in bag], np.uint32)
    offsets = np.concatenate(([0], np.cumsum([len(bag) for bag in bags])))
    path = tmp_path / "log.npz"
    two = np.arange(200, dtype=np.int16).reshape(100, 2)
    for save in (np.savez, np.savez_compressed):
        save(path, **{"f.ids": flat, "f.offsets": offsets, "two.ids": two})
        profiles = profile.profile([str(path)])
        held(profiles, "f", list(bags))
        held(profiles, "two", two.tolist())
    for ids, starts, said in (
        (flat[:-1], offsets, "offsets do not rise from 0 to the"),
        (flat, offsets[::-1], "offsets do not rise"),
        (flat.astype(float), offsets, r"array f\.ids is float64 of shape"),
    ):
        np.savez(path, **{"f.ids": ids, "f.offsets": starts})
        with pytest.raises(UserError, match=rf"log\.npz: column f: is damaged or cannot be read \({said}"):
            profile.profile([str(path)])
    np.savez(path, **{"f.ids": flat, "f.offsets": offsets, "g.ids": flat[:7]})
    with pytest.raises(
        UserError, match=r"has features of so many samples \{'f': 100, 'g': 7\}, accepted are"
    ):
        profile.profile([str(path)])


def test_drift_is_what_days_were_made_with(tmp_path: Path) -> None:
    ranks, shares = synthetic.zipf(2000, 1.0)
    table = EmbeddingTable("f", 2000, 8, pooling=3.0, ranks=ranks, shares=shares)
    for day in range(4):
        order = synthetic.order(2000, 1, day=day, drift=0.25)
        offsets, ids = synthetic.draw(table, 9000, np.random.default_rng(day), order)
        np.savez(tmp_path / f"{day}.npz", **{"f.ids": ids, "f.offsets": offsets})
    profiles = profile.profile([str(tmp_path / "*.npz")])
    facts = profiles.facts["f"]
    assert (facts.hot_rows, facts.drift_stride, len(facts.windows)) == (20, 1, 4)
    assert (facts.windows[0].kept_share, facts.windows[0].overlap) == (None, None)
    days = [np.load(tmp_path / f"{day}.npz")["f.ids"] for day in range(4)]
    for window, day, before in zip(facts.windows[1:], days[1:], days, strict=False):
        counts, earlier = (np.bincount(ids, minlength=2000) for ids in (day, before))
        hot, was = (np.lexsort((np.arange(2000), -tally))[:20] for tally in (counts, earlier))
        assert window.lookups == len(day)
        assert window.hot_share == pytest.approx(counts[hot].sum() / len(day))
        assert window.kept_share == pytest.approx(counts[was].sum() / len(day))
        assert window.overlap == len(set(hot) & set(was)) / 20
    whole = np.bincount(np.concatenate(days), minlength=2000)
    assert profiles.counts["f"].of(np.arange(2000)).tolist() == whole.tolist()


def test_names_of_files_may_look_like_globs(tmp_path: Path) -> None:
    for name in ("day[1].parquet", "day1.parquet"):
        pq.write_table(pa.table({"item": pa.array([len(name)])}), tmp_path / name)
    assert logs.files([str(tmp_path / "day[1].parquet")]) == [str(tmp_path / "day[1].parquet")]
    assert logs.files([str(tmp_path / "day[12].parquet")]) == [str(tmp_path / "day1.parquet")]


def test_a_feature_that_begins_after_the_first_window(tmp_path: Path) -> None:
    for day, ids in enumerate(([None, None], [3, 4])):
        columns = {"late": pa.array(ids, pa.int64()), "item": pa.array([1, 2])}
        pq.write_table(pa.table(columns), tmp_path / f"{day}.parquet")
    profiles = profile.profile([str(tmp_path)])
    assert [window.lookups for window in profiles.facts["late"].windows] == [0, 2]
    held(profiles, "late", [None, None, [3], [4]])
    with pytest.raises(UserError, match=r"`rows` item=1000000000000000 is not accepted: they take more mem"):
        profile.profile([str(tmp_path)], rows={"item": 10**15})


def test_windows_of_a_huge_table_look_at_some_rows(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(profile, "FULL", 300)
    for day in range(2):
        np.savez(tmp_path / f"{day}.npz", **{"f.ids": np.repeat(np.arange(1000), np.arange(1000) % 7)})
    profiles = profile.profile([str(tmp_path)], rows={"f": 1000})
    facts = profiles.facts["f"]
    assert (facts.drift_stride, facts.hot_rows) == (4, 2)
    assert facts.windows[1].overlap == 1
    assert facts.windows[1].lookups == (np.arange(0, 1000, 4) % 7).sum()
    assert profiles.counts["f"].of(np.array([6, 7, 999])).tolist() == [12, 0, 10]


def test_hashed_ids_and_the_rows_that_a_hash_leaves_unused(tmp_path: Path) -> None:
    values = np.random.default_rng(2).integers(-(2**63), 2**63, 20_000)
    np.savez(tmp_path / "log.npz", **{"f.ids": np.concatenate((values, values))})
    log = str(tmp_path / "log.npz")
    profiles = profile.profile([log], rows={"*": 20_000}, hashes={"f": "splitmix64"})
    facts = profiles.facts["f"]
    assert facts.rows_used / 20_000 == pytest.approx(1 - math.exp(-1), abs=0.01)
    assert facts.values is not None
    assert facts.values_error is not None
    assert abs(facts.values - 20_000) < 4 * facts.values_error < 1000
    assert mixed(np.array([0, 1]), 2**62, "splitmix64").tolist() == [
        0xE220A8397B1DCDAF % 2**62, 0x910A2DEC89025CC1 % 2**62,
    ]  # fmt: skip
    assert mixed(np.array([-1, 7], np.int64), 10, "modulo").tolist() == [(2**64 - 1) % 10, 7]
    with pytest.raises(UserError, match=r"column f: id -\d+ is out of range, accepted are 0 to 4294967295"):
        profile.profile([log])
    with pytest.raises(UserError, match=r"`hashes` f=md5 is unknown, accepted are splitmix64, modulo"):
        profile.profile([log], rows={"f": 9}, hashes={"f": "md5"})
    with pytest.raises(UserError, match=r"`hashes` f=modulo needs the rows to hash into, `rows` f=N"):
        profile.profile([log], hashes={"f": "modulo"})


def test_damage_and_what_is_missing_is_told_in_a_sentence(tmp_path: Path) -> None:
    good, path = tmp_path / "good.parquet", tmp_path / "bad.parquet"
    plain = {"use_dictionary": False, "compression": None}
    pq.write_table(arrow(), good, row_group_size=100, write_page_checksum=True, **plain)
    whole = bytearray(good.read_bytes())
    place = pq.ParquetFile(good).metadata.row_group(2).column(0).data_page_offset
    whole[place + 100] ^= 1
    path.write_bytes(whole)
    with pytest.raises(UserError, match=r"bad\.parquet: row group 2, column f: is damaged or cannot be read"):
        profile.profile([str(path)])
    for cut in (3, 100, len(whole) - 3):
        path.write_bytes(whole[:cut])
        with pytest.raises(UserError, match=r"bad\.parquet: (is damaged or cannot be read|begins with)"):
            profile.profile([str(path)])
    pq.write_table(pa.table({"g": [1]}), path)
    with pytest.raises(UserError, match=r"bad\.parquet: has no feature f, accepted are g; a feature is"):
        profile.profile([str(good), str(path)], features=["f"])
    with pytest.raises(
        UserError, match=r"good\.parquet: has no feature dense, accepted are f, one; a feature"
    ):
        profile.profile([str(good)], features=["dense"])
    with pytest.raises(UserError, match="of is no feature that is read, did you mean f"):
        profile.profile([str(good)], rows={"of": 3})
    with pytest.raises(UserError, match=r"group 0, column f: id \d+ is out of range, accepted are 0 to 1"):
        profile.profile([str(good)], rows={"f": 2})
    pq.write_table(pa.table({"dense": [1.0]}), path)
    with pytest.raises(UserError, match=r"bad\.parquet: has no feature, accepted are columns"):
        profile.profile([str(path)])
    pq.write_table(arrow().slice(0, 0), path)
    with pytest.raises(UserError, match=r"bad\.parquet: has no samples, accepted are"):
        profile.profile([str(path)])
    with pytest.raises(UserError, match=r"nothing/\*: there is no such log, accepted are files, folders"):
        profile.profile([f"{tmp_path}/nothing/*"])
    with pytest.raises(UserError, match=r"quux://x: cannot be reached"):
        profile.profile(["quux://x"])
    twice = pa.RecordBatch.from_arrays([pa.array([1]), pa.array([2])], names=["f", "f"])
    with pa.ipc.new_file(path, twice.schema) as file:
        file.write_batch(twice)
    with pytest.raises(UserError, match=r"there are several columns f"):
        profile.profile([str(path)])


def test_encrypted_parquet_is_refused_by_name(tmp_path: Path) -> None:
    from pyarrow.parquet import encryption

    class Keys(encryption.KmsClient):  # type: ignore[misc]
        def wrap_key(self, key: bytes, master: str) -> bytes:
            return key

        def unwrap_key(self, wrapped: bytes, master: str) -> bytes:
            return wrapped

    factory = encryption.CryptoFactory(lambda _: Keys())
    for number, plain in enumerate((True, False)):
        settings = encryption.EncryptionConfiguration(
            footer_key="k", column_keys={"c": ["one"]}, plaintext_footer=plain, double_wrapping=False
        )
        path = tmp_path / f"{number}.parquet"
        properties = factory.file_encryption_properties(encryption.KmsConnectionConfig(), settings)
        with pq.ParquetWriter(path, arrow().schema, encryption_properties=properties) as writer:
            writer.write_table(arrow())
        with pytest.raises(UserError, match=rf"{number}\.parquet.* is encrypted, accepted is"):
            profile.profile([str(path)])


def interrupted(*_: object) -> None:
    raise KeyboardInterrupt


def test_the_verb(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pq.write_table(arrow(), tmp_path / "log.parquet")
    log, out = str(tmp_path / "log.parquet"), tmp_path / "out"
    form = ["--dim", "f=16", "--dim", "8", "--rows", "one=60", "--sequence", "f", "--dtype", "float16"]
    call = ["embeddings", "profile", log, "--out", str(out), *form]
    with monkeypatch.context() as broken:
        broken.setattr(np.lib.format, "write_array_header_1_0", interrupted)
        assert CliRunner().invoke(app, call).exit_code != 0
    assert [path.name for path in tmp_path.iterdir()] == ["log.parquet"]
    reply = CliRunner().invoke(app, [*call, "--json"])
    assert reply.exit_code == 0, reply.output
    first = json.loads(reply.stdout)["tables"][0]
    lookups = sum(len(bag or ()) for bag in BAGS)
    assert (first["name"], first["samples"], first["lookups"]) == ("f", 400, lookups)
    statistics = read_statistics(out)
    assert [(table.name, table.dim, table.dtype, table.sequence) for table in statistics.tables] == [
        ("f", 16, "float16", True), ("one", 8, "float16", False),
    ]  # fmt: skip
    assert statistics.tables[1].rows == 60
    assert statistics.facts["f"]["lookups"] == first["lookups"]
    truth = Counter(row for bag in BAGS for row in bag or ())
    order = sorted(range(statistics.tables[0].rows), key=lambda row: (-truth[row], row))
    assert statistics.order("f").tolist() == order
    again = CliRunner().invoke(app, call)
    assert isinstance(again.exception, UserError)
    assert "is there already" in str(again.exception)
    shown = CliRunner().invoke(app, [*call[:4], str(tmp_path / "second"), "--feature", "f"])
    assert shown.exit_code == 0, shown.output
    assert "statistics of 1 tables" in shown.stdout
