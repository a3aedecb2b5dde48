"""Checkpoints in a folder or an object store: what is left when all memory is gone.

::

    chunks/ab/<sha256>[.zst]          pieces of shards, each once (see `chunks`)
    steps/<step>-<generation>/        one course's checkpoint of one step
        <shard>.shard                 which chunks it consists of, and the checksum of the whole
        <digest>.layout               what lies where in a shard
        complete                      the shards and their seals; written last, it makes the checkpoint

Every rank's node writes its shards (`write_shard`), all agree, one writes ``complete`` (`complete_step`).
What is killed on the way leaves the older checkpoints as they were, and pieces that the next save finds and
uses. A step that was done again in a newer generation has a folder of its own, so shards of two courses never
meet.

All checksums are verified twice: the shard's own (xxh3_128, made when it was saved) when it is written,
against bytes that were damaged in memory; and all of them when it is read.
"""

from __future__ import annotations

import contextlib
import errno
import hashlib
import re
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from typing import TypeVar

import xxhash

from windtunnel.training.checkpoint.live import chunks
from windtunnel.training.checkpoint.live.files import Files, open_files
from windtunnel.training.checkpoint.live.manifest import (
    ChunkFile,
    ShardEntry,
    ShardManifest,
    StepManifest,
    StorageError,
    sealed,
    shard_of,
    step_of,
    to_bytes,
)
from windtunnel.training.checkpoint.policy.restore import StoredShard, StoredStep, needed_shards

__all__ = [
    "ShardManifest",
    "StorageError",
    "complete_step",
    "layout",
    "read_shard",
    "shards_written",
    "steps",
    "write_shard",
]

STEPS, COMPLETE, SHARD, LAYOUT = "steps", "complete", ".shard", ".layout"
TRANSFERS = 4
_STEP = re.compile(r"(\d+)-(\d+)")
_NAME = re.compile(r"[A-Za-z0-9._-]+")

T = TypeVar("T")
U = TypeVar("U")


def write_shard(
    url: str | Files,
    step: int,
    shard: str,
    data: memoryview,
    *,
    world: int,
    has_shared: bool,
    generation: int,
    layout: str,
    checksum: str,
    level: int | None = None,
    transfers: int = TRANSFERS,
) -> ShardManifest:
    """Write one shard of a step; the step exists only after `complete_step`.

    ``checksum``: xxh3_128 of ``data`` from when it was saved. ``level``: of zstd, None for none.

    Raises:
        StorageError: there is no space, the store cannot be written, ``data`` does not fit its checksum, or
            the step is complete already with other content.
    """
    files = _files(url)
    folder = _folder(step, generation)
    _named(shard)
    with _told(f"shard {shard} of step {step}"):
        whole = xxhash.xxh3_128()
        written = _write_pieces(files, data, level, transfers, whole.update)
        if whole.hexdigest() != checksum:
            raise StorageError(
                f"shard {shard} of step {step} is damaged in memory: its checksum is {whole.hexdigest()}, "
                f"saved as {checksum}"
            )
        manifest = ShardManifest(
            shard, step, world, has_shared, generation, layout, len(data), checksum, written
        )
        text = to_bytes(manifest)
        name = f"{folder}/{shard}{SHARD}"
        if files.size(f"{folder}/{COMPLETE}") is not None and _read(files, name) != text:
            raise StorageError(f"step {step} of generation {generation} is complete with another {shard}")
        files.settle()
        files.write(name, text)
        files.settle()
        # From here on a prune sees that the chunks are needed; what one removed before is written again.
        _write_missing(files, data, manifest, level, transfers)
        files.settle()
    return manifest


