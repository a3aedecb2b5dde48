"""Images, live roots and snapshots of every kind of pool: what is kept, and what is left behind."""

from __future__ import annotations

import contextlib
import io
import os
import subprocess
import sys
from pathlib import Path

import pytest

from agents.sandbox.files.pool_support import KINDS, Opener, need_btrfs, need_root, state
from support.waiting import until
from windtunnel.agents.sandbox.errors import PoolError
from windtunnel.agents.sandbox.files import Pool, btrfs, btrfs_pool, open_pool
from windtunnel.agents.sandbox.host import removed
from windtunnel.linux import mounts


def test_a_root_is_the_image_and_a_snapshot_brings_it_back(pool: Pool, image: Path) -> None:
    name = pool.import_image(str(image))
    pool.create("box", name)
    root = pool.mount("box")
    start = state(root)
    assert {path: entry[4] for path, entry in start.items()} == {
        path: entry[4] for path, entry in state(image).items()
    }
    assert (root / "usr/bin/tool").stat().st_mode & 0o7777 == 0o4755
    pool.snapshot("box", "first")
    (root / "workspace/one").write_text("other")
    (root / "etc/hosts").unlink()
    (root / "workspace/inner/deep").rename(root / "workspace/moved")
    (root / "workspace/inner").rmdir()
    (root / "workspace/inner").mkdir()
    (root / "workspace/inner/new").write_text("new")
    changed = state(root)
    pool.snapshot("box", "second")
    assert pool.snapshots() == ["first", "second"]
    pool.clone("box", "first")
    assert state(pool.mount("box")) == start
    pool.clone("box", "second")
    assert state(pool.mount("box")) == changed
    pool.drop_snapshot("first")
    pool.drop_snapshot("first")
    assert state(pool.mount("box")) == changed
    pool.drop_box("box")
    pool.drop_box("box")
    assert pool.snapshots() == ["second"]
    assert pool.unclaimed(set(), {"second"}) == []


def test_mounting_twice_is_one_private_mount(pool: Pool, image: Path) -> None:
    need_root()
    pool.create("box", pool.import_image(str(image)))
    root = pool.mount("box")
    assert pool.mount("box") == root
    assert len(mounts.at(root)) == 1
    with open("/proc/self/mountinfo", encoding="ascii", errors="replace") as lines:
        shown = [line for line in lines if f" {root} " in line or f" {root.parent} " in line]
    assert shown and not any("shared:" in line or "master:" in line for line in shown)
    assert "nodev" in next(line for line in shown if f" {root} " in line)
    pool.unmount("box")
    pool.unmount("box")
    assert not mounts.at(root)


def test_a_busy_root_is_replaced_all_the_same(pool: Pool, image: Path) -> None:
    pool.create("box", pool.import_image(str(image)))
    root = pool.mount("box")
    pool.snapshot("box", "base")
    with (root / "workspace/one").open("rb") as held:
        (root / "workspace/late").write_text("late")
        pool.clone("box", "base")
        assert held.read(1) == b"1"
        assert not (pool.mount("box") / "workspace/late").exists()


@pytest.mark.parametrize("bad", ["", ".", "..", "a/b", "../x", ".hidden"])
def test_names_cannot_lead_out_of_the_pool(pool: Pool, bad: str) -> None:
    for call in (
        lambda: pool.snapshot(bad, "s"),
        lambda: pool.clone("box", bad),
        lambda: pool.drop_box(bad),
        lambda: pool.drop_snapshot(bad),
        lambda: pool.create(bad, bad),
    ):
        with pytest.raises(PoolError):
            call()


def test_what_is_not_there_is_said(pool: Pool, image: Path) -> None:
    pool.create("box", pool.import_image(str(image)))
    with pytest.raises(PoolError, match="no snapshot 'none'"):
        pool.clone("box", "none")
    with pytest.raises(PoolError, match="no root of sandbox 'other'"):
        pool.mount("other")
    pool.snapshot("box", "s")
    with pytest.raises(PoolError, match="already"):
        pool.snapshot("box", "s")
    assert pool.changed("s", None, "box") == []


