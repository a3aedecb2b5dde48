"""The page store: what goes in comes out, shared pages cost nothing, and damage never passes."""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from image_making import content, image, made, packed, page

from windtunnel.agents.sandbox.store import PageStore
from windtunnel.store.objects import ObjectError

seeds = st.lists(st.integers(0, 6), max_size=12)
sizes = st.sampled_from([0, 1, 4095, 4096, 4097, 9000])
images = st.dictionaries(
    st.sampled_from(["pages-1.img", "pages-2.img", "core-1.img", "mm.img"]),
    st.builds(
        lambda some, size: b"".join(map(page, some)) + b"x" * size,
        seeds,
        sizes,
    ),
    max_size=4,
)


@settings(max_examples=40, deadline=None)
@given(st.lists(images, min_size=1, max_size=4), st.sampled_from([0, 10**9]), st.booleans())
def test_what_is_kept_comes_back(given_images: list[dict[str, bytes]], keep_raw: int, like: bool) -> None:
    with tempfile.TemporaryDirectory() as folder:
        root = Path(folder)
        store = PageStore(root / "store", keep_raw=keep_raw)
        for number, files in enumerate(given_images):
            before = f"c{number - 1}" if like and number else ""
            kept = store.keep(f"c{number}", made(root / f"in{number}", files), like=before)
            assert kept.bytes_raw == sum(map(len, files.values()))
        for fresh in (store, PageStore(root / "store", keep_raw=0), PageStore(root / "store")):
            for number, files in enumerate(given_images):
                out = root / "out" / str(number)
                fresh.materialise(f"c{number}", out)
                assert content(out) == files
                assert fresh.verify(f"c{number}") == []
            shutil.rmtree(root / "out")


def test_a_later_image_costs_what_changed(tmp_path: Path) -> None:
    store = PageStore(tmp_path / "store")
    some = list(range(1, 200))
    first = store.keep("a", image(tmp_path / "a", *some))
    some[77] = 250
    for like in ("", "a"):
        later = store.keep(f"b{like}", image(tmp_path / f"b{like}", *some), like=like)
        assert later.bytes_new < 4096 + 5000 < first.bytes_new / 50
    moved = store.keep("c", image(tmp_path / "c", 251, *some), like="b")
    assert moved.bytes_new < 4096 + 5000


def test_the_list_of_packs_does_not_grow_with_the_chain(tmp_path: Path) -> None:
    store = PageStore(tmp_path / "store")
    for turn in range(12):
        store.keep(f"c{turn}", image(tmp_path / f"c{turn}", 1, 2, 100 + turn), like=f"c{turn - 1}")
    assert len(store.recipe("c11").packs) == 2


def test_zero_pages_are_not_stored(tmp_path: Path) -> None:
    store = PageStore(tmp_path / "store")
    kept = store.keep("a", made(tmp_path / "a", {"pages-1.img": bytes(4096 * 3000)}))
    assert kept.bytes_new < 1000


def test_an_image_larger_than_a_window(tmp_path: Path) -> None:
    store = PageStore(tmp_path / "store", keep_raw=0)
    data = np.random.default_rng(1).bytes(4096 * 9000 + 17)
    store.keep("a", made(tmp_path / "a", {"pages-1.img": data, "core-1.img": b"x"}))
    store.materialise("a", tmp_path / "out")
    assert content(tmp_path / "out") == {"pages-1.img": data, "core-1.img": b"x"}


def test_what_is_refused(tmp_path: Path) -> None:
    store = PageStore(tmp_path / "store")
    store.keep("a", image(tmp_path / "a", 1))
    with pytest.raises(ObjectError, match="already"):
        store.keep("a", tmp_path / "a")
    with pytest.raises(ObjectError, match="no image b"):
        store.materialise("b", tmp_path / "out")
    with pytest.raises(ObjectError, match="not empty"):
        store.materialise("a", tmp_path / "a")
    with pytest.raises(ObjectError, match="cannot name"):
        store.keep("../a", tmp_path / "a")
    (tmp_path / "a" / "link").symlink_to("/etc/passwd")
    with pytest.raises(ObjectError, match="link is no plain file"):
        store.keep("b", tmp_path / "a")
    with pytest.raises(ObjectError):
        store.keep("b", tmp_path / "nothing")
    assert store.ids() == ["a"]
    assert content(tmp_path / "a").keys() >= {"pages-1.img"}


