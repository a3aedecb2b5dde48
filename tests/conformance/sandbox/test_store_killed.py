"""A process that is killed at any statement and in the middle of any write."""

from __future__ import annotations

import os
import resource
import shutil
import signal
import sqlite3
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from agents.sandbox.store.image_making import content, damage, frames, image, keep, manifest
from windtunnel.agents.sandbox.store import CheckpointStore


def kept(folder: Path, id: str, images: Path) -> None:
    """Closed again: no thread may be in SQLite while this process forks."""
    store = CheckpointStore(folder)
    keep(store, id, images)
    store.close()


def killed(work: Callable[[], object], *, statement: int = 0, size: int = 0) -> bool:
    """Run ``work`` in a child that is killed at its ``statement``-th statement, or in the write that makes a
    file larger than ``size`` bytes; False when it came to its end before."""
    child = os.fork()
    if child == 0:
        try:
            real = sqlite3.connect
            begun: list[str] = [""]

            def count(words: str) -> None:
                # the rows of one `executemany` are one
                if words[:12] != begun[-1]:
                    begun.append(words[:12])
                if len(begun) == statement + 1:
                    os.kill(os.getpid(), signal.SIGKILL)

            def connect(*arguments: Any, **named: Any) -> sqlite3.Connection:
                db = real(*arguments, **named)
                db.set_trace_callback(count)
                return db

            sqlite3.connect = connect
            if size:
                signal.signal(signal.SIGXFSZ, signal.SIG_DFL)
                resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
                resource.setrlimit(resource.RLIMIT_FSIZE, (size, size))
            work()
            os._exit(0)
        except BaseException:
            os._exit(1)
    _, status = os.waitpid(child, 0)
    died = os.waitstatus_to_exitcode(status)
    assert died in (0, -signal.SIGKILL, -signal.SIGXFSZ)
    return died != 0


def killed_everywhere(
    root: Path, prepare: Callable[[Path], object], work: Callable[[Path], object], *, sizes: range
) -> Iterator[tuple[Path, bool]]:
    """The state that each kill of ``work`` leaves, and whether it was killed."""
    kills = [*({"size": size} for size in sizes), *({"statement": step} for step in range(1, 100))]
    prepare(root / "before")
    for number, kill in enumerate(kills):
        folder = shutil.copytree(root / "before", root / f"kill{number}")
        died = killed(lambda folder=folder: work(folder), **kill)
        yield folder, died
        if not died and "statement" in kill:
            return
    raise AssertionError("the work has no end")


def test_a_kill_while_a_checkpoint_is_written_costs_only_that_checkpoint(tmp_path: Path) -> None:
    for name, seeds in (("a", (1, 2, 3)), ("new", (*range(20, 90), 1))):
        image(tmp_path / name, *seeds)

    def write(folder: Path, id: str) -> None:
        store = CheckpointStore(folder)
        store.add(manifest(id), tmp_path / id)
        store.close()

    there = []
    sizes = range(70_000, 420_000, 35_000)
    for state, died in killed_everywhere(
        tmp_path, lambda folder: write(folder, "a"), lambda folder: write(folder, "new"), sizes=sizes
    ):
        store = CheckpointStore(state)
        manifests, problems = store.all()
        there.append([stored.id for stored in manifests])
        assert problems == [] and there[-1] in (["a"], ["a", "new"]) and (died or there[-1] == ["a", "new"])
        assert there[-1] == store.images()
        for id in store.images():
            assert damage(store, id) == []
            store.materialise(id, state / f"out-{id}")
            assert content(state / f"out-{id}") == content(tmp_path / id)
        store.drop(["new"], ["new"])
        store.collect()
        assert frames(store) == 1
        keep(store, "new", tmp_path / "new")
        assert damage(store, "new") == []
        store.close()
    assert there[0] == ["a"] and len(there) > len(sizes) + 8


def test_a_kill_in_a_large_image_leaves_nothing_of_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("windtunnel.agents.sandbox.store.pages._AT_ONCE", 1)
    image(tmp_path / "a", 1)
    image(tmp_path / "large", *range(1, 900))
    for state, died in killed_everywhere(
        tmp_path,
        lambda folder: kept(folder, "a", tmp_path / "a"),
        lambda folder: kept(folder, "large", tmp_path / "large"),
        sizes=range(300_000, 3_000_000, 450_000),
    ):
        store = CheckpointStore(state)
        assert not died or store.images() == ["a", "large"] or (store.images(), frames(store)) == (["a"], 1)
        assert damage(store) == []
        store.close()


def test_a_kill_while_the_store_is_collected_costs_nothing(tmp_path: Path) -> None:
    image(tmp_path / "a", *range(1, 100))
    image(tmp_path / "b", 4, 5, 200)
    image(tmp_path / "c", 300)

    def prepare(folder: Path) -> None:
        for id in "abc":
            kept(folder, id, tmp_path / id)
        store = CheckpointStore(folder)
        store.drop(images=["a", "c"])
        store.close()

    freed = []
    for state, _ in killed_everywhere(
        tmp_path, prepare, lambda folder: CheckpointStore(folder).collect(), sizes=range(4096, 60_000, 7000)
    ):
        store = CheckpointStore(state)
        store.materialise("b", state / "out")
        assert content(state / "out") == content(tmp_path / "b")
        freed.append(store.collect())
        assert store.images() == ["b"] and damage(store, "b") == [] and frames(store) == 2
        store.close()
    assert freed[0] > freed[-1] == 0
