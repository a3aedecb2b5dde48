"""Snapshots, clones and ``changed`` against a plain model, over random histories."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from agents.sandbox.files.pool_support import KINDS, Opener, emptied, state
from windtunnel.agents.sandbox.files import Pool, btrfs, open_pool
from windtunnel.agents.sandbox.host import removed

PATHS = ("a", "b", "dir", "dir/a", "dir/b", "dir/sub", "dir/sub/a", "other", "other/a")
DEEDS = (
    "write",
    "rewrite",
    "append",
    "remove",
    "rename",
    "folder",
    "link",
    "hardlink",
    "mode",
    "fifo",
    "note",
    "hole",
)
step = st.one_of(
    st.tuples(st.sampled_from(DEEDS), st.sampled_from(PATHS), st.sampled_from(PATHS)),
    st.tuples(st.sampled_from(("snapshot", "clone", "fork")), st.integers(0, 9), st.integers(0, 9)),
)


@dataclass
class World:
    pool: Pool
    image: str
    count: int = 0


@pytest.fixture(params=KINDS)
def world(request: pytest.FixtureRequest, opened: Opener) -> Iterator[World]:
    pool = opened(request.param)
    with tempfile.TemporaryDirectory() as folder:
        root = Path(folder) / "model"
        (root / "dir/sub").mkdir(parents=True)
        (root / "dir/a").write_text("from the image")
        (root / "dir/sub/a").write_text("deep in the image")
        (root / "b").write_text("from the image")
        os.link(root / "b", root / "dir/b")
        yield World(pool, pool.import_image(str(root)))


@settings(
    max_examples=15, deadline=None, derandomize=True,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)  # fmt: skip
@given(history=st.lists(step, min_size=4, max_size=30))
def test_every_history_is_kept_and_told(
    world: World, history: list[tuple[str, str | int, str | int]]
) -> None:
    pool = world.pool
    world.count += 1
    box = f"box{world.count}"
    pool.create(box, world.image)
    kept: dict[str, dict[str, tuple[object, ...]]] = {}

    def snapshot() -> None:
        name = f"{box}-{len(kept)}"
        pool.snapshot(box, name)
        kept[name] = state(pool.mount(box))

    snapshot()
    for deed, first, second in history:
        if isinstance(first, int):
            chosen = list(kept)[first % len(kept)]
            if deed == "snapshot":
                snapshot()
            elif deed == "clone":
                pool.clone(box, chosen)
            else:
                box += "f"
                pool.clone(box, chosen)
        else:
            try:
                act(pool.mount(box), deed, first, str(second))
            except OSError:
                continue
    now = state(pool.mount(box))
    for name, tree in kept.items():
        assert changes(pool, name, None, box) == expected(tree, now), name
    names = list(kept)
    for older, newer in zip(names, names[1:] + names[:1], strict=True):
        assert changes(pool, older, newer, None) == expected(kept[older], kept[newer]), (older, newer)
    for name, tree in kept.items():
        pool.clone("check", name)
        assert state(pool.mount("check")) == tree
    assert state(pool.mount(box)) == now
    for name in kept:
        pool.drop_snapshot(name)
    assert state(pool.mount(box)) == now
    removed(pool.unclaimed(set(), set()))


def changes(pool: Pool, older: str, newer: str | None, box: str | None) -> dict[str, str]:
    return {each.path: each.change for each in pool.changed(older, newer, box or "")}


def expected(older: dict[str, tuple[object, ...]], newer: dict[str, tuple[object, ...]]) -> dict[str, str]:
    changes = {}
    for path in older.keys() | newer.keys():
        if path not in newer:
            changes[path] = "deleted"
        elif path not in older:
            changes[path] = "created"
        else:
            before, after = older[path], newer[path]
            old_body, new_body = before[4], after[4]
            kinds = (int(str(before[0])) >> 12, int(str(after[0])) >> 12)
            if kinds[0] != kinds[1]:
                changes[path] = "modified"
            elif isinstance(old_body, tuple) and isinstance(new_body, tuple):
                if old_body[0] != new_body[0]:
                    changes[path] = "modified"
                elif old_body[1] != new_body[1]:
                    changes[path] = "metadata"
            elif old_body != new_body:
                changes[path] = "modified"
            if path not in changes and (before[:3], before[5]) != (after[:3], after[5]):
                changes[path] = "metadata"
    return changes


def act(root: Path, deed: str, first: str, second: str) -> None:
    path, other = root / first, root / second
    if path.is_fifo() and deed in ("write", "rewrite", "append", "hole"):
        return  # opening it would wait for a reader
    if deed == "write":
        path.write_text(f"new {first}")
    elif deed == "rewrite":
        # other bytes of the same size, and the time put back: only what the kernel keeps can tell
        about = path.lstat()
        path.write_bytes(bytes(byte ^ 1 for byte in path.read_bytes()))
        os.utime(path, ns=(about.st_atime_ns, about.st_mtime_ns))
    elif deed == "append":
        with path.open("ab") as file:
            file.write(b"more" * 1000)
    elif deed == "remove":
        if path.is_dir() and not path.is_symlink():
            emptied(path)
            path.rmdir()
        else:
            path.unlink()
    elif deed == "rename":
        path.rename(other)
    elif deed == "folder":
        path.mkdir()
    elif deed == "link":
        path.symlink_to(second)
    elif deed == "hardlink":
        os.link(path, other, follow_symlinks=False)
    elif deed == "mode":
        path.chmod(path.lstat().st_mode & 0o7777 ^ 0o011, follow_symlinks=not path.is_symlink())
    elif deed == "fifo":
        os.mkfifo(path)
    elif deed == "note":
        if path.is_symlink() or not (path.is_file() or path.is_dir()):
            return
        os.setxattr(path, "user.note", second.encode())
    elif deed == "hole":
        with path.open("r+b") as file:
            file.truncate(1 << 20)


def test_other_bytes_under_the_same_size_and_time_are_seen(world: World) -> None:
    pool = world.pool
    pool.create("box", world.image)
    file = pool.mount("box") / "same"
    file.write_bytes(b"before")
    for name in ("first", "second", "third"):
        pool.snapshot("box", name)
        about = file.stat()
        file.write_bytes(name.encode().rjust(6)[:6])
        os.utime(file, ns=(about.st_atime_ns, about.st_mtime_ns))
        assert changes(pool, name, None, "box") == {"/same": "modified"}
    assert changes(pool, "first", "third", None) == {"/same": "modified"}
    pool.clone("check", "second")
    assert (pool.mount("check") / "same").read_bytes() == b" first"


def test_roots_that_come_and_go_leave_their_room_to_others(
    opened: Opener, image: Path, tmp_path: Path
) -> None:
    pool, disk = opened("btrfs", size=256 << 20), btrfs.image_of(tmp_path / "pool")
    name, data, size = pool.import_image(str(image)), os.urandom(24 << 20), disk.stat().st_blocks
    assert size * 512 >= 256 << 20, "all of it is taken at once"
    for number in range(45):
        if number % 15 == 14:  # as when its host comes anew
            pool = open_pool(tmp_path / "pool")
            continue
        pool.create("box", name)
        with (pool.mount("box") / "workspace/big").open("wb") as file:
            file.write(data)
        if number % 3:
            pool.snapshot("box", "kept")
        if number % 3 == 2:
            pool.clone("box", "kept")
        pool.drop_box("box")
        if number % 3:
            pool.drop_snapshot("kept")
        btrfs.waited_for_room(tmp_path / "pool")
    assert disk.stat().st_blocks == size
    left = len(btrfs.counts(tmp_path / "pool"))
    assert left < 64 + 8, f"{left} quota groups of roots that are gone"