def test_leftovers_are_found_and_collected(pool: Pool, image: Path) -> None:
    pool.create("box", pool.import_image(str(image)))
    pool.create("stray", pool.images()[0])
    pool.mount("stray")
    pool.snapshot("box", "kept")
    pool.snapshot("box", "stray")
    leftovers = [words for words, _ in pool.unclaimed({"box"}, {"kept"})]
    assert any("snapshot stray" in words for words in leftovers)
    assert any("sandbox stray" in words for words in leftovers)
    assert pool.snapshots() == ["kept", "stray"]
    assert removed(pool.unclaimed({"box"}, {"kept"})) == leftovers
    assert pool.snapshots() == ["kept"]
    assert pool.unclaimed({"box"}, {"kept"}) == []
    pool.clone("box", "kept")


@pytest.mark.parametrize("to", KINDS)
@pytest.mark.parametrize("of", KINDS)
def test_streams_carry_everything_between_kinds(opened: Opener, image: Path, of: str, to: str) -> None:
    source = opened(of, "source")
    source.create("box", source.import_image(str(image)))
    root = source.mount("box")
    (root / "etc/hosts").unlink()
    os.setxattr(root / "workspace/one", "user.note", b"\x00\xff\n=")
    (root / "workspace" / "n\udce9 \n").write_text("odd name")
    if os.geteuid() == 0:
        os.chown(root / "workspace/inner", 1234, 5678)
    source.snapshot("box", "a")
    whole = io.BytesIO()
    source.send("a", whole)
    target = opened(to, "target")
    whole.seek(0)
    target.receive("x", whole)
    target.clone("copy", "x")
    assert state(target.mount("copy")) == state(root)
    with pytest.raises(PoolError, match="no whole tar"):
        target.receive("z", io.BytesIO(whole.getvalue().partition(b"1" * 4999)[0]))
    assert target.snapshots() == ["x"]
    assert target.unclaimed({"copy"}, {"x"}) == []


def test_a_file_of_ten_gigabytes_that_is_mostly_holes(pool: Pool, image: Path) -> None:
    pool.create("box", pool.import_image(str(image)))
    file = pool.mount("box") / "workspace/big"
    with file.open("wb") as big:
        big.write(b"start")
        big.seek(10 << 30)
        big.write(b"end")
    pool.snapshot("box", "s")
    with file.open("r+b") as big:
        big.seek(5 << 30)
        big.write(b"middle")
    assert [(each.path, each.change, each.size) for each in pool.changed("s", None, "box")] == [
        ("/workspace/big", "modified", (10 << 30) + 3)
    ]
    sent = io.BytesIO()
    pool.send("s", sent)
    assert sent.tell() < 2 << 20
    sent.seek(0)
    pool.receive("r", sent)
    assert pool.changed("s", "r") == []
    pool.clone("copy", "r")
    about = (pool.mount("copy") / "workspace/big").stat()
    assert about.st_size == (10 << 30) + 3
    assert about.st_blocks * 512 < 1 << 20


def test_two_processes_open_one_pool_at_once(tmp_path: Path) -> None:
    need_btrfs(tmp_path)
    code = (
        "import sys; from pathlib import Path; from windtunnel.agents.sandbox.files import open_pool; "
        "print(open_pool(Path(sys.argv[1]), size=256 << 20).kind)"
    )
    folder = tmp_path / "pool"
    try:
        running = [
            subprocess.Popen([sys.executable, "-c", code, str(folder)], stdout=subprocess.PIPE, text=True)
            for _ in range(2)
        ]
        assert [process.communicate()[0].strip() for process in running] == ["btrfs"] * 2
        assert len(mounts.at(folder)) == 1
        assert len(_loops(btrfs.image_of(folder))) == 1
    finally:
        open_pool(folder).close(unmount=True)
    _released(btrfs.image_of(folder))


def _released(image: Path) -> None:
    """No loop device holds the file; a mount namespace that another process makes may, for a moment."""
    until(lambda: not _loops(image))


