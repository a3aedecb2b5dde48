"""A checkpoint somewhere else, complete in itself, so that another host can go on from it.

Layout below the URL:

- ``packs/<name>.pack``: new pages of one process image and its recipe (see ``packs``);
- ``pieces/<2 digits>/<sha256>.zst``: a piece of a stream of files (see ``chunks``), named by its plain bytes;
- ``checkpoints/<id>/manifest.json``: as in the home folder (see ``manifests``);
- ``checkpoints/<id>/contents.json``: the SHA-256 of the manifest, and name, size and SHA-256 of every pack
  and piece that the checkpoint needs, sealed with a checksum;
- ``checkpoints/<id>/complete``: the SHA-256 of ``contents.json``, written last. Without it there is no
  checkpoint.

What complete checkpoints already brought there is not sent again. Pages of other sandboxes are never sent:
a pack is made for the export, and holds only pages of this image.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
from collections import deque
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO, Protocol, cast

from windtunnel.agents.sandbox.live.images import intake, plain
from windtunnel.agents.sandbox.live.images.chunks import Cutter
from windtunnel.agents.sandbox.live.images.fault import ImageError
from windtunnel.agents.sandbox.live.images.intake import Known
from windtunnel.agents.sandbox.live.images.manifests import to_bytes
from windtunnel.agents.sandbox.live.images.packs import Pack, compress, opened
from windtunnel.agents.sandbox.live.images.remote import Remote
from windtunnel.agents.sandbox.live.images.store import PageStore
from windtunnel.agents.sandbox.model import Manifest

FORMAT = 1
TRANSFERS = 8


class Sender(Protocol):
    """What of the pool of files an export needs."""

    def send(self, snapshot: str, out: BinaryIO) -> None: ...


@dataclass(frozen=True)
class Piece:
    """An object that a checkpoint needs. ``bytes`` and ``check`` (SHA-256) are of the object as it lies."""

    name: str
    bytes: int
    check: str


@dataclass(frozen=True)
class Contents:
    """What a checkpoint consists of. ``files``: the pieces of the stream of files, in order; ``packs``: the
    first is that of its image."""

    manifest: str
    packs: tuple[Piece, ...]
    files: tuple[Piece, ...]


def export_checkpoint(manifest: Manifest, *, pool: Sender, pages: PageStore, url: str) -> None:
    """Write ``manifest`` and all that it needs to ``url``. A part that was written before a failure is no
    checkpoint there, and does no harm."""
    remote = Remote(url)
    if remote.exists(f"checkpoints/{manifest.id}/complete"):
        return
    packs: dict[str, Piece] = {}
    pieces: dict[str, Piece] = {}
    for id in complete(remote):
        # one that is damaged spoils no other: what only it could tell is sent again
        with contextlib.suppress(ImageError):
            held = contents(remote, id)
            packs.update((piece.name, piece) for piece in held.packs)
            pieces.update((piece.name, piece) for piece in held.files)
    try:
        with ThreadPoolExecutor(TRANSFERS, "windtunnel-export") as jobs, pages.scratch() as work:
            image = _image(manifest, pages, remote, packs, work, jobs) if manifest.image else ()
            files = _files(manifest, pool, remote, pieces, jobs) if manifest.files else ()
    except OSError as error:
        raise ImageError(f"checkpoint {manifest.id} cannot be exported: {error}") from error
    whole = to_bytes(manifest)
    told = Contents(hashlib.sha256(whole).hexdigest(), image, files)
    sealed = plain.sealed("contents", FORMAT, plain.to_plain(told))
    folder = f"checkpoints/{manifest.id}"
    remote.write(f"{folder}/manifest.json", whole)
    remote.write(f"{folder}/contents.json", sealed)
    if remote.local:
        # the system may keep written files in memory; the marker must not reach the disk before them
        os.sync()
    remote.write(f"{folder}/complete", hashlib.sha256(sealed).hexdigest().encode())
    if remote.local:
        os.sync()


def complete(remote: Remote) -> list[str]:
    """Ids of the checkpoints that are whole at a place."""
    return [id for id in remote.folders("checkpoints") if remote.exists(f"checkpoints/{id}/complete")]


def contents(remote: Remote, id: str) -> Contents:
    """What a complete checkpoint consists of, checked."""
    where = f"checkpoints/{id}/contents.json"
    data = remote.read(where)
    if remote.read(f"checkpoints/{id}/complete").decode(errors="replace") != hashlib.sha256(data).hexdigest():
        raise ImageError(f"{remote.name(where)} is damaged: it does not match its checksum")
    value = plain.unsealed("contents", FORMAT, data, remote.name(where))
    try:
        return plain.from_plain(Contents, value)
    except (TypeError, ValueError, KeyError) as error:
        raise ImageError(f"{remote.name(where)} is damaged: {error}") from None


def _image(
    manifest: Manifest,
    pages: PageStore,
    remote: Remote,
    held: dict[str, Piece],
    work: Path,
    jobs: ThreadPoolExecutor,
) -> tuple[Piece, ...]:
    """Send the pages that are not there yet, and the recipe; returns all packs of the image."""
    assert manifest.image is not None
    known = Known(0)
    for piece in held.values():
        with contextlib.suppress(ImageError), _remote_pack(remote, piece) as pack:
            index = pack.index()
            known.add(_stem(piece.name), index.digests.tobytes(), index.numbers.tolist())
    images, made = work / "images", work / "made"
    made.mkdir()
    pages.materialise(manifest.image.id, images)
    intake.keep(made, manifest.image.id, images, known, None, jobs)
    (path,) = made.glob("*.pack")
    with opened(path) as pack:
        recipe = pack.recipe()
    name = f"packs/{path.name}"
    remote.upload(path, name)
    own = Piece(name, path.stat().st_size, _sha256(path))
    return (own, *(held[f"packs/{other}.pack"] for other in recipe.packs[1:]))


def _remote_pack(remote: Remote, piece: Piece) -> Pack:
    if remote.size(piece.name) != piece.bytes:
        raise ImageError(f"{remote.name(piece.name)} is cut short")
    name = remote.name(piece.name)
    return Pack(name, piece.bytes, lambda at, length: remote.read(piece.name, at, length), lambda: None)


def _files(
    manifest: Manifest, pool: Sender, remote: Remote, held: dict[str, Piece], jobs: ThreadPoolExecutor
) -> tuple[Piece, ...]:
    """Send the pieces of the stream of files that are not there yet; returns all of them, in order."""
    assert manifest.files is not None
    pieces: list[str] = []
    waiting: deque[Future[Piece]] = deque()

    def take(data: bytes) -> None:
        digest = hashlib.sha256(data).hexdigest()
        name = f"pieces/{digest[:2]}/{digest}.zst"
        pieces.append(name)
        if name in held or name in asked:
            return
        asked.add(name)
        waiting.append(jobs.submit(_send, remote, name, data))
        if len(waiting) > 2 * TRANSFERS:
            done()

    def done() -> None:
        piece = waiting.popleft().result()
        held[piece.name] = piece

    asked: set[str] = set()
    out = Cutter(take)
    pool.send(manifest.files.id, cast(BinaryIO, out))
    out.finish()
    while waiting:
        done()
    return tuple(held[name] for name in pieces)


def _send(remote: Remote, name: str, data: bytes) -> Piece:
    packed = compress(data)
    remote.write(name, packed)
    return Piece(name, len(packed), hashlib.sha256(packed).hexdigest())


def _stem(name: str) -> str:
    return name.removeprefix("packs/").removesuffix(".pack")


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