def complete_step(
    url: str | Files,
    step: int,
    *,
    world: int,
    has_shared: bool,
    generation: int,
    layouts: Mapping[str, bytes] | None = None,
) -> StepManifest:
    """Make the step a checkpoint: all its shards are there. ``layouts``: by digest, what lies where.

    Raises:
        StorageError: a shard is missing or of another checkpoint, or the store cannot be written.
    """
    files = _files(url)
    folder = _folder(step, generation)
    with _told(f"step {step}"):
        entries = []
        for shard in needed_shards(world, has_shared):
            name = f"{folder}/{shard}{SHARD}"
            told = _read(files, name)
            if told is None:
                raise StorageError(f"step {step} cannot be completed: {name} is missing")
            one = shard_of(told, name)
            found = (one.shard, one.step, one.world, one.has_shared, one.generation)
            if found != (shard, step, world, has_shared, generation):
                raise StorageError(
                    f"step {step} cannot be completed: {name} is of another checkpoint: {found}"
                )
            entries.append(ShardEntry(shard, one.nbytes, one.checksum, one.layout, sealed(told)))
        given = dict(layouts or {})
        for digest, blob in given.items():
            _named(digest)
            text = hashlib.sha256(blob).hexdigest().encode() + b"\n" + blob
            files.write(f"{folder}/{digest}{LAYOUT}", text)
        files.settle()
        manifest = StepManifest(step, world, has_shared, generation, tuple(entries))
        files.write(f"{folder}/{COMPLETE}", to_bytes(manifest))
        files.settle()
    return manifest


def steps(url: str | Files) -> list[StoredStep]:
    """All that is there, oldest first. What cannot be restored has in ``bad`` why."""
    files = _files(url)
    with _told("the list of steps"):
        found = [_listed(files, name) for name in files.names(STEPS)]
    return sorted(found, key=lambda one: (one.step, one.generation))


def shards_written(url: str | Files, step: int, generation: int) -> list[str]:
    """The shards of a step, complete or not, that are there."""
    with _told(f"step {step}"):
        names = _files(url).names(_folder(step, generation))
    return [name.removesuffix(SHARD) for name in names if name.endswith(SHARD)]


def read_shard(
    url: str | Files,
    step: int,
    shard: str,
    into: memoryview | None = None,
    *,
    generation: int | None = None,
    transfers: int = TRANSFERS,
) -> str:
    """Read a shard of a complete step and verify it; returns its checksum.

    ``into``: exactly as long as the shard; None only verifies. ``generation``: None for the newest.

    Raises:
        StorageError: it is missing, torn or damaged; the message names the file.
    """
    files = _files(url)
    with _told(f"shard {shard} of step {step}"):
        manifest = _shard(files, step, shard, generation)
        if into is not None and len(into) != manifest.nbytes:
            raise StorageError(
                f"shard {shard} of step {step} has {manifest.nbytes} bytes; there is room for {len(into)}"
            )
        whole = xxhash.xxh3_128()
        at = 0
        for piece in _all(lambda chunk: chunks.get(files, chunk), manifest.chunks, transfers):
            if into is not None:
                into[at : at + len(piece)] = piece
            at += len(piece)
            whole.update(piece)
        if at != manifest.nbytes or whole.hexdigest() != manifest.checksum:
            raise StorageError(f"shard {shard} of step {step} is damaged: its checksum does not match")
    return manifest.checksum


def shard_manifest(url: str | Files, step: int, shard: str, generation: int | None = None) -> ShardManifest:
    """What is known of a shard of a complete step (its size, before `read_shard`).

    Raises:
        StorageError: as `read_shard`.
    """
    with _told(f"shard {shard} of step {step}"):
        return _shard(_files(url), step, shard, generation)


def layout(url: str | Files, digest: str) -> bytes:
    """A layout that `complete_step` was given.

    Raises:
        StorageError: it is missing or damaged.
    """
    _named(digest)
    files = _files(url)
    damaged = f"layout {digest} is missing"
    with _told(f"layout {digest}"):
        for step in reversed(files.names(STEPS)):
            name = f"{STEPS}/{step}/{digest}{LAYOUT}"
            data = _read(files, name)
            if data is None:
                continue
            seal, _, blob = data.partition(b"\n")
            if hashlib.sha256(blob).hexdigest().encode() == seal:
                return blob
            damaged = f"{name} is truncated or damaged"
    raise StorageError(damaged)


def _listed(files: Files, name: str) -> StoredStep:
    match = _STEP.fullmatch(name)
    if not match:
        return StoredStep(-1, bad=f"{STEPS}/{name} is not a step of a checkpoint")
    step, generation = int(match[1]), int(match[2])
    where = f"{STEPS}/{name}"
    there = set(files.names(where))
    if COMPLETE not in there:
        count = sum(one.endswith(SHARD) for one in there)
        return StoredStep(
            step, generation=generation, bad=f"{where} was not completed: {count} shards, no manifest"
        )
    try:
        manifest = _complete(files, where)
    except StorageError as error:
        return StoredStep(step, generation=generation, bad=str(error))
    lacking = [one.shard for one in manifest.shards if f"{one.shard}{SHARD}" not in there]
    return StoredStep(
        step,
        manifest.world,
        manifest.has_shared,
        generation,
        tuple(StoredShard(one.shard, one.nbytes, one.checksum, one.layout) for one in manifest.shards),
        bad=f"{where} lacks {', '.join(lacking)}" if lacking else "",
    )


