"""Reading a tree that is not to be trusted."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from windtunnel.agents.sandbox.traces import observe
from windtunnel.agents.sandbox.traces.observe import digest, listening, tree


@pytest.fixture
def root(tmp_path: Path) -> Path:
    place = tmp_path / "root"
    (place / "a").mkdir(parents=True)
    (place / "a" / "file").write_text("one")
    (place / "a" / "link").symlink_to("file")
    return place


def changed(root: Path, before: dict[str, str]) -> list[str]:
    after = tree(root)
    return sorted(path for path in before.keys() | after.keys() if before.get(path) != after.get(path))


def test_every_kind_of_change_shows(root: Path) -> None:
    file, link = root / "a" / "file", root / "a" / "link"
    before = tree(root)
    assert changed(root, before) == []
    file.write_text("two")
    assert changed(root, before) == ["/a/file"]
    file.write_text("one")
    file.chmod(0o600)
    assert changed(root, before) == ["/a/file"]
    before = tree(root)
    link.unlink()
    link.symlink_to("other")
    assert changed(root, before) == ["/a/link"]
    os.link(file, root / "second")
    assert changed(root, before) == ["/a/file", "/a/link", "/second"]
    (root / "second").unlink()
    (root / "a").chmod(0o700)
    assert changed(root, before) == ["/a", "/a/link"]


def test_extended_attributes_show(root: Path) -> None:
    before = tree(root)
    try:
        os.setxattr(root / "a" / "file", "user.note", b"x")
    except OSError:
        pytest.skip("the file system has no extended attributes of users")
    assert changed(root, before) == ["/a/file"]


def test_times_the_channel_and_the_index_of_git_do_not_count(root: Path) -> None:
    (root / "a" / ".git").mkdir()
    before = tree(root)
    os.utime(root / "a" / "file", (1, 1))
    (root / ".windtunnel").mkdir()
    (root / ".windtunnel" / "out").write_text("x")
    (root / "a" / ".git" / "index").write_text("x")
    assert changed(root, before) == []
    (root / "a" / ".windtunnel").mkdir()
    assert changed(root, before) == ["/a/.windtunnel"]


def test_nothing_is_followed_and_nothing_blocks(root: Path) -> None:
    os.mkfifo(root / "pipe")
    (root / "out").symlink_to("/etc")
    (root / "loop").symlink_to(".")
    entries = tree(root)
    assert set(entries) == {"/a", "/a/file", "/a/link", "/pipe", "/out", "/loop"}
    assert entries["/out"].endswith("-> /etc")


def test_holes_equal_written_zeros(root: Path) -> None:
    size = 3 * observe.BLOCK + 17
    (root / "plain").write_bytes(b"x" + bytes(size - 2) + b"y")
    with (root / "sparse").open("wb") as file:
        file.write(b"x")
        file.seek(size - 1)
        file.write(b"y")
    with (root / "giant").open("wb") as file:
        file.truncate(2**40)
    entries = tree(root)
    assert entries["/plain"] == entries["/sparse"]
    assert entries["/giant"]


def test_deep_trees_end(root: Path) -> None:
    here = os.open(root, os.O_RDONLY)
    for _ in range(observe.DEEPEST + 50):
        os.mkdir("d", dir_fd=here)
        below = os.open("d", os.O_RDONLY, dir_fd=here)
        os.close(here)
        here = below
    os.close(here)
    assert len(tree(root)) == 3 + observe.DEEPEST + 1


def test_only_some_folders(root: Path) -> None:
    (root / "b").mkdir()
    assert set(tree(root, ["b"])) == {"/b"}
    assert digest(tree(root, ["b"])) != digest(tree(root))


def test_listening_ports() -> None:
    table = (
        "  sl  local_address rem_address   st tx_queue\n"
        "   0: 0100007F:1F90 00000000:0000 0A 00000000:00000000\n"
        "   1: 0100007F:1F91 0100007F:0050 01 00000000:00000000\n"
        "   0: 00000000000000000000000001000000:0016 00000000000000000000000000000000:0000 0A 0\n"
    )
    assert listening(table) == (22, 8080)
