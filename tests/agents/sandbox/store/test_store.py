"""The page store: what goes in comes out, shared pages cost nothing, and nothing that is needed goes."""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from agents.sandbox.store.image_making import (
    cold,
    content,
    damage,
    frames,
    image,
    image_folder,
    keep,
    page,
    stored,
)
from windtunnel.agents.sandbox.store import CheckpointStore
from windtunnel.agents.sandbox.store import pages as image_pages
from windtunnel.base.errors import UserError
from windtunnel.store.objects import ObjectError

images = st.dictionaries(
    st.sampled_from(["pages-1.img", "pages-2.img", "core-1.img", "mm.img"]),
    st.builds(
        lambda some, size: b"".join(map(page, some)) + b"x" * size,
        st.lists(st.integers(0, 6), max_size=12),
        st.sampled_from([0, 1, 4095, 4096, 4097, 9000]),
    ),
    max_size=4,
)


@settings(max_examples=30, deadline=None)
@given(st.lists(images, min_size=1, max_size=4), st.booleans())
def test_what_is_kept_comes_back(given_images: list[dict[str, bytes]], like: bool) -> None:
    with tempfile.TemporaryDirectory() as folder:
        root = Path(folder)
        store = CheckpointStore(root / "store")
        for number, files in enumerate(given_images):
            before = f"c{number - 1}" if like and number else ""
            kept = keep(store, f"c{number}", image_folder(root / f"in{number}", files), like=before)
            assert kept.bytes_raw == sum(map(len, files.values()))
        for each in (store, cold(root / "store")):
            for number, files in enumerate(given_images):
                out = root / "out" / str(number)
                each.materialise(f"c{number}", out)
                assert content(out) == files
                assert damage(each, f"c{number}") == []
            shutil.rmtree(root / "out")


def test_a_later_image_costs_what_changed(tmp_path: Path) -> None:
    store = CheckpointStore(tmp_path / "store")
    some = list(range(1, 200))
    first = keep(store, "a", image(tmp_path / "a", *some))
    some[77] = 250
    for like in ("", "a"):
        later = keep(store, f"b{like}", image(tmp_path / f"b{like}", *some), like=like)
        assert later.bytes_new < 4 * 4096 < first.bytes_new / 20
    moved = keep(store, "c", image(tmp_path / "c", 251, *some), like="b")
    assert moved.bytes_new < 4 * 4096
    assert (
        keep(store, "d", image_folder(tmp_path / "d", {"pages-1.img": bytes(4096 * 3000)})).bytes_new <= 4096
    )


def test_an_image_larger_than_what_is_held_in_memory(tmp_path: Path) -> None:
    store = CheckpointStore(tmp_path / "store")
    data = np.random.default_rng(1).bytes(4096 * 9000 + 17)
    keep(store, "a", image_folder(tmp_path / "a", {"pages-1.img": data, "core-1.img": b"x"}))
    cold(tmp_path / "store").materialise("a", tmp_path / "out")
    assert content(tmp_path / "out") == {"pages-1.img": data, "core-1.img": b"x"}


def test_what_is_refused(tmp_path: Path) -> None:
    store = CheckpointStore(tmp_path / "store")
    keep(store, "a", image(tmp_path / "a", 1))
    for words, act in {
        "already": lambda: keep(store, "a", tmp_path / "a"),
        "no image b": lambda: store.materialise("b", tmp_path / "out"),
        "File exists": lambda: store.materialise("a", tmp_path / "a"),
        "cannot name": lambda: keep(store, "../a", tmp_path / "a"),
        "nothing": lambda: keep(store, "b", tmp_path / "nothing"),
    }.items():
        with pytest.raises(ObjectError, match=words):
            act()
    (tmp_path / "a" / "link").symlink_to("/etc/passwd")
    with pytest.raises(ObjectError, match="link is no plain file"):
        keep(store, "b", tmp_path / "a")
    assert store.images() == ["a"]
    with store.transaction() as db:
        db.execute("PRAGMA user_version=2")
    for folder in (tmp_path / "store", tmp_path / "older"):
        (tmp_path / "older" / "images").mkdir(parents=True, exist_ok=True)
        with pytest.raises(UserError, match="name another home"):
            CheckpointStore(folder)


