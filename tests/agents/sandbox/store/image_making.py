"""Folders that look like process images, and a stand-in for the pool of files."""

from __future__ import annotations

import io
import shutil
import tarfile
from pathlib import Path
from typing import BinaryIO

import numpy as np

from windtunnel.agents.sandbox.model import (
    CheckpointManifest,
    FilesPart,
    ImagePart,
    Lack,
    SandboxLimits,
    SandboxSpec,
    ShellState,
    TurnClass,
)
from windtunnel.agents.sandbox.store import CheckpointStore
from windtunnel.store.objects import ObjectError


def page(seed: int) -> bytes:
    """A page that is the same for the same seed; 0: zeros."""
    return np.random.default_rng(seed).bytes(4096) if seed else bytes(4096)


def image_folder(folder: Path, files: dict[str, bytes]) -> Path:
    folder.mkdir(parents=True)
    for name, data in files.items():
        (folder / name).write_bytes(data)
    return folder


def keep(store: CheckpointStore, id: str, images: Path, *, like: str = "") -> ImagePart:
    kept = store.add(manifest(id, image=ImagePart(id, 7, (), (), ())), images, like=like).image
    assert kept is not None
    return kept


def stored(store: CheckpointStore) -> int:
    """Bytes of the store's file that hold something."""
    with store.reading() as db:
        return store.used(db)


def frames(store: CheckpointStore) -> int:
    with store.reading() as db:
        return int(db.execute("SELECT count(*) FROM frame").fetchone()[0])


def damage(store: CheckpointStore, *ids: str) -> list[str]:
    """What the store says of these images, or of all, when it writes them out from its pages."""
    store.copies.forget_all()
    words = []
    for id in ids or store.images():
        with store.scratch() as work:
            try:
                store.materialise(id, work / "out")
            except ObjectError as error:
                words.append(str(error))
    store.copies.forget_all()
    return words


def cold(folder: Path) -> CheckpointStore:
    """The store as the next process opens it, which has no copies of images."""
    return CheckpointStore(folder)


def image(folder: Path, *seeds: int) -> Path:
    """An image with these pages of memory and some small files."""
    return image_folder(
        folder,
        {
            "pages-1.img": b"".join(page(seed) for seed in seeds),
            "core-1.img": b"core" + bytes(seed % 256 for seed in seeds),
            "empty.img": b"",
        },
    )


def content(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir()}


def manifest(id: str = "20260101-000000-abc", **fields: object) -> CheckpointManifest:
    plain: dict[str, object] = {
        "box": "demo",
        "turn": 3,
        "parent": None,
        "turn_class": TurnClass.FULL,
        "required": TurnClass.FULL,
        "reasons": ("python3 (7) started",),
        "created": 1.5,
        "files": FilesPart(id, "copy", 9),
        "image": ImagePart(id, 7, ("init", "bash"), ("/bin/bash",), ("/bin/bash",), 8192, 4096),
        "shells": (ShellState("main", "declare -- a='ü'", "f00"),),
        "spec": SandboxSpec(
            "demo", limits=SandboxLimits(cpus=1), environment={"A": "b"}, services={"web": "serve"}
        ),
        "restorable": ("files",),
        "lacks": (Lack("processes", "sleep 5 (process 7 inside)", "it is watched"),),
    }
    return CheckpointManifest(id=id, **{**plain, **fields})  # type: ignore[arg-type]


class FolderPool:
    """Snapshots as plain folders; sent as tar."""

    kind = "copy"

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        folder.mkdir(parents=True, exist_ok=True)

    def send(self, snapshot: str, out: BinaryIO) -> None:
        with tarfile.open(fileobj=out, mode="w|", format=tarfile.PAX_FORMAT) as tar:
            for path in sorted((self.folder / snapshot).rglob("*")):
                tar.add(path, str(path.relative_to(self.folder / snapshot)), recursive=False)

    def receive(self, snapshot: str, source: BinaryIO) -> None:
        with tarfile.open(fileobj=io.BufferedReader(source), mode="r|") as tar:  # type: ignore[type-var]
            tar.extractall(self.folder / snapshot, filter="data")

    def drop_snapshot(self, snapshot: str) -> None:
        shutil.rmtree(self.folder / snapshot, ignore_errors=True)

    def snapshots(self) -> list[str]:
        return sorted(path.name for path in self.folder.iterdir())
