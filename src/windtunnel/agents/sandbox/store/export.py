"""A checkpoint somewhere else, complete in itself, so that another host can go on from it.

Layout below the URL:

- ``chunks/...``: all data, by content (see `store.objects.chunks`): the files of the sandbox, and those of
  its process image, each a tar stream that is cut where its content says so;
- ``checkpoints/<id>.json``: the manifest, and names of all chunks that the checkpoint needs, sealed and
  written last. Without it there is no checkpoint.

What is there already is not sent again. An import fetches and checks everything before any of it is visible:
a place that lacks an object, or has a wrong one, leaves the host as it was.
"""

from __future__ import annotations

import contextlib
import errno
import secrets
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, replace
from functools import partial
from typing import IO, cast

from windtunnel.agents.sandbox.errors import disk_full
from windtunnel.agents.sandbox.files import Pool, archive
from windtunnel.agents.sandbox.model import CheckpointManifest
from windtunnel.agents.sandbox.store import CheckpointStore, new_id
from windtunnel.agents.sandbox.store.pages import LEVEL
from windtunnel.base.errors import UserError
from windtunnel.store.objects import chunks
from windtunnel.store.objects.files import Files, ObjectError, object_errors, open_files
from windtunnel.store.objects.manifest import seal, unseal

VERSION = 5
TRANSFERS = 8
FOLDER, SUFFIX = "checkpoints", ".json"
_KIND = "exported checkpoint of a sandbox"


@dataclass(frozen=True)
class ExportChunk:
    """``bytes``: how many lie there under its name."""

    name: str
    bytes: int


@dataclass(frozen=True)
class Exported:
    """A checkpoint: the chunks of its two streams, in order."""

    manifest: CheckpointManifest
    image: tuple[ExportChunk, ...]
    files: tuple[ExportChunk, ...]


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
        if disk_full(error) or error.errno == errno.EIO:
            raise ObjectError(words) from error
        raise UserError(f"{words}; give a folder that may be, or a URL such as s3://bucket/path") from error
    return place


def export_checkpoint(
    manifest: CheckpointManifest, *, pool: Pool, store: CheckpointStore, url: str | Files
) -> None:
    """Write ``manifest`` and all that it needs to ``url``. A part that was written before a failure is no
    checkpoint there, and does no harm."""
    place = open_files(url)
    with object_errors(f"checkpoint {manifest.id} cannot be exported"):
        if manifest.id in _complete(place):
            return
        _drop_wrong(place)
        image = _sent(place, partial(_write_image, store, manifest.image.id)) if manifest.image else ()
        files = _sent(place, partial(pool.send, manifest.files.id)) if manifest.files else ()
        # the names of what it needs are durable before its own is
        place.settle()
        place.write(_name(manifest.id), seal(_KIND, VERSION, Exported(manifest, image, files)))
        place.settle()


def import_checkpoint(
    url: str, *, pool: Pool, store: CheckpointStore, name: str, key_file: str = ""
) -> CheckpointManifest:
    """Take the checkpoint at ``url`` in, as the first one of sandbox ``name``; returns its new manifest.

    ``url`` may end in ``#`` and an id, or the beginning of one; without it the newest one there is meant.
    """
    url, _, prefix = url.partition("#")
    place, id = open_files(url), new_id()
    with object_errors(f"the checkpoint {prefix or 'at'} {url} cannot be imported"), store.scratch() as work:
        exported = _exported(place, _chosen(place, prefix))
        for stream, pieces in (("files", exported.files), ("image", exported.image)):
            with (work / stream).open("wb") as out:
                for piece in chunks.get_all(place, (chunk.name for chunk in pieces), TRANSFERS):
                    out.write(piece)
        old = exported.manifest
        # parts that were older than the checkpoint stay apart from it: a restore replays shells over them
        image = old.image and replace(old.image, id=id if old.image.id == old.id else f"{id}-image")
        files = old.files and replace(
            old.files, id=id if old.files.id == old.id else f"{id}-files", kind=pool.kind, bytes_new=0
        )
        if image is not None:
            (work / "images").mkdir()
            with (work / "image").open("rb") as source:
                archive.receive(work / "images", source)
        try:
            if files is not None:
                with (work / "files").open("rb") as source:
                    pool.receive(files.id, source)
            # no file of this host is read, and sent to an upstream, because whoever exported it says so
            spec = replace(old.spec, name=name, proxy_key_file=key_file)
            manifest = replace(
                old, id=id, box=name, parent=None, spec=spec, files=files, image=image, pinned=False
            )
            return store.add(manifest, work / "images" if image is not None else None)
        except BaseException:
            with contextlib.suppress(Exception):
                if files is not None:
                    pool.drop_snapshot(files.id)
            raise


def _complete(place: Files) -> list[str]:
    """Ids of the checkpoints that are whole at a place."""
    return [name.removesuffix(SUFFIX) for name in place.names(FOLDER) if name.endswith(SUFFIX)]


def _name(id: str) -> str:
    return f"{FOLDER}/{id}{SUFFIX}"


def _exported(place: Files, id: str) -> Exported:
    """What a checkpoint there consists of, checked."""
    where = f"{place.url}/{_name(id)}"
    exported = unseal(Exported, _KIND, VERSION, place.read(_name(id)), where)
    own = exported.manifest
    if own.id != id or bool(own.image) != bool(exported.image) or bool(own.files) != bool(exported.files):
        raise ObjectError(f"{where} does not fit its manifest")
    return exported


def _chosen(place: Files, prefix: str) -> str:
    ids = [id for id in _complete(place) if id.startswith(prefix)]
    if not ids:
        raise UserError(f"import: {place.url} holds no complete checkpoint{f' {prefix}' if prefix else ''}")
    if prefix and prefix not in ids and len(ids) > 1:
        raise UserError(f"import: checkpoint {prefix!r} is ambiguous: {', '.join(ids[:5])}")
    return prefix if prefix in ids else ids[-1]


def _drop_wrong(place: Files) -> None:
    """Chunks there whose size is not the one they had are removed, and so written again."""
    for id in _complete(place):
        # one that is damaged spoils no other: what only it could tell is sent again
        with contextlib.suppress(ObjectError):
            exported = _exported(place, id)
            for chunk in {*exported.image, *exported.files}:
                if place.size(chunks.path(chunk.name)) not in (None, chunk.bytes):
                    place.remove(chunks.path(chunk.name))


def _sent(place: Files, write: Callable[[IO[bytes]], None]) -> tuple[ExportChunk, ...]:
    """Send the pieces of a stream that are not there yet; all of its chunks, in order."""
    jobs: list[Future[ExportChunk]] = []

    def send(piece: bytes) -> ExportChunk:
        name = chunks.put(place, piece, LEVEL)
        return ExportChunk(name, place.size(chunks.path(name)) or 0)

    def take(piece: bytes) -> None:
        jobs.append(pool.submit(send, piece))
        if len(jobs) > 2 * TRANSFERS:  # no more pieces are held at a time
            jobs[-2 * TRANSFERS].result()

    with ThreadPoolExecutor(TRANSFERS, "windtunnel-export") as pool:
        out = chunks.Cutter(take)
        write(cast(IO[bytes], out))
        out.finish()
    return tuple(job.result() for job in jobs)


def _write_image(store: CheckpointStore, id: str, out: IO[bytes]) -> None:
    with store.scratch() as work:
        store.materialise(id, work / "images")
        archive.send(work / "images", out, "--mtime=@0")  # equal files are equal bytes
