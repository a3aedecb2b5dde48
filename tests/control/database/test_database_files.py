"""Files in tables, by fsspec."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import fsspec
import pytest

from windtunnel.control.database import ControlFileSystem, open_control


@pytest.fixture
def files(tmp_path: Path) -> Iterator[ControlFileSystem]:
    url = f"sqlite:///{tmp_path}/control.db"
    open_control(url, create=True, durable=False).engine.dispose()
    files = ControlFileSystem(url)
    yield files
    files.control.engine.dispose()


def test_files_and_folders(files: ControlFileSystem) -> None:
    with files.open("runs/7/notes.txt", "w") as file:
        file.write("one\ntwo\n")
    files.pipe_file("runs/8/data", bytes(range(100)))
    assert files.cat_file("/runs/8/data", 90, -5) == bytes(range(90, 95))
    assert files.ls("runs", detail=False) == ["runs/7", "runs/8"]
    assert files.info("runs/7")["type"] == "directory"
    assert (files.info("runs/7/notes.txt")["size"], files.isdir("runs/7/notes.txt")) == (8, False)
    assert sorted(files.find("")) == ["runs/7/notes.txt", "runs/8/data"]
    with files.open("control://runs/7/notes.txt", "r") as file:
        assert file.readlines() == ["one\n", "two\n"]
    files.mv("runs/8/data", "runs/9")
    assert files.exists("runs/9") and not files.exists("runs/8")
    files.rm("runs", recursive=True)
    assert files.find("") == []
    for missing in (
        lambda: files.cat_file("x"),
        lambda: files.open("x"),
        lambda: files.rm("x"),
        lambda: files.ls("x"),
    ):
        with pytest.raises(FileNotFoundError):
            missing()
    with pytest.raises(NotImplementedError, match="files are read, or written whole"):
        files.open("x", "ab")


def test_a_file_appears_when_it_is_closed(files: ControlFileSystem) -> None:
    file = files.open("large", "wb")
    file.write(b"x" * (6 << 20))
    assert not files.exists("large")
    file.close()
    assert files.info("large")["size"] == 6 << 20
    sizes = files.control.query("SELECT length(data) FROM file_block ORDER BY number")[1]
    assert sizes == [(1 << 20,)] * 6


def test_fsspec_knows_the_protocol(files: ControlFileSystem) -> None:
    if "control" not in fsspec.available_protocols():
        pytest.skip("windtunnel was installed before the protocol was declared: pip install -e . again")
    assert fsspec.get_filesystem_class("control") is ControlFileSystem