def _complete(files: Files, folder: str) -> StepManifest:
    name = f"{folder}/{COMPLETE}"
    text = _read(files, name)
    if text is None:
        raise StorageError(f"{name} is missing")
    manifest = step_of(text, name)
    wanted = needed_shards(manifest.world, manifest.has_shared)
    if folder != _folder(manifest.step, manifest.generation) or wanted != tuple(
        one.shard for one in manifest.shards
    ):
        raise StorageError(f"{name} is of another step or of other shards")
    return manifest


def _shard(files: Files, step: int, shard: str, generation: int | None) -> ShardManifest:
    if generation is None:
        there = [int(m[2]) for n in files.names(STEPS) if (m := _STEP.fullmatch(n)) and int(m[1]) == step]
        whole = [g for g in there if files.size(f"{_folder(step, g)}/{COMPLETE}") is not None]
        if not whole:
            raise StorageError(f"step {step} is not in storage")
        generation = max(whole)
    folder = _folder(step, generation)
    entry = next((one for one in _complete(files, folder).shards if one.shard == shard), None)
    name = f"{folder}/{shard}{SHARD}"
    text = _read(files, name) if entry is not None else None
    if entry is None or text is None:
        raise StorageError(f"{name} is missing")
    manifest = shard_of(text, name)
    if sealed(text) != entry.seal:
        raise StorageError(f"{name} is not the one that {folder}/{COMPLETE} was made of")
    return manifest


def _write_pieces(
    files: Files,
    data: memoryview,
    level: int | None,
    transfers: int,
    observe: Callable[[bytes], object] | None,
) -> tuple[ChunkFile, ...]:
    def copied() -> Iterator[bytes]:
        for piece in chunks.pieces(data):
            # A copy, so that what is checked, named and written are the same bytes.
            kept = bytes(piece)
            if observe is not None:
                observe(kept)
            yield kept

    return tuple(
        chunk for chunk, _ in _all(lambda piece: chunks.put(files, piece, level), copied(), transfers)
    )


def _write_missing(
    files: Files, data: memoryview, manifest: ShardManifest, level: int | None, transfers: int
) -> None:
    def written(both: tuple[ChunkFile, memoryview]) -> None:
        chunk, piece = both
        if files.size(chunks.path(chunk.name)) is None and chunks.put(files, bytes(piece), level)[0] != chunk:
            raise StorageError(f"shard {manifest.shard} of step {manifest.step} changed while it was written")

    deque(_all(written, zip(manifest.chunks, chunks.pieces(data), strict=True), transfers), maxlen=0)


def _all(act: Callable[[T], U], items: Iterable[T], transfers: int) -> Iterator[U]:
    """``act`` on each, in order, up to ``transfers`` at once."""
    if transfers <= 1:
        yield from map(act, items)
        return
    with ThreadPoolExecutor(transfers) as pool:
        running: deque[Future[U]] = deque()
        try:
            for item in items:
                running.append(pool.submit(act, item))
                if len(running) >= 2 * transfers:
                    yield running.popleft().result()
            while running:
                yield running.popleft().result()
        finally:
            for future in running:
                future.cancel()


def _files(url: str | Files) -> Files:
    return open_files(url) if isinstance(url, str) else url


def _folder(step: int, generation: int) -> str:
    return f"{STEPS}/{step:012d}-{generation}"


def _named(name: str) -> None:
    if not _NAME.fullmatch(name) or name.startswith("."):
        raise ValueError(f"{name!r} cannot be the name of a file")


def _read(files: Files, name: str) -> bytes | None:
    try:
        return files.read(name)
    except FileNotFoundError:
        return None


@contextlib.contextmanager
def _told(what: str) -> Iterator[None]:
    """Errors of the system as those of storage, with what it was about."""
    try:
        yield
    except OSError as error:
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            raise StorageError(
                f"{what}: storage has no space left; older checkpoints are unharmed"
            ) from error
        raise StorageError(f"{what}: storage failed: {error}") from error
