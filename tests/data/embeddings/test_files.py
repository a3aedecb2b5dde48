"""Statistics in a folder: what was written comes back, whole; what is damaged is told in one sentence."""

import json
import resource
from pathlib import Path

import numpy as np
import pytest

from windtunnel.base.errors import HostError, UserError
from windtunnel.data.embeddings import synthetic
from windtunnel.data.embeddings.files import MANIFEST, read_statistics, write_statistics
from windtunnel.data.embeddings.model import EmbeddingTable
from windtunnel.store.objects.manifest import seal


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    folder = tmp_path / "statistics"
    tables = synthetic.tables("small", scale=0.01)
    orders = {table.name: synthetic.order(table.rows, 1) for table in tables}
    write_statistics(folder, tables, orders, {"f000": {"lookups": 12}})
    return folder


def test_statistics_come_back(folder: Path) -> None:
    statistics = read_statistics(folder)
    assert statistics.tables == synthetic.tables("small", scale=0.01)
    assert statistics.facts == {"f000": {"lookups": 12}}
    for table in statistics.tables:
        order = statistics.order(table.name)
        assert isinstance(order, np.memmap)
        assert np.array_equal(order, synthetic.order(table.rows, 1))
    with pytest.raises(UserError, match="no order of a table q, accepted are f000, f001"):
        statistics.order("q")


def test_damage_is_found(folder: Path) -> None:
    path = folder / "orders" / "0000.npy"
    whole = path.read_bytes()
    order = read_statistics(folder).order
    path.write_bytes(whole[:-1] + bytes([whole[-1] ^ 1]))
    with pytest.raises(UserError, match=r"0000.npy: the order of table f000 is damaged: .* checksum"):
        order("f000")
    for cut in (0, 5, len(whole) - 4):
        path.write_bytes(whole[:cut])
        with pytest.raises(UserError, match=r"0000.npy: the order of table f000 is damaged or missing"):
            order("f000")
    np.save(path, np.arange(3, dtype=np.uint32))
    with pytest.raises(
        UserError, match=r"0000.npy: .* is uint32 of shape \(3,\), accepted is uint32 of shape"
    ):
        order("f000")
    path.unlink()
    with pytest.raises(UserError, match="damaged or missing"):
        order("f000")
    manifest = folder / MANIFEST
    text = manifest.read_bytes()
    manifest.write_bytes(text.replace(b'"dim":64', b'"dim":65', 1))
    with pytest.raises(UserError, match="does not match its checksum"):
        read_statistics(folder)
    manifest.write_bytes(seal("embedding statistics", 99, json.loads(text)["value"]))
    with pytest.raises(UserError, match="has version 99; version 1 is read; accepted is a folder that"):
        read_statistics(folder)
    manifest.unlink()
    with pytest.raises(UserError, match="accepted is a folder that 'windtunnel embeddings profile' wrote"):
        read_statistics(folder)


@pytest.mark.parametrize(
    ("wrong", "said"),
    [
        (EmbeddingTable("t", 0, 1), "rows is 0, accepted is a whole number from 1"),
        (EmbeddingTable("t", 2, 1, dtype="int3"), "dtype is 'int3', accepted is float32"),
        (EmbeddingTable("t", 2, 1, coverage=2.0), "coverage is 2.0, accepted is a number from 0 to 1"),
        (EmbeddingTable("t", 2, 1, ranks=(0, 1), shares=(0, 1)), "whole numbers that rise from 0 to rows, 2"),
        (EmbeddingTable("t", 2, 1, ranks=(0, 1, 2), shares=(0, 0.4, 1)), "a concave curve from 0 to 1"),
    ],
)
def test_tables_that_cannot_be_are_refused(tmp_path: Path, wrong: EmbeddingTable, said: str) -> None:
    with pytest.raises(UserError, match=said):
        write_statistics(tmp_path / "new", (wrong,), {})
    assert not list(tmp_path.iterdir())


def test_no_half_folder(tmp_path: Path, folder: Path) -> None:
    def stopped(path: Path) -> None:
        path.write_bytes(b"half")
        raise KeyboardInterrupt

    before = set(tmp_path.iterdir())
    with pytest.raises(KeyboardInterrupt):
        write_statistics(tmp_path / "new", (EmbeddingTable("t", 2, 1),), {"t": stopped})
    with pytest.raises(UserError, match="is there already, accepted is the name of a new folder"):
        write_statistics(folder, (EmbeddingTable("t", 2, 1),), {})
    with pytest.raises(UserError, match=r"cannot be made \(Not a directory\), accepted is a new folder"):
        write_statistics(folder / MANIFEST / "below", (EmbeddingTable("t", 2, 1),), {})
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (4096, limits[1]))  # as a disk that fills: what is written ends
    try:
        with pytest.raises(HostError, match=r"new cannot be written: "):
            write_statistics(
                tmp_path / "new", (EmbeddingTable("t", 5000, 1),), {"t": synthetic.order(5000, 1)}
            )
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert set(tmp_path.iterdir()) == before
