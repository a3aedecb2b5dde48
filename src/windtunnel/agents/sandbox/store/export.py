"""A checkpoint somewhere else, complete in itself, so that another host can go on from it.

Layout below the URL:

- ``packs/<name>.pack``: new pages of one process image and its recipe (see `packs`);
- ``chunks/...``: pieces of streams of files, by content (see `store.objects.chunks`);
- ``checkpoints/<id>.json``: the manifest, and names of all packs and chunks that the checkpoint needs, sealed
  and written last. Without it there is no checkpoint.

What is there already is not sent again. Pages of other sandboxes are never sent: a pack is made for the
export, and holds only pages of this image. An import fetches and checks everything before any of it is
visible: a place that lacks an object, or has a wrong one, leaves the host as it was.
"""

from __future__ import annotations

import contextlib
import errno
import hashlib
import re
import secrets
from collections import deque
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path
from typing import IO, cast

from windtunnel.agents.sandbox.files import Pool
from windtunnel.agents.sandbox.model import Manifest
from windtunnel.agents.sandbox.store import reader, writer
from windtunnel.agents.sandbox.store.manifests import Manifests, new_id
from windtunnel.agents.sandbox.store.packs import LEVEL, Pack, opened
from windtunnel.agents.sandbox.store.store import PageStore
from windtunnel.agents.sandbox.store.writer import Known
from windtunnel.base.errors import UserError
from windtunnel.store.objects import chunks
from windtunnel.store.objects.files import BLOCK, Files, ObjectError, open_files, told
from windtunnel.store.objects.manifest import seal, unseal

VERSION = 2
TRANSFERS = 8
FOLDER, SUFFIX = "checkpoints", ".json"
_KIND = "exported checkpoint of a sandbox"
_PACK = re.compile(r"packs/[A-Za-z0-9][A-Za-z0-9._-]*\.pack")


@dataclass(frozen=True)
class PackFile:
    """A pack that a checkpoint needs: its size and its SHA-256."""

    name: str
    bytes: int
    sha256: str


@dataclass(frozen=True)
class Exported:
    """A checkpoint. ``packs``: the first is that of its image; ``files``: the chunks of the stream of files,
    in order."""

    manifest: Manifest
    packs: tuple[PackFile, ...]
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
            packs = _send_image(manifest.image.id, pages, place, work, jobs) if manifest.image else ()
            files = _send_files(manifest.files.id, pool, place, jobs) if manifest.files else ()
        # the names of what it needs are durable before its own is
        place.settle()
        place.write(_name(manifest.id), seal(_KIND, VERSION, Exported(manifest, packs, files)))
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
        if found.packs:
            for _ in chunks.in_order(lambda pack: _fetch(place, pack, work), found.packs, TRANSFERS):
                pass
            _put_together(work, _local(work, found.packs[0]))
        return _publish(found.manifest, files, work / "images", pool, pages, manifests, name, key_file)


def _complete(place: Files) -> list[str]:
    """Ids of the checkpoints that are whole at a place."""
    return [name.removesuffix(SUFFIX) for name in place.names(FOLDER) if name.endswith(SUFFIX)]


def _name(id: str) -> str:
    return f"{FOLDER}/{id}{SUFFIX}"


def _exported(place: Files, id: str) -> Exported:
    """What a checkpoint there consists of, checked. Names become paths, so they are accepted only in the form
    that an export gives them."""
    where = f"{place.url}/{_name(id)}"
    found = unseal(Exported, _KIND, VERSION, place.read(_name(id)), where)
    odd = [pack.name for pack in found.packs if not _PACK.fullmatch(pack.name)]
    if odd:
        raise ObjectError(f"{where} names {odd[0]!r}")
    own = found.manifest
    if own.id != id or bool(own.image) != bool(found.packs) or bool(own.files) != bool(found.files):
        raise ObjectError(f"{where} does not fit its manifest")
    return found


def _chosen(place: Files, wanted: str) -> str:
    ids = [id for id in _complete(place) if id.startswith(wanted)]
    if not ids:
        raise UserError(f"import: {place.url} holds no complete checkpoint{f' {wanted}' if wanted else ''}")
    if wanted and wanted not in ids and len(ids) > 1:
        raise UserError(f"import: checkpoint {wanted!r} is ambiguous: {', '.join(ids[:5])}")
    return wanted if wanted in ids else ids[-1]


def _send_image(
    id: str, pages: PageStore, place: Files, work: Path, jobs: ThreadPoolExecutor
) -> tuple[PackFile, ...]:
    """Send the pages that are not there yet, and the recipe; returns all packs of the image."""
    held: dict[str, PackFile] = {}
    for other in _complete(place):
        # one that is damaged spoils no other: what only it could tell is sent again
        with contextlib.suppress(ObjectError):
            held.update((pack.name, pack) for pack in _exported(place, other).packs)
    known = Known(0)
    for pack in held.values():
        with contextlib.suppress(ObjectError, FileNotFoundError):
            index = _remote_pack(place, pack).index()
            known.add(_stem(pack), index.digests.tobytes(), index.numbers.tolist())
    images, made = work / "images", work / "made"
    made.mkdir()
    pages.materialise(id, images)
    writer.keep(made, id, images, known, None, jobs)
    (path,) = made.glob("*.pack")
    with opened(path) as one:
        recipe = one.recipe()
    with path.open("rb") as file:
        own = PackFile(
            f"packs/{path.name}", path.stat().st_size, hashlib.file_digest(file, "sha256").hexdigest()
        )
    place.upload(own.name, path)
    others = [held[f"packs/{other}.pack"] for other in recipe.packs[1:]]
    for pack in others:
        place.rely(pack.name)
    return (own, *others)


def _remote_pack(place: Files, pack: PackFile) -> Pack:
    if place.size(pack.name) != pack.bytes:
        raise ObjectError(f"{place.url}/{pack.name} is cut short")
    return Pack(
        f"{place.url}/{pack.name}",
        pack.bytes,
        lambda at, length: place.read(pack.name, at, length),
        lambda: None,
    )


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


def _stem(pack: PackFile) -> str:
    return pack.name.removeprefix("packs/").removesuffix(".pack")


def _local(work: Path, pack: PackFile) -> Path:
    return work / f"{_stem(pack)}.pack"


def _fetch(place: Files, pack: PackFile, work: Path) -> None:
    found = hashlib.sha256()
    with _local(work, pack).open("wb") as out:
        for at in range(0, pack.bytes, BLOCK):
            part = place.read(pack.name, at, min(BLOCK, pack.bytes - at))
            found.update(part)
            out.write(part)
    if found.hexdigest() != pack.sha256:
        raise ObjectError(f"{place.url}/{pack.name} is damaged: it does not match its checksum")


def _put_together(work: Path, own: Path) -> None:
    """The process image from its packs, which checks every page."""
    with opened(own) as pack:
        recipe = pack.recipe()
    (work / "images").mkdir()
    with ThreadPoolExecutor(TRANSFERS) as jobs:
        reader.materialise(work, recipe, work / "images", jobs)


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