@settings(max_examples=150, deadline=None)
@given(st.sampled_from("ab"), st.floats(0, 1, exclude_max=True), st.integers(0, 7))
def test_no_flipped_bit_passes(which: str, place: float, bit: int) -> None:
    with tempfile.TemporaryDirectory() as folder:
        root = Path(folder)
        store = PageStore(root / "store", keep_raw=0)
        first, second = image(root / "a", 1, 2, 3, 0), image(root / "b", 1, 2, 4, 5)
        store.keep("a", first)
        store.keep("b", second)
        (path,) = (root / "store" / "images").glob(f"{which}.*.pack")
        raw = bytearray(path.read_bytes())
        raw[int(place * len(raw))] ^= 1 << bit
        path.write_bytes(raw)
        # a bit that zstd does not use may change; then the bytes must be right nevertheless
        for id, right in (("a", first), ("b", second)):
            try:
                store.materialise(id, root / f"out-{id}")
            except ObjectError as error:
                assert path.stem in str(error) or f"{path.name.split('.')[0]}.image" in str(error)
                assert not (root / f"out-{id}").exists()
                assert store.verify(id)
            else:
                assert content(root / f"out-{id}") == content(right)


@pytest.mark.parametrize("left", [0, 3, 100, 5000])
def test_a_truncated_or_missing_pack_is_named(tmp_path: Path, left: int) -> None:
    store = PageStore(tmp_path / "store", keep_raw=0)
    store.keep("a", image(tmp_path / "a", 1, 2, 3))
    store.keep("b", image(tmp_path / "b", 1, 2, 4))
    (path,) = (tmp_path / "store" / "images").glob("a.*.pack")
    os.truncate(path, left)
    for id in ("a", "b"):
        with pytest.raises(ObjectError, match=r"a\.(image|.*pack)"):
            store.materialise(id, tmp_path / "out")
        assert store.verify(id)
    path.unlink()
    with pytest.raises(ObjectError, match=r"a\..*pack is missing"):
        store.materialise("b", tmp_path / "out")
    # a damaged pack is not built upon
    (tmp_path / "store" / "images" / "a.image").unlink()
    store = PageStore(tmp_path / "store", keep_raw=0)
    store.keep("c", tmp_path / "a")
    store.materialise("c", tmp_path / "out")
    assert content(tmp_path / "out") == content(tmp_path / "a")


def test_raw_images_are_checked_after_a_restart(tmp_path: Path) -> None:
    folder = image(tmp_path / "a", 1, 2, 3)
    right = content(folder)
    PageStore(tmp_path / "store").keep("a", folder)
    shutil.rmtree(folder)
    raw = tmp_path / "store" / "raw" / "a" / "pages-1.img"
    inode = raw.stat().st_ino
    store = PageStore(tmp_path / "store")
    store.materialise("a", tmp_path / "good")
    assert content(tmp_path / "good") == right
    assert (tmp_path / "good" / "pages-1.img").stat().st_ino == inode
    shutil.rmtree(tmp_path / "good")
    data = bytearray(raw.read_bytes())
    data[5000] ^= 1
    raw.write_bytes(data)
    for one in (store, PageStore(tmp_path / "store")):
        one.materialise("a", tmp_path / "out")
        assert content(tmp_path / "out") == right
        shutil.rmtree(tmp_path / "out")


def test_raw_images_stay_within_their_bound(tmp_path: Path) -> None:
    store = PageStore(tmp_path / "store", keep_raw=40_000)
    for number in range(6):
        store.keep(f"c{number}", image(tmp_path / f"c{number}", 1, 2, number))
    held = sorted((tmp_path / "store" / "raw").iterdir())
    assert [path.name for path in held] == ["c3", "c4", "c5"]
    store.materialise("c0", tmp_path / "out")
    assert content(tmp_path / "out") == content(tmp_path / "c0")


def test_forks_do_not_share_their_folders(tmp_path: Path) -> None:
    store = PageStore(tmp_path / "store")
    right = content(image(tmp_path / "a", 1, 2))
    store.keep("a", tmp_path / "a")
    for fork in range(3):
        store.materialise("a", tmp_path / f"fork{fork}")
    shutil.rmtree(tmp_path / "fork0")
    store.drop("a")
    assert content(tmp_path / "fork1") == content(tmp_path / "fork2") == right


operations = st.lists(
    st.one_of(
        st.tuples(st.just("keep"), st.lists(st.integers(0, 9), min_size=1, max_size=8)),
        st.tuples(st.just("drop"), st.integers(0, 9)),
        st.tuples(st.just("collect"), st.sets(st.integers(0, 9))),
        st.tuples(st.just("open"), st.none()),
    ),
    max_size=14,
)


