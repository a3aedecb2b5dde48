"""A checkpoint somewhere else, complete in itself, so that another host can go on from it.

Layout below the URL:

- ``chunks/...``: all data, by content (see `store.objects.chunks`). The pages of a process image in pieces of
  up to 512, the digests of each piece, the recipe, and the stream of files;
- ``checkpoints/<id>.json``: the manifest, and names of all chunks that the checkpoint needs, sealed and
  written last. Without it there is no checkpoint.

What is there already is not sent again. Pages of other sandboxes are never sent: pieces are made for the
export, of pages of this image. An import fetches and checks everything before any of it is visible: a place
that lacks an object, or has a wrong one, leaves the host as it was.
"""

from __future__ import annotations

import contextlib
import errno
import secrets
from collections import deque
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path
from typing import IO, cast

import numpy as np

from windtunnel.agents.sandbox.files import Pool
from windtunnel.agents.sandbox.model import Manifest
from windtunnel.agents.sandbox.store.manifests import Manifests, new_id
from windtunnel.agents.sandbox.store.pages import (
    DIGEST,
    LEVEL,
    PAGE,
    WINDOW,
    Recipe,
    digests_of,
    page_count,
    windows,
)
from windtunnel.agents.sandbox.store.store import PageStore
from windtunnel.base.errors import UserError
from windtunnel.store.objects import chunks
from windtunnel.store.objects.files import Files, ObjectError, open_files, told
from windtunnel.store.objects.manifest import seal, unseal

VERSION = 3
TRANSFERS = 8
FOLDER, SUFFIX = "checkpoints", ".json"
PIECE = chunks.PIECE // PAGE
"""Pages of a piece."""
_KIND = "exported checkpoint of a sandbox"


@dataclass(frozen=True)
class Piece:
    """Pages in a chunk of so many ``bytes``, and the chunk of their digests."""

    chunk: str
    bytes: int
    digests: str


@dataclass(frozen=True)
class ExportedImage:
    """``recipe``: the chunk of a `Recipe` whose places count pages through all ``pieces``, from 1 on."""

    pieces: tuple[Piece, ...]
    recipe: tuple[str, ...]


@dataclass(frozen=True)
class Exported:
    """A checkpoint. ``files``: the chunks of the stream of files, in order."""

    manifest: Manifest
    image: ExportedImage | None
    files: tuple[str, ...]


def destination(url: str) -> Files:
    """The place at ``url``, where a file was just written and removed again; else a UserError."""
    if not url.strip() or "\0" in url:
        raise UserError(f"export: {url!r} is no place; give a folder, or a URL such as s3://bucket/path")
    place = open_files(url)
    probe = f"{FOLDER}/try-{secrets.token_hex(4)}"
    try:
        place.write(probe, b"")
        place.remove(probe)
        place.remove_empty(FOLDER)
    except OSError as error:
        words = f"export: {url} cannot be written ({error.strerror or error})"
        if error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EIO):
            raise ObjectError(words) from error
        raise UserError(f"{words}; give a folder that may be, or a URL such as s3://bucket/path") from error
    return place


def export_checkpoint(manifest: Manifest, *, pool: Pool, pages: PageStore, url: str | Files) -> None:
    """Write ``manifest`` and all that it needs to ``url``. A part that was written before a failure is no
    checkpoint there, and does no harm."""
    place = open_files(url)
    with told(f"checkpoint {manifest.id} cannot be exported"):
        if manifest.id in _complete(place):
            return
        with ThreadPoolExecutor(TRANSFERS, "windtunnel-export") as jobs, pages.scratch() as work:
            image = _send_image(manifest.image.id, pages, place, work, jobs) if manifest.image else None
            files = _send_files(manifest.files.id, pool, place, jobs) if manifest.files else ()
        # the names of what it needs are durable before its own is
        place.settle()
        place.write(_name(manifest.id), seal(_KIND, VERSION, Exported(manifest, image, files)))
        place.settle()


