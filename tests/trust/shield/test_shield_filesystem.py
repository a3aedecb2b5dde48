"""Storage behind a shield, in the hands of an attacker."""

from __future__ import annotations

import errno
import shutil
import sqlite3
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import fsspec
import pytest

from support.trust import nonces
from windtunnel.base.errors import UserError
from windtunnel.store.objects.files import LocalFiles, RemoteFiles
from windtunnel.trust.shield import ShieldFileSystem
from windtunnel.trust.shield.live.filesystem import CHUNK, VARIABLE

SECRET = b"planted: what nobody may see"


def opened(folder: Path, **options: Any) -> ShieldFileSystem:
    options = {"state": str(folder / "state"), "skip_instance_cache": True, **options}
    return ShieldFileSystem(str(folder / "storage"), **options)


def blobs(folder: Path) -> list[Path]:
    return sorted(path for path in (folder / "storage").rglob("*") if path.is_file())


@pytest.fixture(params=["file", "memory"])
def files(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[RemoteFiles]:
    """As checkpoints use it, on either kind of storage."""
    system = opened(tmp_path, target_protocol=request.param)
    yield RemoteFiles(system, "", "shield::test")
    fsspec.filesystem("memory").store.clear()


def test_it_is_a_place_for_checkpoints(files: RemoteFiles) -> None:
    large = bytes(range(256)) * 700  # more than two chunks
    files.write("steps/1/a", b"one")
    files.write("steps/1/b", large)
    files.write("top", b"")
    assert files.names("") == ["steps", "top"]
    assert files.names("steps") == ["1"]
    assert files.names("steps/1") == ["a", "b"]
    assert files.names("step") == files.names("missing") == []
    sizes = [files.size(name) for name in ("steps/1/b", "top", "steps", "missing")]
    assert sizes == [len(large), 0, None, None]
    assert files.read("steps/1/b") == large
    for at, length in (
        (0, 1),
        (CHUNK - 1, 2),
        (CHUNK, CHUNK),
        (3, None),
        (len(large) - 1, 9),
        (len(large), 4),
    ):
        end = None if length is None else at + length
        assert files.read("steps/1/b", at, length) == large[at:end]
    files.write("steps/1/a", b"two")
    assert files.read("steps/1/a") == b"two"
    files.create("once", b"1")
    with pytest.raises(FileExistsError):
        files.create("once", b"2")
    assert files.read("once") == b"1"
    files.remove("steps")
    files.remove("steps")
    assert files.names("") == ["once", "top"]
    with pytest.raises(FileNotFoundError):
        files.read("steps/1/b")


def test_others_open_urls(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(VARIABLE, str(tmp_path / "state"))
    if "shield" not in fsspec.available_protocols():
        fsspec.register_implementation("shield", ShieldFileSystem)
    url = f"shield://rows/t.bin::file://{tmp_path}/storage"
    with fsspec.open(url, "wb") as file:
        file.write(b"x" * 10)
        file.write(SECRET * 9000)
    with fsspec.open(url, "rb") as file:
        file.seek(8)
        assert file.read(2 + len(SECRET)) == b"xx" + SECRET
    system, root = fsspec.core.url_to_fs(f"shield::file://{tmp_path}/storage")
    assert system.find(root) == ["/rows/t.bin"]
    assert system.isdir("/rows") and not system.isdir("/row")


def test_storage_has_no_plain_text_and_no_names(tmp_path: Path) -> None:
    system = opened(tmp_path)
    system.pipe_file("secret-name/of-file", SECRET * 10_000)
    for path in blobs(tmp_path):
        assert SECRET not in path.read_bytes()
        assert "secret" not in str(path.relative_to(tmp_path)) and "of-file" not in str(path)
    assert SECRET not in (tmp_path / "state").read_bytes()
    assert (tmp_path / "state").stat().st_mode & 0o777 == 0o600


def test_what_storage_changes_swaps_loses_or_brings_back_is_an_error(tmp_path: Path) -> None:
    system = opened(tmp_path)

    def refused() -> None:
        with pytest.raises(OSError, match="not what was written last") as caught:
            opened(tmp_path).cat_file("a")
        assert caught.value.errno == errno.EIO

    system.pipe_file("a", b"old" * CHUNK)
    (first,) = blobs(tmp_path)
    old = first.read_bytes()
    system.pipe_file("a", b"new" * CHUNK)
    assert not first.exists()
    (blob,) = blobs(tmp_path)
    whole, size = blob.read_bytes(), CHUNK + 16
    first.write_bytes(old)
    assert system.cat_file("a") == b"new" * CHUNK
    swapped = whole[size : 2 * size] + whole[:size] + whole[2 * size :]
    flipped = whole[:100] + bytes([whole[100] ^ 1]) + whole[101:]
    for wrong in (old, swapped, flipped, whole[:-1], whole[:-size], whole[:size], b"", whole[:-1] + b"\0"):
        blob.write_bytes(wrong)
        refused()
    blob.write_bytes(whole + b"more")  # nobody reads it
    assert system.cat_file("a") == b"new" * CHUNK
    blob.unlink()
    refused()
    assert system.exists("a")  # lost, not never there
    system.pipe_file("b", b"other")
    (other,) = [path for path in blobs(tmp_path) if path != first]
    shutil.copy(other, blob)
    refused()


def test_a_whole_storage_that_is_brought_back_is_found_out_over_restarts(tmp_path: Path) -> None:
    system = opened(tmp_path)
    system.pipe_file("step", b"1")
    shutil.copytree(tmp_path / "storage", tmp_path / "older")
    system.pipe_file("step", b"2")
    system.rm("step")
    system.pipe_file("step", b"3")
    shutil.rmtree(tmp_path / "storage")
    shutil.copytree(tmp_path / "older", tmp_path / "storage")
    with pytest.raises(OSError, match="not what was written last"):
        opened(tmp_path).cat_file("step")


@pytest.mark.parametrize("point", ["write", "settle"])
def test_a_write_that_is_cut_off_leaves_the_older_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, point: str
) -> None:
    system = opened(tmp_path)
    system.pipe_file("a", b"old")

    def cut(*_: Any) -> None:
        raise OSError(errno.ENOSPC, "full")

    with monkeypatch.context() as patch:
        patch.setattr(LocalFiles, point, cut)
        with pytest.raises(OSError, match="full"):
            system.pipe_file("a", b"new")
    assert opened(tmp_path).cat_file("a") == b"old"
    system.pipe_file("a", b"newer")
    assert opened(tmp_path).cat_file("a") == b"newer"


def test_many_write_and_read_at_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    used = nonces(monkeypatch)
    opened(tmp_path).pipe_file("same", b"start")
    created, wrong = list[int](), list[Exception]()

    def work(number: int) -> None:
        try:
            system = opened(tmp_path)
            for _ in range(8):
                system.pipe_file("same", b"%d" % number)
                assert system.cat_file("same") in {b"start", *(b"%d" % other for other in range(4))}
                try:
                    system.pipe_file("first", b"%d" % number, mode="create")
                    created.append(number)
                except FileExistsError:
                    pass
        except Exception as error:
            wrong.append(error)

    threads = [threading.Thread(target=work, args=(number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert not wrong
    assert len(created) == 1
    assert opened(tmp_path).cat_file("first") == b"%d" % created[0]
    assert len(set(used)) == len(used) >= 4 * 16
    assert len(blobs(tmp_path)) == 2


def test_a_state_is_of_several_folders_and_one_key(tmp_path: Path) -> None:
    local, other = opened(tmp_path), opened(tmp_path, target_protocol="memory")
    local.pipe_file("a", b"1")
    assert not other.exists("a")


def test_without_a_state_it_says_what_is_missing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(VARIABLE, raising=False)
    for state in ("", str(tmp_path), str(tmp_path / "none" / "state")):
        with pytest.raises(UserError, match=f"accepted is a file, by {VARIABLE}"):
            opened(tmp_path, state=state)
    (tmp_path / "text").write_text("no database" * 100)
    with pytest.raises(UserError, match="not a database"):
        opened(tmp_path, state=str(tmp_path / "text"))
    with sqlite3.connect(tmp_path / "text.db") as base:
        base.execute("CREATE TABLE state (other)")
    with pytest.raises(UserError, match="cannot be used"):
        opened(tmp_path, state=str(tmp_path / "text.db"))


def test_a_folder_is_not_read_and_a_missing_file_is_not_found(tmp_path: Path) -> None:
    system = opened(tmp_path)
    system.pipe_file("folder/a", b"1")
    with pytest.raises(IsADirectoryError):
        system.cat_file("folder")
    with pytest.raises(FileNotFoundError):
        system.cat_file("fold")


def test_a_removed_file_that_storage_keeps_is_gone(tmp_path: Path) -> None:
    system = opened(tmp_path)
    system.pipe_file("a", b"1")
    (blob,) = blobs(tmp_path)
    kept = blob.read_bytes()
    system.rm("a")
    blob.write_bytes(kept)
    assert not opened(tmp_path).exists("a")
    system.rm("a")  # as object stores take it
    with pytest.raises(FileNotFoundError):
        system.cat_file("a")
