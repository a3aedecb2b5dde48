"""A checkpoint goes elsewhere and comes back: whole, incrementally, and never half."""

from __future__ import annotations

import json
import os
import uuid
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import fsspec
import numpy as np
import pytest

from agents.sandbox.store.image_making import FolderPool, content, damage, image, keep, manifest
from windtunnel.agents.sandbox.model import CheckpointManifest
from windtunnel.agents.sandbox.store import CheckpointStore
from windtunnel.agents.sandbox.store.export import export_checkpoint, import_checkpoint
from windtunnel.base.errors import UserError
from windtunnel.store.objects import LocalFiles, ObjectError, chunks

IDS = ("20260101-000000-a", "20260101-000001-b")


class Side:
    """One host's stores."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.pool = FolderPool(folder / "pool")
        self.store = CheckpointStore(folder / "pages")

    def export(self, manifest: CheckpointManifest, url: str) -> None:
        export_checkpoint(manifest, pool=self.pool, store=self.store, url=url)

    def take_in(self, url: str, name: str = "copy") -> CheckpointManifest:
        return import_checkpoint(url, pool=self.pool, store=self.store, name=name)

    def is_empty(self) -> bool:
        return not (self.pool.snapshots() or self.store.images() or self.store.all()[0])


def tree(folder: Path, seed: int) -> None:
    random = np.random.default_rng(7)
    (folder / "etc").mkdir(parents=True)
    for number in range(8):
        (folder / "etc" / f"{number}.bin").write_bytes(random.bytes(700_000))
        os.utime(folder / "etc" / f"{number}.bin", (1, 1))
    (folder / "note").write_text(f"note {seed}")
    (folder / "link").symlink_to("note")


@pytest.fixture
def here(tmp_path: Path) -> Side:
    side = Side(tmp_path / "here")
    for number, id in enumerate(IDS):
        tree(side.pool.folder / id, number)
        side.store.add(manifest(id), image(tmp_path / id, *range(1, 150), 200 + number))
    return side


@pytest.fixture(params=["path", "file", "memory"])
def url(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[str]:
    if request.param == "memory":
        place = f"memory://{uuid.uuid4().hex}"
        yield place
        fs, root = fsspec.core.url_to_fs(place)
        fs.rm(root, recursive=True)
    else:
        yield ("file://" if request.param == "file" else "") + str(tmp_path / "place")


def objects(url: str) -> dict[str, int]:
    fs, root = fsspec.core.url_to_fs(url)
    return {name[len(root) :]: entry["size"] for name, entry in fs.find(root, detail=True).items()}


def same_tree(first: Path, second: Path) -> bool:
    def listed(folder: Path) -> dict[str, object]:
        return {
            str(path.relative_to(folder)): os.readlink(path)
            if path.is_symlink()
            else path.read_bytes()
            if path.is_file()
            else None
            for path in folder.rglob("*")
        }

    return listed(first) == listed(second)


def test_another_host_goes_on_from_it(here: Side, url: str, tmp_path: Path) -> None:
    for id in IDS:
        here.export(here.store.load(id), url)
        here.export(here.store.load(id), url)
    there = Side(tmp_path / "there")
    for wanted, id in (("", IDS[1]), (f"#{IDS[0]}", IDS[0]), ("#20260101-000001", IDS[1])):
        got = there.take_in(url + wanted, "copy")
        assert there.store.load(got.id) == got
        old = here.store.load(id)
        assert got.box == got.spec.name == "copy"
        assert got.parent is None
        assert got.image is not None and got.files is not None and old.image is not None
        assert got.image.id == got.files.id == got.id != id
        assert (got.turn, got.shells, got.reasons) == (old.turn, old.shells, old.reasons)
        assert got.image.references == old.image.references
        there.store.materialise(got.image.id, tmp_path / f"out{wanted}")
        assert content(tmp_path / f"out{wanted}") == content(tmp_path / id)
        assert same_tree(there.pool.folder / got.files.id, here.pool.folder / id)


def test_only_what_is_missing_is_sent(here: Side, tmp_path: Path) -> None:
    url = str(tmp_path / "place")
    here.export(here.store.load(IDS[0]), url)
    before = objects(url)
    here.export(here.store.load(IDS[1]), url)
    after = objects(url)
    added = {name: size for name, size in after.items() if name not in before}
    assert {name: after[name] for name in before} == before
    assert sum(before.values()) > 6_000_000
    # of the image the piece with the page; of the files those with the first folder's time and the last file
    assert len([name for name in added if name.startswith("/chunks")]) <= 4
    assert sum(added.values()) < sum(before.values()) / 2


def test_pages_of_other_sandboxes_are_not_sent(here: Side, tmp_path: Path) -> None:
    secret = b"a secret of another sandbox".ljust(4096, b"!")
    folder = image(tmp_path / "other", 1, 2)
    (folder / "pages-2.img").write_bytes(secret + (tmp_path / IDS[1] / "pages-1.img").read_bytes())
    fresh = CheckpointStore(tmp_path / "pages")
    keep(fresh, "other", folder)
    keep(fresh, IDS[1], tmp_path / IDS[1])
    export_checkpoint(here.store.load(IDS[1]), pool=here.pool, store=fresh, url=str(tmp_path / "place"))
    place = LocalFiles(str(tmp_path / "place"))
    sent = [chunks.get(place, file.name) for file in (tmp_path / "place" / "chunks").rglob("*.zst")]
    assert len(sent) > 5 and not any(b"another sandbox" in data for data in sent)


def test_parts_older_than_the_checkpoint_stay_apart_from_it(here: Side, tmp_path: Path) -> None:
    old = here.store.load(IDS[0])
    newer = replace(old, id="20260101-000009-c", parent=IDS[0])
    here.export(newer, str(tmp_path / "place"))
    there = Side(tmp_path / "there")
    got = there.take_in(str(tmp_path / "place"))
    assert got.image is not None and got.files is not None
    assert len({got.id, got.image.id, got.files.id}) == 3
    assert damage(there.store, got.image.id) == []
    bare = replace(old, id="20260101-000010-d", image=None)
    here.export(bare, str(tmp_path / "place"))
    assert there.take_in(str(tmp_path / "place")).image is None


def test_what_is_damaged_there_is_not_built_upon(here: Side, tmp_path: Path) -> None:
    place = tmp_path / "place"
    here.export(here.store.load(IDS[0]), str(place))
    pieces = json.loads((place / "checkpoints" / f"{IDS[0]}.json").read_text())["value"]["image"]
    os.truncate(place / "chunks" / pieces[0]["name"][:2] / pieces[0]["name"], 100)
    here.export(here.store.load(IDS[1]), str(place))
    there = Side(tmp_path / "there")
    got = there.take_in(f"{place}#{IDS[1]}")
    assert damage(there.store, got.id) == []


def test_a_failure_of_this_host_undoes_the_import(here: Side, tmp_path: Path) -> None:
    here.export(here.store.load(IDS[0]), str(tmp_path / "place"))
    there = Side(tmp_path / "there")
    with there.store.transaction() as db:
        db.execute("DROP TABLE manifest")
    with pytest.raises(ObjectError, match="cannot be stored"):
        there.take_in(str(tmp_path / "place"))
    assert there.pool.snapshots() == there.store.images() == []


def test_urls_that_cannot_be_used(here: Side, tmp_path: Path) -> None:
    with pytest.raises(UserError, match="nonsense"):
        here.take_in("nonsense://x")
    with pytest.raises(UserError, match="holds no complete checkpoint"):
        here.take_in(str(tmp_path / "nothing"))
    (tmp_path / "file").write_text("x")
    with pytest.raises(ObjectError, match=r"cannot be exported: .*Not a directory: .*file/"):
        here.export(here.store.load(IDS[0]), str(tmp_path / "file"))