def import_checkpoint(
    url: str, *, pool: Pool, pages: PageStore, manifests: Manifests, name: str, key_file: str = ""
) -> Manifest:
    """Take the checkpoint at ``url`` in, as the first one of sandbox ``name``; returns its new manifest.

    ``url`` may end in ``#`` and an id, or the beginning of one; without it the newest one there is meant.
    """
    url, _, wanted = url.partition("#")
    place = open_files(url)
    with told(f"the checkpoint {wanted or 'at'} {url} cannot be imported"), pages.scratch() as work:
        found = _exported(place, _chosen(place, wanted))
        files = work / "files"
        with files.open("wb") as out:
            for piece in chunks.get_all(place, found.files, TRANSFERS):
                out.write(piece)
        if found.image is not None:
            _fetch_image(place, found.image, work, work / "images")
        return _publish(found.manifest, files, work / "images", pool, pages, manifests, name, key_file)


def _complete(place: Files) -> list[str]:
    """Ids of the checkpoints that are whole at a place."""
    return [name.removesuffix(SUFFIX) for name in place.names(FOLDER) if name.endswith(SUFFIX)]


def _name(id: str) -> str:
    return f"{FOLDER}/{id}{SUFFIX}"


def _exported(place: Files, id: str) -> Exported:
    """What a checkpoint there consists of, checked."""
    where = f"{place.url}/{_name(id)}"
    found = unseal(Exported, _KIND, VERSION, place.read(_name(id)), where)
    own = found.manifest
    if own.id != id or bool(own.image) != bool(found.image) or bool(own.files) != bool(found.files):
        raise ObjectError(f"{where} does not fit its manifest")
    return found


def _chosen(place: Files, wanted: str) -> str:
    ids = [id for id in _complete(place) if id.startswith(wanted)]
    if not ids:
        raise UserError(f"import: {place.url} holds no complete checkpoint{f' {wanted}' if wanted else ''}")
    if wanted and wanted not in ids and len(ids) > 1:
        raise UserError(f"import: checkpoint {wanted!r} is ambiguous: {', '.join(ids[:5])}")
    return wanted if wanted in ids else ids[-1]


