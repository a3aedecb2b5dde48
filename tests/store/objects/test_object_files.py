"""Files by name, in a folder and at a URL: whole or not at all, whatever fails at whichever call."""

from __future__ import annotations

import errno
import os
import re
import uuid
from pathlib import Path

import fsspec
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from support.disk import Crash, Disk, Killed
from windtunnel.base.errors import UserError
from windtunnel.store.objects import LocalFiles, ObjectError, object_errors, open_files


@pytest.fixture(params=["folder", "file", "memory"])
def url(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    if request.param == "memory":
        return f"memory://{uuid.uuid4().hex}/place"
    return f"file://{tmp_path}/place" if request.param == "file" else str(tmp_path / "place")


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], max_examples=40, deadline=None)
@given(st.binary(max_size=300), st.integers(0, 320), st.one_of(st.none(), st.integers(0, 320)))
def test_what_is_written_is_read(url: str, data: bytes, at: int, length: int | None) -> None:
    files = open_files(url)
    files.write("a/b", data)
    assert open_files(url).read("a/b") == data
    assert files.read("a/b", at, length) == data[at:][:length]
    assert files.size("a/b") == len(data)


def test_files_are_listed_moved_and_removed(url: str, tmp_path: Path) -> None:
    files = open_files(url)
    assert files.names("") == files.names("a") == []
    assert files.size("a") is None
    (tmp_path / "source").write_bytes(b"x" * 100)
    files.upload("a/up", tmp_path / "source")
    files.write("a/b/c", memoryview(b"deep"))
    files.write("a/up", b"again")
    files.rely("a/up")
    files.settle()
    assert files.names("a") == ["b", "up"]
    assert files.size("a/b") is None
    files.write("z/y/up", b"again")
    assert files.read("z/y/up") == b"again"
    files.remove("a/up")
    with pytest.raises(FileNotFoundError, match=r"a/up"):
        files.read("a/up")
    files.remove("a/b")
    files.remove("a/b")
    assert files.names("a/b") == []
    files.remove_empty("z")
    assert files.names("z/y") == ["up"]


def test_an_empty_folder_is_left(tmp_path: Path) -> None:
    files = LocalFiles(str(tmp_path))
    files.write("a/b/c", b"x")
    files.remove("a/b")
    files.remove("a/b")
    assert files.names("a") == []
    assert files.size("a") is None


def test_unfinished_writes_are_not_seen_and_tidied_when_old(tmp_path: Path) -> None:
    files = LocalFiles(str(tmp_path))
    files.write("a/whole", b"x")
    for name in ("old", "new"):
        (tmp_path / "a" / f".part-{name}").write_bytes(b"half")
    os.utime(tmp_path / "a" / ".part-old", (1, 1))
    assert files.names("a") == ["whole"]
    files.tidy("a", 1000)
    assert sorted(path.name for path in (tmp_path / "a").iterdir()) == [".part-new", "whole"]


@pytest.mark.parametrize("crash", ["kill", "power", "names"])
def test_killed_at_any_call_the_file_is_the_old_one_or_the_new_one(crash: Crash) -> None:
    contents = set()
    for number in range(1, 100):
        disk = Disk()
        files = LocalFiles("/store", disk)
        files.write("a/b/file", b"old and long")
        files.settle()
        first = disk.calls

        def before(call: str, count: int, at: int = first + number) -> None:
            if count == at:
                raise Killed

        disk.before = before
        settled = False
        try:
            files.write("a/b/file", b"new")
            files.settle()
            settled = True
        except Killed:
            pass
        after = LocalFiles("/store", disk.after(crash))
        contents.add(after.read("a/b/file"))
        assert after.names("a/b") == ["file"]
        if settled:
            assert after.read("a/b/file") == b"new"
            break
    assert contents == {b"old and long", b"new"}


@pytest.mark.parametrize("call", ["open", "write", "fsync", "close", "replace"])
def test_a_call_that_fails_leaves_the_old_file_and_names_it(call: str) -> None:
    disk = Disk()
    files = LocalFiles("/store", disk)
    files.write("a/file", b"old")

    def before(operation: str, count: int) -> None:
        if operation == call:
            raise OSError(errno.ENOSPC, "injected")

    disk.before = before
    with pytest.raises(ObjectError, match="what was stored before is unharmed"), object_errors("it"):
        files.write("a/file", b"new")
    if call in ("write", "fsync", "close"):
        with pytest.raises(OSError, match="/store/a/file"):
            files.write("a/file", b"new")
    disk.before = lambda operation, count: None
    assert files.read("a/file") == b"old"
    assert files.names("a") == ["file"]
    assert disk.listdir("/store/a") == ["file"]


def test_a_store_that_fails_is_told_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    url = f"memory://{uuid.uuid4().hex}"
    files = open_files(url)
    files.write("a", b"x")

    def failing(self: object, *arguments: object, **named: object) -> None:
        raise RuntimeError("an error of its own")

    for name in ("pipe_file", "cat_file", "info", "ls", "rm", "put_file"):
        monkeypatch.setattr(fsspec.get_filesystem_class("memory"), name, failing)
    for act in (
        lambda: files.write("a", b"y"),
        lambda: files.upload("a", Path(__file__)),
        lambda: files.read("a"),
        lambda: files.read("a", 1, 2),
        lambda: files.size("a"),
        lambda: files.names("a"),
        lambda: files.remove("a"),
    ):
        with pytest.raises(OSError, match=re.escape(f"{url}/a") + "|an error of its own"):
            act()


def test_places_that_cannot_be(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(UserError, match=r"nosuch://x cannot be used: .*nosuch"):
        open_files("nosuch://x")
    (tmp_path / "file").write_bytes(b"")
    with pytest.raises(NotADirectoryError, match="file/a"):
        open_files(str(tmp_path / "file")).write("a/b", b"x")
    files = open_files(str(tmp_path / "new"))
    assert open_files(files) is files