def test_copies_of_images_stay_within_their_bound(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(image_pages, "COPIES_BYTES", 40_000)
    store = CheckpointStore(tmp_path / "store")
    for number in range(6):
        keep(store, f"c{number}", image(tmp_path / f"c{number}", 1, 2, number))
    assert sorted(path.name for path in (tmp_path / "store" / "raw").iterdir()) == ["c3", "c4", "c5"]
    store.materialise("c5", tmp_path / "linked")
    assert (tmp_path / "linked" / "pages-1.img").stat().st_nlink == 3
    store.materialise("c0", tmp_path / "out")
    assert content(tmp_path / "out") == content(tmp_path / "c0")


def test_an_image_that_two_read_at_once_has_a_copy(tmp_path: Path) -> None:
    keep(CheckpointStore(tmp_path / "store"), "a", image(tmp_path / "a", 1, 2))
    store = cold(tmp_path / "store")
    for name in ("one", "two"):
        store.copies._sizes.clear()  # as where both have begun before either has come to its end
        store.materialise("a", tmp_path / name)
    assert (tmp_path / "store/raw/a/pages-1.img").stat().st_nlink == 2


operations = st.lists(
    st.one_of(
        st.tuples(st.just("keep"), st.lists(st.integers(0, 9), min_size=1, max_size=8)),
        st.tuples(st.just("drop"), st.integers(0, 9)),
        st.tuples(st.just("collect"), st.none()),
        st.tuples(st.just("open"), st.none()),
    ),
    max_size=14,
)


@settings(max_examples=40, deadline=None)
@given(operations)
def test_collect_removes_only_what_nothing_needs(todo: Sequence[tuple[str, object]]) -> None:
    """Against a model: the set of images."""
    with tempfile.TemporaryDirectory() as folder:
        root = Path(folder)
        store = CheckpointStore(root / "store")
        model: dict[str, tuple[int, ...]] = {}
        for number, (what, value) in enumerate(todo):
            if what == "keep":
                keep(store, f"c{number}", image(root / f"c{number}", *value))
                model[f"c{number}"] = tuple(value)
            elif what == "drop":
                store.drop(images=[f"c{value}"])
                model.pop(f"c{value}", None)
            elif what == "collect":
                store.collect()
            else:
                store.close()
                store = CheckpointStore(root / "store")
            assert store.images() == sorted(model)
        for id in model:
            store.materialise(id, root / f"out-{id}")
            assert content(root / f"out-{id}") == content(root / id)
        for id in list(model):
            store.drop(images=[id])
        store.collect()
        assert frames(store) == 0


def test_a_frame_of_which_little_is_needed_is_made_smaller(tmp_path: Path) -> None:
    store = CheckpointStore(tmp_path / "store")
    keep(store, "a", image(tmp_path / "a", *range(1, 150)))
    keep(store, "b", image(tmp_path / "b", 5, 99, 140, 200))
    store.drop(images=["a"])
    assert store.collect() > 140 * 4096
    assert stored(store) < 24 * 4096
    assert store.path.stat().st_size <= stored(store) + 4096
    store = cold(tmp_path / "store")
    store.materialise("b", tmp_path / "out")
    assert content(tmp_path / "out") == content(tmp_path / "b")
    # pages that went are stored again, those that stayed are not
    assert keep(store, "c", image(tmp_path / "c", 5, 7, 99)).bytes_new < 4 * 4096
    assert damage(store, "c") == []


def test_what_a_dead_process_was_working_on_is_removed(tmp_path: Path) -> None:
    (tmp_path / "store" / "work" / "left").mkdir(parents=True)
    store = CheckpointStore(tmp_path / "store")
    with store.scratch() as mine:
        (mine / "file").write_text("x")
        assert list((tmp_path / "store" / "work").iterdir()) == [mine]
    assert not mine.exists()
