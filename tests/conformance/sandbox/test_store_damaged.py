"""Every bit, every object and every write of a store or an export may be the one that fails."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from threading import Lock
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from agents.sandbox.hurt import flip_in_place
from agents.sandbox.store.image_making import cold, content, damage, image, keep, manifest
from agents.sandbox.store.test_export import IDS, Side, here
from windtunnel.agents.sandbox.store import CheckpointStore
from windtunnel.base.errors import UserError
from windtunnel.store.objects import LocalFiles, ObjectError

__all__ = ["here"]


@settings(max_examples=150, deadline=None)
@given(st.floats(0, 1, exclude_max=True), st.integers(0, 7))
def test_no_flipped_bit_passes(place: float, bit: int) -> None:
    """Anywhere in the file: what comes out is right, or nothing does."""
    with tempfile.TemporaryDirectory() as folder:
        root = Path(folder)
        store, whole = CheckpointStore(root / "store"), manifest("m")
        right = {id: content(image(root / id, 1, 2, 3 + number)) for number, id in enumerate("ab")}
        for id in right:
            keep(store, id, root / id)
        store.add(whole)
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


def test_threads_keep_restore_and_collect_at_once(tmp_path: Path) -> None:
    store = CheckpointStore(tmp_path / "store")
    folders = [image(tmp_path / f"c{index}", *range(1, 60), 100 + index) for index in range(24)]

    def work(number: int) -> None:
        keep(store, f"c{number}", folders[number], like=f"c{number - 4}")
        if number % 5 == 0:
            store.collect()
        if number % 3 == 0:
            store.materialise(f"c{number}", tmp_path / f"mid{number}")

    with ThreadPoolExecutor(6) as jobs:
        list(jobs.map(work, range(24)))
    store.close()
    store = cold(tmp_path / "store")
    for number, folder in enumerate(folders):
        store.materialise(f"c{number}", tmp_path / f"out{number}")
        assert content(tmp_path / f"out{number}") == content(folder)


def test_damage_at_the_place_is_named_and_nothing_is_taken_in(here: Side, tmp_path: Path) -> None:
    def damaged(place: Path) -> Iterator[tuple[Path, str]]:
        """Damage every object in turn: flip a bit, cut it short, remove it."""
        for path in sorted(place.rglob("*")):
            if not path.is_file():
                continue
            data = path.read_bytes()
            middle = len(data) // 2
            for what, wrong in (
                ("flip", data[:middle] + bytes([data[middle] ^ 4]) + data[middle + 1 :]),
                ("cut", data[:-1]),
                ("gone", None),
            ):
                if wrong is None:
                    path.unlink()
                else:
                    path.write_bytes(wrong)
                yield path, what
            path.write_bytes(data)

    place = tmp_path / "place"
    here.export(here.store.load(IDS[0]), str(place))
    there = Side(tmp_path / "there")
    for path, what in damaged(place):
        if path.parent.name == "checkpoints" and what == "gone":
            with pytest.raises(UserError, match="holds no complete checkpoint"):
                there.take_in(str(place))
        else:
            with pytest.raises(ObjectError) as raised:
                there.take_in(str(place))
            assert f"{place}/" in str(raised.value)
            assert path.name in str(raised.value)
        assert there.is_empty()
        assert list((there.folder / "pages" / "work").iterdir()) == []
    assert there.take_in(str(place)).box == "copy"


def test_an_export_that_breaks_off_is_no_checkpoint(
    here: Side, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real, counting = LocalFiles._write, Lock()
    total = stop = 0

    def counted(self: LocalFiles, name: str, blocks: Any) -> None:
        nonlocal total
        with counting:  # several threads write
            total += 1
            fails = total == stop
        if fails:
            raise OSError(f"{name} cannot be written: the line is dead")
        real(self, name, blocks)

    monkeypatch.setattr(LocalFiles, "_write", counted)
    there = Side(tmp_path / "there")
    here.export(here.store.load(IDS[1]), str(tmp_path / "whole"))
    places = [str(tmp_path / f"place{at}") for at in range(1, total + 1)]
    assert len(places) > 8
    for at, place in enumerate(places, 1):
        total, stop = 0, at
        with pytest.raises(ObjectError, match="the line is dead"):
            here.export(here.store.load(IDS[0]), place)
        with pytest.raises(UserError, match="no complete checkpoint"):
            there.take_in(place)
    stop = 0
    for place in (places[0], places[len(places) // 2], places[-1]):
        here.export(here.store.load(IDS[0]), place)
        got = there.take_in(place)
        assert damage(there.store, got.id) == []