@settings(max_examples=60, deadline=None)
@given(operations)
def test_collect_removes_only_what_nothing_needs(todo: Sequence[tuple[str, object]]) -> None:
    """Against a model: the set of images, and those that this store has kept itself."""
    with tempfile.TemporaryDirectory() as folder:
        root = Path(folder)
        store = PageStore(root / "store", keep_raw=0)
        model: dict[str, tuple[int, ...]] = {}
        young: set[str] = set()
        for number, (what, value) in enumerate(todo):
            if what == "keep":
                store.keep(f"c{number}", image(root / f"c{number}", *value))
                model[f"c{number}"] = tuple(value)
                young.add(f"c{number}")
            elif what == "drop":
                store.drop(f"c{value}")
                model.pop(f"c{value}", None)
            elif what == "collect":
                needed = {f"c{one}" for one in value}
                before = packed(root / "store")
                freed = store.collect(needed)
                assert packed(root / "store") == before - freed
                model = {id: pages for id, pages in model.items() if id in needed | young}
            else:
                store, young = PageStore(root / "store", keep_raw=0), set()
            assert store.ids() == sorted(model)
        for id in model:
            store.materialise(id, root / f"out-{id}")
            assert content(root / f"out-{id}") == content(root / id)
        for id in list(model):
            store.drop(id)
        store.collect([])
        assert packed(root / "store") == 0
        assert list((root / "store" / "images").iterdir()) == []


def test_a_pack_of_which_little_is_needed_is_thinned(tmp_path: Path) -> None:
    store = PageStore(tmp_path / "store", keep_raw=0)
    store.keep("a", image(tmp_path / "a", *range(1, 150)))
    store.keep("b", image(tmp_path / "b", 5, 99, 140, 200))
    store.drop("a")
    assert store.collect(["b"]) > 140 * 4096
    assert packed(tmp_path / "store") < 12 * 4096
    store.materialise("b", tmp_path / "out")
    assert content(tmp_path / "out") == content(tmp_path / "b")
    # pages that went are stored again, those that stayed are not
    assert store.keep("c", image(tmp_path / "c", 5, 7, 99)).bytes_new < 2 * 4096 + 2000
    assert store.verify("c") == []


def test_another_process_that_collects_is_noticed(tmp_path: Path) -> None:
    first, second = PageStore(tmp_path / "store"), PageStore(tmp_path / "store")
    first.keep("a", image(tmp_path / "a", 1, 2, 3))
    second.keep("b", image(tmp_path / "b", 1, 2, 4))
    second.drop("b")
    first.drop("a")
    first.collect([])
    second.keep("c", image(tmp_path / "c", 1, 2, 3))
    fresh = PageStore(tmp_path / "store", keep_raw=0)
    fresh.materialise("c", tmp_path / "out")
    assert content(tmp_path / "out") == content(tmp_path / "a")


def test_nothing_is_collected_while_a_needed_recipe_is_damaged(tmp_path: Path) -> None:
    store = PageStore(tmp_path / "store", keep_raw=0)
    store.keep("a", image(tmp_path / "a", 1, 2, 3))
    store.keep("b", image(tmp_path / "b", 1, 2, 4))
    path = tmp_path / "store" / "images" / "b.image"
    os.truncate(path, path.stat().st_size - 1)
    store.drop("a")
    with pytest.raises(ObjectError, match=r"b\.image"):
        store.collect(["b"])
    assert len(list(path.parent.glob("a.*.pack"))) == 1
    store.drop("b")
    assert store.collect([]) > 0


def test_many_threads_keep_and_collect_at_once(tmp_path: Path) -> None:
    store = PageStore(tmp_path / "store", keep_raw=100_000)
    folders = [image(tmp_path / f"c{one}", *range(1, 60), 100 + one) for one in range(24)]

    def work(number: int) -> None:
        store.keep(f"c{number}", folders[number], like=f"c{number - 4}")
        if number % 5 == 0:
            store.collect(store.ids())
        if number % 3 == 0:
            store.materialise(f"c{number}", tmp_path / f"mid{number}")

    with ThreadPoolExecutor(6) as jobs:
        list(jobs.map(work, range(24)))
    fresh = PageStore(tmp_path / "store", keep_raw=0)
    for number, folder in enumerate(folders):
        fresh.materialise(f"c{number}", tmp_path / f"out{number}")
        assert content(tmp_path / f"out{number}") == content(folder)
    assert packed(tmp_path / "store") < 8 * 60 * 4096


def test_what_a_dead_process_was_working_on_is_removed(tmp_path: Path) -> None:
    store = PageStore(tmp_path / "store")
    (tmp_path / "store" / "work" / f"{2**31 - 1}-left").mkdir()
    with store.scratch() as mine:
        (mine / "file").write_text("x")
        PageStore(tmp_path / "store")
        assert list((tmp_path / "store" / "work").iterdir()) == [mine]
    assert not mine.exists()