def _loops(image: Path) -> list[str]:
    backing_files = []
    for file in Path("/sys/block").glob("loop*/loop/backing_file"):
        try:
            if file.read_text().strip() == str(image):
                backing_files.append(str(file))
        except OSError:
            continue
    return backing_files


def test_a_restarted_host_finds_all_snapshots(opened: Opener, image: Path, tmp_path: Path) -> None:
    first = opened("btrfs")
    first.create("box", first.import_image(str(image)))
    (first.mount("box") / "workspace/kept").write_text("kept")
    first.snapshot("box", "s")
    first.close(unmount=True)
    assert list((tmp_path / "pool").iterdir()) == []
    second = open_pool(tmp_path / "pool")
    assert second.snapshots() == ["s"]
    assert (second.mount("box") / "workspace/kept").read_text() == "kept"


def test_a_device_that_is_attached_already_is_used_again(opened: Opener, tmp_path: Path) -> None:
    pool = opened("btrfs")
    image = btrfs.image_of(tmp_path / "pool")
    device, name = mounts.loop_of(image) or (-1, "")
    try:
        pool.close(unmount=True)
        open_pool(tmp_path / "pool")
        assert mounts.at(tmp_path / "pool")[0].source == name
        assert len(_loops(image)) == 1
    finally:
        os.close(device)


def test_a_broken_loop_file_is_a_fault_and_leaves_no_device(tmp_path: Path) -> None:
    need_btrfs(tmp_path)
    image = btrfs.image_of(tmp_path / "pool")
    image.write_bytes(b"\0" * (1 << 20))
    with pytest.raises(PoolError, match="cannot be mounted"):
        open_pool(tmp_path / "pool")
    _released(image)
    with pytest.raises(PoolError, match="128 MiB"):
        open_pool(tmp_path / "small", size=1 << 20)
    assert not btrfs.image_of(tmp_path / "small").exists()


def fill(path: Path) -> int:
    """Write until nothing more fits; how many bytes did."""
    with path.open("wb", buffering=0) as file:
        with contextlib.suppress(OSError):
            while True:
                file.write(os.urandom(1 << 18))
        return file.tell()


def test_a_limit_is_one_of_all_that_follows(opened: Opener, image: Path) -> None:
    most = 8 << 20
    pool = opened("btrfs")
    if reason := pool.unbounded(limited=True):
        pytest.skip(reason)
    pool.create("box", pool.import_image(str(image)), most)
    half = os.urandom(most // 2)
    (pool.mount("box") / "workspace/half").write_bytes(half)
    pool.snapshot("box", "half")
    for box in ("box", "fork", "box"):
        pool.clone(box, "half", most)
        left = fill(pool.mount(box) / "workspace/rest")
        assert most * 0.4 < left <= most * 1.01 - len(half)
    pool.snapshot("box", "full")
    pool.clone("box", "full", most)
    root = pool.mount("box")
    (root / "etc/hostname").write_text("mine")
    with pytest.raises(OSError):
        (root / "workspace/more").write_bytes(bytes(1 << 20))
    # what is deleted may be written again after a restore, though older snapshots have it still
    (root / "workspace/rest").unlink()
    pool.snapshot("box", "less")
    pool.clone("box", "less", most)
    assert most * 0.4 < fill(pool.mount("box") / "workspace/rest") <= most * 1.01 - len(half)
    pool.clone("box", "full", None)
    assert (pool.mount("box") / "workspace/free").write_bytes(bytes(2 * most)) == 2 * most


def test_a_limit_outlasts_many_restores(opened: Opener, image: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(btrfs_pool, "LONGEST", 3)
    most, part = 8 << 20, os.urandom(1 << 20)
    pool = opened("btrfs")
    if reason := pool.unbounded(limited=True):
        pytest.skip(reason)
    pool.create("box", pool.import_image(str(image)), most)
    for number in range(5):
        (pool.mount("box") / f"workspace/{number}").write_bytes(part)
        pool.snapshot("box", f"s{number}")
        pool.clone("box", f"s{number}", most)
    assert fill(pool.mount("box") / "workspace/rest") <= most * 1.01 - 5 * len(part)
