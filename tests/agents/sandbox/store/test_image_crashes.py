"""A process that is killed at any call to the file system, and a disk that is full at any write."""

from __future__ import annotations

import errno
import os
import resource
import signal
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from image_making import content, image, manifest

from windtunnel.agents.sandbox.store import Manifests, PageStore
from windtunnel.store.objects import ObjectError

CALLS = ("write", "fsync", "rename", "link", "unlink", "mkdir", "open")
DIED = 77


def killed_at(step: int, work: Callable[[], None]) -> bool:
    """Run ``work`` in a child that dies at its ``step``-th call, in the middle of it where it is a write;
    False when it came to its end before."""
    child = os.fork()
    if child == 0:
        try:
            left = [step]

            def hooked(name: str, real: Callable[..., Any]) -> Callable[..., Any]:
                def call(*arguments: Any, **named: Any) -> Any:
                    left[0] -= 1
                    if left[0] == 0:
                        if name == "write":
                            real(arguments[0], bytes(arguments[1])[: len(arguments[1]) // 2])
                        os._exit(DIED)
                    return real(*arguments, **named)

                return call

            for name in CALLS:
                setattr(os, name, hooked(name, getattr(os, name)))
            work()
            os._exit(0)
        except BaseException:
            os._exit(1)
    _, status = os.waitpid(child, 0)
    assert os.waitstatus_to_exitcode(status) in (0, DIED)
    return os.waitstatus_to_exitcode(status) == DIED


def kill_everywhere(root: Path, prepare: Callable[[Path], None], work: Callable[[Path], None]) -> list[Path]:
    """The state that each possible kill of ``work`` leaves."""
    states = []
    for step in range(1, 400):
        folder = root / f"kill{step}"
        folder.mkdir()
        prepare(folder)
        states.append(folder)
        if not killed_at(step, lambda folder=folder: work(folder)):
            return states
    raise AssertionError("the work has no end")


def test_a_kill_while_an_image_is_kept_costs_only_that_image(tmp_path: Path) -> None:
    for name, seeds in (("a", (1, 2, 3)), ("b", (1, 2, 9)), ("new", (*range(20, 90), 1))):
        image(tmp_path / name, *seeds)

    def prepare(folder: Path) -> None:
        store = PageStore(folder)
        store.keep("a", tmp_path / "a")
        store.keep("b", tmp_path / "b")

    states = kill_everywhere(
        tmp_path, prepare, lambda folder: PageStore(folder).keep("new", tmp_path / "new") and None
    )
    assert len(states) > 8
    there = []
    for state in states:
        store = PageStore(state, keep_raw=0)
        there.append("new" in store.ids())
        for id in store.ids():
            assert store.verify(id) == []
            store.materialise(id, state / f"out-{id}")
            assert content(state / f"out-{id}") == content(tmp_path / id)
        assert set(store.ids()) >= {"a", "b"}
        store.collect(["a", "b"])
        assert sorted(path.suffix for path in (state / "images").iterdir()) == [".image"] * 2 + [".pack"] * 2
        store.keep("new", tmp_path / "new")
        assert store.verify("new") == []
    assert there[0] is False
    assert there[-1] is True


def test_a_kill_while_packs_are_collected_costs_nothing(tmp_path: Path) -> None:
    image(tmp_path / "a", *range(1, 100))
    image(tmp_path / "b", 4, 5, 200)
    image(tmp_path / "c", 300)

    def prepare(folder: Path) -> None:
        store = PageStore(folder)
        for id in "abc":
            store.keep(id, tmp_path / id)

    states = kill_everywhere(tmp_path, prepare, lambda folder: PageStore(folder).collect(["b"]) and None)
    assert len(states) > 8
    freed = []
    for state in states:
        store = PageStore(state, keep_raw=0)
        store.materialise("b", state / "out")
        assert content(state / "out") == content(tmp_path / "b")
        freed.append(store.collect(["b"]))
        assert store.ids() == ["b"]
        assert store.verify("b") == []
        assert len(list((state / "images").iterdir())) == 3
    assert freed[0] > freed[-1] == 0


def test_a_kill_while_a_manifest_is_written_leaves_it_whole_or_absent(tmp_path: Path) -> None:
    first, second = manifest("20260101-000000-a"), manifest("20260101-000001-b")
    states = kill_everywhere(
        tmp_path,
        lambda folder: Manifests(folder).write(first),
        lambda folder: Manifests(folder).write(second),
    )
    for state in states:
        found, problems = Manifests(state).all()
        assert found in ([first], [first, second])
        assert problems == []
        if len(found) == 1:
            Manifests(state).write(second)
            assert Manifests(state).all()[0] == [first, second]


def test_nothing_gets_its_name_before_it_is_on_the_disk(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What a kill cannot show: after a loss of power only synced bytes are there."""
    store, manifests = PageStore(tmp_path / "store"), Manifests(tmp_path / "manifests")
    image(tmp_path / "a", 1, 2)
    done: list[tuple[str, str]] = []
    real = {name: getattr(os, name) for name in ("fsync", "rename", "link")}

    def fsync(file: int) -> None:
        done.append(("fsync", os.readlink(f"/proc/self/fd/{file}")))
        real["fsync"](file)

    def named(what: str) -> Callable[..., None]:
        def call(source: Any, target: Any, **more: Any) -> None:
            done.append((what, os.fspath(target)))
            real[what](source, target, **more)

        return call

    monkeypatch.setattr(os, "fsync", fsync)
    monkeypatch.setattr(os, "rename", named("rename"))
    monkeypatch.setattr(os, "link", named("link"))
    store.keep("a", tmp_path / "a")
    images = str(tmp_path / "store" / "images")
    steps = [(what, path) for what, path in done if path.startswith(images)]
    assert [what for what, _ in steps] == ["fsync", "rename", "link", "fsync"]
    assert steps[0][1].endswith(".part")
    assert steps[3][1] == images
    done.clear()
    manifests.write(manifest("m"))
    assert [what for what, _ in done] == ["fsync", "fsync", "link", "fsync"]
    assert done[1][1].endswith(".part")
    assert done[3][1] == str(tmp_path / "manifests" / "m")


@pytest.mark.parametrize("step", range(1, 5))
def test_a_full_disk_at_any_write(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, step: int) -> None:
    store = PageStore(tmp_path / "store", keep_raw=0)
    store.keep("a", image(tmp_path / "a", 1, 2, 3))
    image(tmp_path / "b", *range(1, 150))
    left = [step]
    real = os.write

    def write(file: int, data: bytes) -> int:
        left[0] -= 1
        if left[0] == 0:
            raise OSError(errno.ENOSPC, "No space left on device")
        return real(file, data)

    monkeypatch.setattr(os, "write", write)
    with pytest.raises(ObjectError, match=r"image b cannot be kept: .*No space left"):
        store.keep("b", tmp_path / "b")
    monkeypatch.undo()
    assert store.ids() == ["a"]
    assert len(list((tmp_path / "store" / "images").iterdir())) == 2
    assert store.verify("a") == []
    store.keep("b", tmp_path / "b")
    assert store.verify("b") == []


def test_a_limit_on_the_size_of_files(tmp_path: Path) -> None:
    """The kernel itself refuses, in the middle of a write."""
    store = PageStore(tmp_path / "store", keep_raw=0)
    store.keep("a", image(tmp_path / "a", 1, 2, 3))
    image(tmp_path / "b", *range(1, 150))
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    old = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (200_000, hard))
    try:
        with pytest.raises(ObjectError, match="image b cannot be kept"):
            store.keep("b", tmp_path / "b")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
        signal.signal(signal.SIGXFSZ, old)
    assert store.ids() == ["a"]
    assert len(list((tmp_path / "store" / "images").iterdir())) == 2
    assert store.verify("a") == []


@pytest.mark.root
def test_a_file_system_that_is_full(tmp_path: Path) -> None:
    if os.geteuid() != 0:
        pytest.skip("needs root")
    small = tmp_path / "small"
    small.mkdir()
    image(tmp_path / "a", *range(1, 100))
    image(tmp_path / "b", *range(1000, 1300))
    mounted = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=1m", "tmpfs", small], capture_output=True)
    if mounted.returncode:
        pytest.skip("needs to mount a tmpfs")
    try:
        store = PageStore(small / "store", keep_raw=0)
        store.keep("a", tmp_path / "a")
        with pytest.raises(ObjectError, match="No space left"):
            store.keep("b", tmp_path / "b")
        assert store.ids() == ["a"]
        assert store.verify("a") == []
        with pytest.raises(ObjectError, match="No space left"):
            for number in range(4):
                store.materialise("a", small / f"out{number}")
        assert content(small / "out0") == content(tmp_path / "a")
        assert not (small / "out3").exists()
        store.materialise("a", tmp_path / "out")
        assert content(tmp_path / "out") == content(tmp_path / "a")
    finally:
        subprocess.run(["umount", small], check=True)
