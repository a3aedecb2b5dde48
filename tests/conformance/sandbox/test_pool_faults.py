"""Full disks and killed processes: nothing half made, nothing lost, nothing left behind."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from agents.sandbox.files.pool_support import KINDS, Opener, need_root, state
from windtunnel.agents.sandbox.errors import PoolError
from windtunnel.agents.sandbox.files import Pool
from windtunnel.agents.sandbox.host import removed
from windtunnel.linux import mounts

IMPORTER = """
import signal, sys
from pathlib import Path
from windtunnel.agents.sandbox.files import Pool, open_pool

def stop(*_):
    print("importing", flush=True)
    signal.pause()

pool = {"btrfs": open_pool, "copy": Pool}[sys.argv[2]](Path(sys.argv[1]))
pool._publish = stop
pool.import_image(sys.argv[3])
"""


def fill(folder: Path, leave: int = 0) -> None:
    """Write until the disk is full, then give ``leave`` bytes back."""
    with pytest.raises(OSError), (folder / "fill").open("wb", buffering=0) as file:
        while True:
            file.write(os.urandom(1 << 20))
            os.fsync(file.fileno())
    if leave:
        os.truncate(folder / "fill", (folder / "fill").stat().st_size - leave)


def test_a_full_btrfs_keeps_what_it_has(opened: Opener, image: Path, tmp_path: Path) -> None:
    pool = opened("btrfs", size=128 << 20)
    pool.create("box", pool.import_image(str(image)))
    root = pool.mount("box")
    pool.snapshot("box", "good")
    before = state(root)
    fill(root / "workspace")
    names = ["good"]
    for count in range(200):
        try:
            pool.snapshot("box", f"s{count}")
            names.append(f"s{count}")
            (root / f"workspace/n{count}").write_bytes(os.urandom(3000))
        except PoolError as error:
            assert "full" in str(error)
            break
        except OSError:
            continue
    assert pool.snapshots() == sorted(names)
    with pytest.raises(PoolError, match="full"):
        big = tmp_path / "big"
        big.mkdir()
        (big / "file").write_bytes(os.urandom(64 << 20))
        pool.import_image(str(big))
    assert len(pool.images()) == 1
    removed(pool.unclaimed({"box"}, {"good"}))
    pool.clone("box", "good")
    assert state(pool.mount("box")) == before
    assert pool.unclaimed({"box"}, {"good"}) == []
    pool.snapshot("box", "again")


def test_a_full_disk_of_copies_keeps_what_it_has(image: Path, tmp_path: Path) -> None:
    need_root()
    disk = tmp_path / "disk"
    disk.mkdir()
    mounts.mount("tmpfs", disk, "tmpfs", 0, "size=6m")
    try:
        pool = Pool(disk / "pool")
        try:
            pool.create("box", pool.import_image(str(image)))
            root = pool.mount("box")
            pool.snapshot("box", "good")
            before = state(root)
            (root / "workspace/big").write_bytes(os.urandom(4 << 20))
            with pytest.raises(PoolError, match="full"):
                pool.snapshot("box", "bad")
            assert pool.snapshots() == ["good"]
            assert pool.unclaimed({"box"}, {"good"}) == []
            assert [each.path for each in pool.changed("good", None, "box")] == ["/workspace/big"]
            pool.clone("box", "good")
            assert state(pool.mount("box")) == before
        finally:
            pool.close(unmount=True)
    finally:
        mounts.unmount(disk)


@pytest.mark.parametrize("kind", KINDS)
def test_a_killed_import_leaves_no_image(opened: Opener, image: Path, tmp_path: Path, kind: str) -> None:
    pool = opened(kind)
    command = [sys.executable, "-c", IMPORTER, str(tmp_path / "pool"), kind, str(image)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as running:
        assert running.stdout is not None
        try:
            assert running.stdout.readline() == "importing\n"
            assert pool.images() == []
        finally:
            running.send_signal(signal.SIGKILL)
    assert pool.images() == []
    assert any("half-made" in words for words, _ in pool.unclaimed(set(), set()))
    assert len(removed(pool.unclaimed(set(), set()))) == 1
    assert pool.unclaimed(set(), set()) == []
    pool.create("box", pool.import_image(str(image)))
    assert (pool.mount("box") / "workspace/inner/deep").read_text() == "deep"


@pytest.mark.parametrize("kind", KINDS)
def test_what_is_being_made_is_no_leftover(
    opened: Opener, image: Path, kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    pool, leftovers = opened(kind), list[list[str]]()
    publish = type(pool)._publish

    def collected(self: Pool, path: Path, name: Path) -> None:
        leftovers.append(removed(pool.unclaimed(set(), set())))
        publish(self, path, name)

    monkeypatch.setattr(type(pool), "_publish", collected)
    pool.import_image(str(image))
    assert leftovers == [[]] and len(pool.images()) == 1


def test_a_stale_mount_is_collected(opened: Opener, image: Path) -> None:
    pool = opened("btrfs")
    pool.create("box", pool.import_image(str(image)))
    root = pool.mount("box")
    os.rename(root.parents[1] / "live/box", root.parents[1] / "trash/box")
    assert any(str(root) in words for words, _ in pool.unclaimed(set(), set()))
    removed(pool.unclaimed(set(), set()))
    assert not mounts.at(root)
