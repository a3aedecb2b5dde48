"""Damage is found when an image is written out, serves nothing, and is not built on."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from agents.sandbox.hurt import flip_image, flip_in_place
from agents.sandbox.store.image_making import cold, content, damage, image, keep
from windtunnel.agents.sandbox.store import CheckpointStore, StaleCopy
from windtunnel.store.objects import ObjectError


def test_a_damaged_page_serves_nothing_and_is_stored_anew(tmp_path: Path) -> None:
    store, right = CheckpointStore(tmp_path / "store"), content(image(tmp_path / "a", 1, 2, 3))
    keep(store, "a", tmp_path / "a")
    keep(store, "b", image(tmp_path / "b", 4, 5), like="a")
    flip_image(store, "a")
    store.close()
    store = cold(tmp_path / "store")
    with pytest.raises(ObjectError, match=r"image a is damaged: frame \d of .*store.db"):
        store.materialise("a", tmp_path / "out")
    store.materialise("b", tmp_path / "other")
    # what comes next rests on nothing of it, here and in the next process, and needs no repair
    for number in range(2):
        folder = image(tmp_path / f"next{number}", 1, 2, 3, 9 + number)
        keep(store, f"c{number}", folder, like="a")
        assert damage(store, f"c{number}") == []
        store.close()
        store = cold(tmp_path / "store")
        store.materialise(f"c{number}", tmp_path / f"out{number}")
        assert content(tmp_path / f"out{number}") == content(folder)
    assert right["pages-1.img"] in content(tmp_path / "out0")["pages-1.img"]
    assert damage(store, "a")
    store.drop(images=["a"])
    store.collect()
    assert damage(store) == []


def test_nothing_is_collected_while_a_needed_recipe_is_damaged(tmp_path: Path) -> None:
    store = CheckpointStore(tmp_path / "store")
    keep(store, "a", image(tmp_path / "a", 1, 2, 3))
    keep(store, "b", image(tmp_path / "b", 1, 2, 4))
    with store.transaction() as db:
        (recipe,) = db.execute("SELECT recipe FROM image WHERE id='b'").fetchone()
        db.execute("UPDATE image SET recipe=? WHERE id='b'", (recipe[:-1],))
    store.drop(images=["a"])
    with pytest.raises(ObjectError, match=r"nothing is collected .*image b is damaged"):
        store.collect()
    assert damage(store, "b")
    with store.transaction() as db:
        db.execute("UPDATE image SET recipe=? WHERE id='b'", (recipe,))
    assert store.collect() >= 0
    assert damage(store, "b") == []


def test_a_copy_that_rots_in_the_cache_is_noticed_and_dropped(tmp_path: Path) -> None:
    store, right = CheckpointStore(tmp_path / "store"), content(image(tmp_path / "a", 1, 2, 3))
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
