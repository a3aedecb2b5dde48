"""Take a checkpoint in that was exported here or on another host (see ``export`` for the layout).

Everything is fetched and checked before any of it is visible: a place that lacks an object, or has a wrong
one, leaves this host as it was.
"""

from __future__ import annotations

import contextlib
import hashlib
import io
import re
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import BinaryIO, Protocol, cast

import zstandard

from windtunnel.agents.sandbox.live.images import manifests as manifest_files
from windtunnel.agents.sandbox.live.images import outlet
from windtunnel.agents.sandbox.live.images.chunks import BLOCK, MOST
from windtunnel.agents.sandbox.live.images.export import TRANSFERS, Contents, Piece, complete, contents
from windtunnel.agents.sandbox.live.images.fault import ImageError
from windtunnel.agents.sandbox.live.images.manifests import Manifests, new_id
from windtunnel.agents.sandbox.live.images.packs import decompress, opened
from windtunnel.agents.sandbox.live.images.remote import Remote
from windtunnel.agents.sandbox.live.images.store import PageStore
from windtunnel.agents.sandbox.model import Manifest
from windtunnel.base.errors import UserError

_PACK = re.compile(r"packs/[A-Za-z0-9][A-Za-z0-9._-]*\.pack")
_PIECE = re.compile(r"pieces/[0-9a-f]{2}/([0-9a-f]{64})\.zst")


class Receiver(Protocol):
    """What of the pool of files an import needs."""

    kind: str

    def receive(self, snapshot: str, source: BinaryIO) -> None: ...

    def drop_snapshot(self, snapshot: str) -> None: ...


def import_checkpoint(
    url: str, *, pool: Receiver, pages: PageStore, manifests: Manifests, name: str
) -> Manifest:
    """Take the checkpoint at ``url`` in, as the first one of sandbox ``name``; returns its new manifest.

    ``url`` may end in ``#`` and an id, or the beginning of one; without it the newest one there is meant.
    """
    place, _, wanted = url.partition("#")
    remote = Remote(place)
    id = _chosen(remote, wanted)
    told = contents(remote, id)
    where = f"checkpoints/{id}/manifest.json"
    data = remote.read(where)
    if hashlib.sha256(data).hexdigest() != told.manifest:
        raise ImageError(f"{remote.name(where)} is damaged: it does not match its checksum")
    old = manifest_files.from_bytes(data, remote.name(where))
    _plausible(remote, id, old, told)
    try:
        with pages.scratch() as work:
            _download(remote, [*told.packs, *told.files], work)
            if told.packs:
                _images(work, told.packs[0])
            for piece in dict.fromkeys(told.files):
                _plain(remote, work, piece)
            return _publish(old, told, remote, work, pool, pages, manifests, name)
    except OSError as error:
        raise ImageError(f"checkpoint {id} at {remote.url} cannot be imported: {error}") from error


def _images(work: Path, own: Piece) -> None:
    """Put the process image together from its packs, which checks every page."""
    with opened(_local(work, own)) as pack:
        recipe = pack.recipe()
    (work / "images").mkdir()
    with ThreadPoolExecutor(TRANSFERS) as jobs:
        outlet.write(work, recipe, work / "images", jobs)


def _chosen(remote: Remote, wanted: str) -> str:
    ids = [id for id in complete(remote) if id.startswith(wanted)]
    if not ids:
        raise UserError(f"import: {remote.url} holds no complete checkpoint{f' {wanted}' if wanted else ''}")
    if wanted and wanted not in ids and len(ids) > 1:
        raise UserError(f"import: checkpoint {wanted!r} is ambiguous: {', '.join(ids[:5])}")
    return wanted if wanted in ids else ids[-1]


def _plausible(remote: Remote, id: str, manifest: Manifest, told: Contents) -> None:
    """Names become paths here, so they are accepted only in the form that an export gives them."""
    odd = [piece.name for piece in told.packs if not _PACK.fullmatch(piece.name)]
    odd += [piece.name for piece in told.files if not _PIECE.fullmatch(piece.name)]
    lacking = bool(manifest.image) != bool(told.packs) or bool(manifest.files) != bool(told.files)
    if odd or lacking or manifest.id != id:
        what = f"names {odd[0]!r}" if odd else "does not fit its manifest"
        raise ImageError(f"{remote.name(f'checkpoints/{id}/contents.json')} {what}")


def _local(work: Path, piece: Piece) -> Path:
    return work / piece.name.rsplit("/", 1)[-1]


def _download(remote: Remote, pieces: Sequence[Piece], work: Path) -> None:
    with ThreadPoolExecutor(TRANSFERS, "windtunnel-import") as jobs:
        waiting = [
            jobs.submit(remote.download, piece.name, _local(work, piece), piece.bytes, piece.check)
            for piece in dict.fromkeys(pieces)
        ]
        try:
            for job in waiting:
                job.result()
        finally:
            jobs.shutdown(cancel_futures=True)


def _plain(remote: Remote, work: Path, piece: Piece) -> bytes:
    """The plain bytes of a piece of the stream of files, checked against its name."""
    packed = _local(work, piece).read_bytes()
    try:
        size = zstandard.frame_content_size(packed)
        # a piece has a greatest size, so none can fill the memory
        data = decompress(packed, min(size, MOST * BLOCK))
    except zstandard.ZstdError as error:
        raise ImageError(f"{remote.name(piece.name)} is damaged: {error}") from None
    if hashlib.sha256(data).hexdigest() not in piece.name:
        raise ImageError(f"{remote.name(piece.name)} is damaged: its bytes do not match its name")
    return data


class _Stream(io.RawIOBase):
    """The pieces as one file to read from."""

    def __init__(self, pieces: Iterator[bytes]) -> None:
        self._pieces = pieces
        self._left = memoryview(b"")

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: object) -> int:
        into = memoryview(buffer).cast("B")  # type: ignore[arg-type]
        while not self._left:
            piece = next(self._pieces, None)
            if piece is None:
                return 0
            self._left = memoryview(piece)
        count = min(len(into), len(self._left))
        into[:count] = self._left[:count]
        self._left = self._left[count:]
        return count


def _publish(
    old: Manifest,
    told: Contents,
    remote: Remote,
    work: Path,
    pool: Receiver,
    pages: PageStore,
    manifests: Manifests,
    name: str,
) -> Manifest:
    """Put files and image where they belong and write the manifest; on a failure all is undone."""
    id = new_id()
    # parts that were older than the checkpoint stay told apart from it: a restore replays shells over them
    image = old.image and replace(old.image, id=id if old.image.id == old.id else f"{id}-image")
    files = old.files and replace(
        old.files, id=id if old.files.id == old.id else f"{id}-files", kind=pool.kind, bytes_new=0
    )
    try:
        if files is not None:
            stream = io.BufferedReader(_Stream(_plain(remote, work, piece) for piece in told.files), 1 << 20)
            pool.receive(files.id, cast(BinaryIO, stream))
        if image is not None:
            kept = pages.keep(image.id, work / "images")
            image = replace(image, bytes_raw=kept.bytes_raw, bytes_new=kept.bytes_new)
        manifest = replace(
            old,
            id=id,
            box=name,
            parent=None,
            spec=replace(old.spec, name=name),
            files=files,
            image=image,
            pinned=False,
        )
        manifests.write(manifest)
    except BaseException:
        with contextlib.suppress(Exception):
            if files is not None:
                pool.drop_snapshot(files.id)
        with contextlib.suppress(Exception):
            if image is not None:
                pages.drop(image.id)
        raise
    return manifest
