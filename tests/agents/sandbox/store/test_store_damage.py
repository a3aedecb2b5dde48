"""Damage that the page cache or the cache of images would hide is found, serves nothing, is not built on."""

from __future__ import annotations

import os
import tempfile
from pathlib import Path

import pytest
from hurt import flip_image, flip_in_place
from hypothesis import given, settings
from hypothesis import strategies as st
from image_making import cold, content, image, keep, manifest, write

from support.small_disk import small_disk
from windtunnel.agents.sandbox.store import StaleCopy, Store
from windtunnel.store.objects import ObjectError


@pytest.mark.conformance
@settings(max_examples=150, deadline=None)
@given(st.floats(0, 1, exclude_max=True), st.integers(0, 7))
def test_no_flipped_bit_passes(place: float, bit: int) -> None:
    """Anywhere in the file: what comes out is right, or nothing does."""
    with tempfile.TemporaryDirectory() as folder:
        root = Path(folder)
        store, whole = Store(root / "store"), manifest("m")
        right = {id: content(image(root / id, 1, 2, 3 + number)) for number, id in enumerate("ab")}
        for id in right:
            keep(store, id, root / id)
        write(store, whole)
        store.settle(whole=True)
        store.close()
        path = store.path
        flip_in_place(path, int(place * path.stat().st_size), 1 << bit)
        try:
            store = cold(root / "store")
        except ObjectError as error:
            assert str(path) in str(error)
            return
        for id in right:
            try:
                store.materialise(id, root / f"out-{id}")
            except ObjectError:
                assert not (root / f"out-{id}").exists()
            else:
                assert content(root / f"out-{id}") == right[id]
        try:
            assert store.load("m") == whole
        except ObjectError as error:
            assert "m" in str(error)


@pytest.mark.parametrize("scrubbed", [True, False], ids=["after a scrub", "at a restore"])
def test_a_damaged_page_serves_nothing_and_is_stored_anew(tmp_path: Path, scrubbed: bool) -> None:
    store, right = Store(tmp_path / "store"), content(image(tmp_path / "a", 1, 2, 3))
    keep(store, "a", tmp_path / "a")
    keep(store, "b", image(tmp_path / "b", 4, 5), like="a")
    flip_image(store, "a")
    if scrubbed:
        report = store.scrub(["a", "b"])
        assert "damaged" in report.damage["a"][0]
        assert report.damage["b"] == [] and report.bytes > 10_000
    else:
        store.close()
        store = cold(tmp_path / "store")
        with pytest.raises(ObjectError, match="is damaged"):
            store.materialise("a", tmp_path / "out")
    with pytest.raises(ObjectError, match=r"image a is damaged: \d of its pages: frame \d of .*store.db"):
        store.materialise("a", tmp_path / "out")
    store.materialise("b", tmp_path / "other")
    # what comes next rests on nothing of it, here and in the next process, and needs no repair
    for number in range(2):
        folder = image(tmp_path / f"next{number}", 1, 2, 3, 9 + number)
        keep(store, f"c{number}", folder, like="a")
        assert store.verify(f"c{number}") == []
        store.close()
        store = cold(tmp_path / "store")
        store.materialise(f"c{number}", tmp_path / f"out{number}")
        assert content(tmp_path / f"out{number}") == content(folder)
    assert right["pages-1.img"] in content(tmp_path / "out0")["pages-1.img"]
    assert store.verify("a")
    store.drop(images=["a"])
    store.collect()
    assert [store.verify(id) for id in store.images()] == [[]] * 3


def test_what_was_put_right_serves_again(tmp_path: Path) -> None:
    store = Store(tmp_path / "store")
    keep(store, "a", image(tmp_path / "a", 1, 2, 3))
    place = flip_image(store, "a")
    assert store.verify("a")
    flip_in_place(*place)
    assert store.verify("a") == []
    store.materialise("a", tmp_path / "out")
    assert content(tmp_path / "out") == content(tmp_path / "a")


def test_nothing_is_collected_while_a_needed_recipe_is_damaged(tmp_path: Path) -> None:
    store = Store(tmp_path / "store")
    keep(store, "a", image(tmp_path / "a", 1, 2, 3))
    keep(store, "b", image(tmp_path / "b", 1, 2, 4))
    with store.transaction() as db:
        (recipe,) = db.execute("SELECT recipe FROM image WHERE id='b'").fetchone()
        db.execute("UPDATE image SET recipe=? WHERE id='b'", (recipe[:-1],))
    store.drop(images=["a"])
    with pytest.raises(ObjectError, match=r"nothing is collected .*image b is damaged"):
        store.collect()
    assert store.verify("b")
    with store.transaction() as db:
        db.execute("UPDATE image SET recipe=? WHERE id='b'", (recipe,))
    assert store.collect() >= 0
    assert store.verify("b") == []


def test_a_copy_that_rots_in_the_cache_is_noticed_and_dropped(tmp_path: Path) -> None:
    store, right = Store(tmp_path / "store"), content(image(tmp_path / "a", 1, 2, 3))
    keep(store, "a", tmp_path / "a")
    raw = tmp_path / "store" / "raw" / "a" / "pages-1.img"
    before = raw.stat()
    flip_in_place(raw, 5000)
    os.utime(raw, ns=(before.st_atime_ns, before.st_mtime_ns))  # a disk that rots moves no time
    with pytest.raises(StaleCopy, match="copy of image a is damaged"):
        store.begin("a", tmp_path / "wrong")()
    assert not raw.exists()
    store.materialise("a", tmp_path / "out")
    assert content(tmp_path / "out") == right


@pytest.mark.root
def test_a_scrub_reads_the_disk_and_not_the_page_cache(tmp_path: Path) -> None:
    with small_disk(tmp_path, 16 << 20, "-b", "4096") as (disk, point):
        store = Store(point / "store")
        keep(store, "a", image(tmp_path / "a", 1, 2, 3))
        keep(store, "b", image(tmp_path / "b", 7, 8))
        place, at, _ = flip_image(store, "a", test=True)
        os.sync()
        remembered = place.read_bytes()
        page, below = remembered[at // 4096 * 4096 :][:4096], disk.read_bytes()
        copies = [begin for begin in range(0, len(below), 4096) if below[begin : begin + 4096] == page]
        assert copies
        for begin in copies:
            flip_in_place(disk, begin + at % 4096)
        assert place.read_bytes() == remembered, "the kernel remembers what the disk no longer has"
        found = store.scrub(["a", "b"])
        assert found.damage["a"] and not found.damage["b"]
        with pytest.raises(ObjectError, match="image a is damaged"):
            store.materialise("a", tmp_path / "out")
        store.close()
