"""Damage that the page cache or the cache of images would hide is found, serves nothing, is not built on."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from image_making import content, image

from support.small_disk import small_disk
from windtunnel.agents.sandbox.store import PageStore, StaleCopy
from windtunnel.store.objects import ObjectError


def pack_of(store: Path, id: str) -> Path:
    (found,) = (store / "images").glob(f"{id}.*.pack")
    return found


def flipped(path: Path, at: int) -> None:
    """As ``dd conv=notrunc`` does it."""
    file = os.open(path, os.O_RDWR)
    old = os.pread(file, 1, at)
    os.pwrite(file, bytes([old[0] ^ 0x55]), at)
    os.close(file)


@pytest.mark.parametrize("scrubbed", [True, False], ids=["after a scrub", "at once"])
def test_a_flipped_byte_is_seen_behind_the_cache_of_images(tmp_path: Path, scrubbed: bool) -> None:
    store, right = PageStore(tmp_path / "store"), content(image(tmp_path / "a", 1, 2, 3))
    store.keep("a", tmp_path / "a")
    store.keep("b", image(tmp_path / "b", 4, 5), like="a")
    flipped(pack_of(tmp_path / "store", "a"), 1000)
    if scrubbed:
        report = store.scrub(["a", "b"])
        assert "does not match its digest" in report.damage["a"][0] or "damaged" in report.damage["a"][0]
        assert report.damage["b"] == [] and report.bytes > 20_000
    with pytest.raises(ObjectError, match=r"image a is damaged: .* of its pages: pack .*a\..*pack"):
        store.materialise("a", tmp_path / "out")
    store.materialise("b", tmp_path / "other")
    # what comes next rests on nothing of it, here and in other processes, and needs no repair
    for number, later in enumerate((store, PageStore(tmp_path / "store"))):
        folder = image(tmp_path / f"next{number}", 1, 2, 3, 9 + number)
        later.keep(f"c{number}", folder, like="a")
        assert later.verify(f"c{number}") == []
        fresh = PageStore(tmp_path / "store", keep_raw=0)
        fresh.materialise(f"c{number}", tmp_path / f"out{number}")
        assert content(tmp_path / f"out{number}") == content(folder)
    assert right["pages-1.img"] in content(tmp_path / "out0")["pages-1.img"]


def test_a_pack_that_was_put_right_serves_again(tmp_path: Path) -> None:
    store = PageStore(tmp_path / "store")
    store.keep("a", image(tmp_path / "a", 1, 2, 3))
    pack = pack_of(tmp_path / "store", "a")
    flipped(pack, 1000)
    assert store.verify("a")
    flipped(pack, 1000)
    assert store.verify("a") == []
    store.materialise("a", tmp_path / "out")
    assert content(tmp_path / "out") == content(tmp_path / "a")


def test_what_was_damaged_is_forgotten_with_its_pack(tmp_path: Path) -> None:
    store = PageStore(tmp_path / "store")
    store.keep("a", image(tmp_path / "a", 1, 2, 3))
    pack = pack_of(tmp_path / "store", "a")
    flipped(pack, 1000)
    assert store.verify("a") and pack.stem in (tmp_path / "store" / "damaged.json").read_text()
    store.drop("a")
    store.collect([])
    assert (tmp_path / "store" / "damaged.json").read_text() == "{}"


def test_a_copy_that_rots_in_the_cache_is_noticed_and_dropped(tmp_path: Path) -> None:
    store, right = PageStore(tmp_path / "store"), content(image(tmp_path / "a", 1, 2, 3))
    store.keep("a", tmp_path / "a")
    raw = tmp_path / "store" / "raw" / "a" / "pages-1.img"
    before = raw.stat()
    flipped(raw, 5000)
    os.utime(raw, ns=(before.st_atime_ns, before.st_mtime_ns))  # a disk that rots moves no time
    with pytest.raises(StaleCopy, match="copy of image a in the cache is damaged"):
        store.begin("a", tmp_path / "wrong")()
    assert not raw.exists()
    store.materialise("a", tmp_path / "out")
    assert content(tmp_path / "out") == right


@pytest.mark.root
def test_a_scrub_reads_the_disk_and_not_the_page_cache(tmp_path: Path) -> None:
    with small_disk(tmp_path, 16 << 20, "-b", "4096") as (disk, point):
        store = PageStore(point / "store")
        store.keep("a", image(tmp_path / "a", 1, 2, 3))
        store.keep("b", image(tmp_path / "b", 7, 8))
        pack = pack_of(point / "store", "a")
        whole = pack.read_bytes()
        at = disk.read_bytes().find(whole[:4096])
        assert at > 0
        flipped(disk, at + 1000)
        assert pack.read_bytes() == whole, "the kernel remembers what the disk no longer has"
        found = store.scrub(["a", "b"])
        assert found.damage["a"] and not found.damage["b"]
        with pytest.raises(ObjectError, match="image a is damaged"):
            store.materialise("a", tmp_path / "out")