def _there(place: Files) -> dict[bytes, tuple[Piece, int]]:
    """Where each page that is at a place already lies: its piece, and its number in it."""
    pieces: set[Piece] = set()
    for id in _complete(place):
        # one that is damaged spoils no other: what only it could tell is sent again
        with contextlib.suppress(ObjectError):
            image = _exported(place, id).image
            pieces.update(image.pieces if image else ())
    found: dict[bytes, tuple[Piece, int]] = {}
    for piece in sorted(pieces, key=lambda piece: piece.chunk):
        with contextlib.suppress(ObjectError):
            if place.size(chunks.path(piece.chunk)) != piece.bytes:
                place.remove(chunks.path(piece.chunk))
                continue
            sums = chunks.get(place, piece.digests)
            found.update(
                (sums[at : at + DIGEST], (piece, at // DIGEST)) for at in range(0, len(sums), DIGEST)
            )
    return found


def _send_image(
    id: str, pages: PageStore, place: Files, work: Path, jobs: ThreadPoolExecutor
) -> ExportedImage:
    """Send the pages that are not there yet, and the recipe."""
    images, recipe = work / "images", pages.recipe(id)
    pages.materialise(id, images)
    known, held = _there(place), list(pages.digests(recipe))
    used: dict[Piece, int] = {}
    fresh: dict[bytes, int] = {}
    where: list[tuple[Piece | None, int]] = []
    loose, sums, sent = bytearray(), bytearray(), list[Future[Piece]]()

    def send(data: bytes, digests: bytes) -> Piece:
        name = chunks.put(place, data, LEVEL)
        return Piece(name, place.size(chunks.path(name)) or 0, chunks.put(place, digests, LEVEL))

    def cut() -> None:
        sent.append(jobs.submit(send, bytes(loose), bytes(sums)))
        loose.clear()
        sums.clear()
        if len(sent) > 2 * TRANSFERS:
            sent[-2 * TRANSFERS].result()

    for file, size, begin in recipe.begins():
        for first, some in windows(images / file, size):
            for row, page in enumerate(some):
                key = held[begin + first + row].tobytes()
                if not recipe.places[begin + first + row]:
                    where.append((None, -1))
                elif key in known:
                    piece, number = known[key]
                    used.setdefault(piece, len(used))
                    where.append((piece, number))
                else:
                    if key not in fresh:
                        fresh[key] = len(fresh)
                        loose += page.tobytes()
                        sums += key
                        if len(sums) == PIECE * DIGEST:
                            cut()
                    where.append((None, fresh[key]))
    if sums:
        cut()
    old, places = len(used) * PIECE, np.zeros(len(where), np.int64)
    for at, (home, number) in enumerate(where):
        base = used[home] * PIECE if home is not None else old
        places[at] = base + number + 1 if number >= 0 else 0
    for piece in used:
        place.rely(chunks.path(piece.chunk))
        place.rely(chunks.path(piece.digests))
    packed = Recipe(recipe.files, places).pack("")
    names = tuple(chunks.put(place, bytes(part)) for part in chunks.pieces(memoryview(packed)))
    return ExportedImage((*used, *(job.result() for job in sent)), names)


def _fetch_image(place: Files, image: ExportedImage, work: Path, into: Path) -> None:
    """The process image from its pieces."""
    recipe = Recipe.unpack("", b"".join(chunks.get_all(place, image.recipe, TRANSFERS)))
    with (work / "pages").open("wb") as out:
        out.write(bytes(PAGE))
        names = [name for piece in image.pieces for name in (piece.chunk, piece.digests)]
        found = chunks.get_all(place, names, TRANSFERS)
        for number, (piece, data, sums) in enumerate(zip(image.pieces, found, found, strict=False)):
            if digests_of(np.frombuffer(data, np.uint8).reshape(-1, PAGE)).tobytes() != sums:
                raise ObjectError(f"{place.url}/{chunks.path(piece.chunk)} does not match its digests")
            out.seek((1 + number * PIECE) * PAGE)
            out.write(data)
        out.truncate((1 + len(image.pieces) * PIECE) * PAGE)
    held = np.memmap(work / "pages", np.uint8, "r").reshape(-1, PAGE)
    if (
        len(recipe.places) != sum(page_count(size) for _, size in recipe.files)
        or ((recipe.places < 0) | (recipe.places >= len(held))).any()
    ):
        raise ObjectError(f"{place.url}: the recipe of an image contradicts itself")
    into.mkdir()
    for name, size, begin in recipe.begins():
        with (into / name).open("xb") as file:
            for at in range(0, page_count(size), WINDOW):
                end = min(at + WINDOW, page_count(size))
                file.write(held[recipe.places[begin + at : begin + end]].reshape(-1).data)
            file.truncate(size)


def _send_files(snapshot: str, pool: Pool, place: Files, jobs: ThreadPoolExecutor) -> tuple[str, ...]:
    """Send the pieces of the stream of files that are not there yet; returns the names of all, in order."""
    names: list[str] = []
    waiting: deque[Future[str]] = deque()

    def take(piece: bytes) -> None:
        waiting.append(jobs.submit(chunks.put, place, piece, LEVEL))
        if len(waiting) > 2 * TRANSFERS:
            names.append(waiting.popleft().result())

    out = chunks.Cutter(take)
    pool.send(snapshot, cast(IO[bytes], out))
    out.finish()
    return (*names, *[job.result() for job in waiting])


def _publish(
    old: Manifest,
    stream: Path,
    images: Path,
    pool: Pool,
    pages: PageStore,
    manifests: Manifests,
    name: str,
    key_file: str,
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
            with stream.open("rb") as source:
                pool.receive(files.id, source)
        if image is not None:
            kept = pages.keep(image.id, images)
            image = replace(image, bytes_raw=kept.bytes_raw, bytes_new=kept.bytes_new)
        manifest = replace(
            old,
            id=id,
            box=name,
            parent=None,
            # no file of this host is read, and sent to an upstream, because whoever exported it says so
            spec=replace(old.spec, name=name, proxy_key_file=key_file),
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
