"""What lies in a sandbox is hostile: no path in it leads the host out of it, blocks it, or fills it."""

from __future__ import annotations

import io
import os
import stat
from collections.abc import Iterator
from pathlib import Path

import pytest

from windtunnel.agents.sandbox.machine import list_folder, put_file, read_file
from windtunnel.agents.sandbox.machine.channel import ChannelFolder
from windtunnel.base.errors import UserError


@pytest.fixture
def root(tmp_path: Path) -> Iterator[int]:
    (tmp_path / "root" / "tmp").mkdir(parents=True)
    (tmp_path / "secret").write_text("of the host")
    descriptor = os.open(tmp_path / "root", os.O_RDONLY | os.O_DIRECTORY)
    yield descriptor
    os.close(descriptor)


def read(root: int, path: str, limit: int | None = None) -> bytes:
    out = io.BytesIO()
    read_file(root, path, out, limit)
    return out.getvalue()


def test_put_get_and_list(root: int, tmp_path: Path) -> None:
    put_file(root, "/a/b/file", b"one", 0o640)
    put_file(root, "/a/b/file", io.BytesIO(b"two"), 0o600)
    os.symlink("file", tmp_path / "root/a/b/link")
    os.mkdir(tmp_path / "root/a/b/folder")
    assert read(root, "/a/b/link") == b"two"
    entries = {entry.name: (entry.kind, entry.target) for entry in list_folder(root, "/a/b")}
    assert entries == {"file": ("file", ""), "folder": ("folder", ""), "link": ("link", "file")}
    assert stat.S_IMODE((tmp_path / "root/a/b/file").stat().st_mode) == 0o600


@pytest.mark.parametrize(
    "target", ["../../secret", "/../../secret", "{tmp}/secret", "/proc/self/root/{tmp}/secret"]
)
def test_links_stay_inside(root: int, tmp_path: Path, target: str) -> None:
    os.symlink(target.format(tmp=tmp_path), tmp_path / "root/tmp/link")
    os.symlink("../../", tmp_path / "root/tmp/up")
    for path in ("/tmp/link", "/tmp/up/secret", "/../secret", "/tmp/../../secret"):
        with pytest.raises(UserError, match="No such file"):
            read(root, path)
    put_file(root, "/tmp/link", b"mine", 0o600)
    assert (tmp_path / "secret").read_text() == "of the host"
    assert read(root, "/tmp/link") == b"mine", "the link itself was replaced"
    put_file(root, "/tmp/up/new", b"x", 0o600)
    assert (tmp_path / "root/new").exists() and not (tmp_path / "new").exists()


def test_things_that_are_no_files(root: int, tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "root/fifo")
    os.symlink("loop", tmp_path / "root/loop")
    for path, words in (
        ("/fifo", "no regular file"),
        ("/tmp", "no regular file"),
        ("/loop", "Too many levels"),
    ):
        with pytest.raises(UserError, match=words):
            read(root, path)
    with pytest.raises(UserError, match="is a folder"):
        put_file(root, "/tmp", b"", 0o600)
    with pytest.raises(UserError, match="Not a directory"):
        put_file(root, "/fifo/x", b"", 0o600)
    for path in ("relative", "/a/..", "/", "/x/", "/nul\0"):
        with pytest.raises(UserError, match="is not accepted"):
            put_file(root, path, b"", 0o600)


def test_huge_files_are_refused_before_they_are_read(root: int, tmp_path: Path) -> None:
    with open(tmp_path / "root/huge", "wb") as file:
        file.truncate(10 * 2**30)
    with pytest.raises(UserError, match="10737418240 bytes, more than 1048576"):
        read(root, "/huge", 2**20)


def test_a_failed_put_leaves_the_old_file(root: int, tmp_path: Path) -> None:
    put_file(root, "/file", b"old", 0o600)

    class Broken(io.BytesIO):
        def read(self, size: int | None = -1) -> bytes:
            raise OSError(5, "Input/output error")

    with pytest.raises(UserError, match="Input/output error"):
        put_file(root, "/file", Broken(), 0o600)
    assert read(root, "/file") == b"old"
    assert os.listdir(tmp_path / "root") in (["tmp", "file"], ["file", "tmp"])


def test_the_channel_trusts_no_name(tmp_path: Path) -> None:
    (tmp_path / "secret").write_text("of the host")
    here = tmp_path / "channel"
    here.mkdir()
    folder = ChannelFolder.at(here)
    os.symlink(tmp_path / "secret", here / "link")
    os.mkfifo(here / "fifo")
    (here / "folder" / "full").mkdir(parents=True)
    with open(here / "huge", "wb") as file:
        file.truncate(10 * 2**30)
    assert [folder.read(name, 100) for name in ("link", "fifo", "folder", "absent")] == [b""] * 4
    assert folder.read("huge", 100) == b"\0" * 100
    with pytest.raises(OSError):
        folder.existing_fifo("huge")
    for name in ("link", "fifo", "folder", "huge"):
        folder.write(name, b"mine")
        assert folder.read(name, 100) == b"mine"
    assert (tmp_path / "secret").read_text() == "of the host"
    folder.close()
