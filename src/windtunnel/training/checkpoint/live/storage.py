"""Checkpoints in a folder or an object store: what is left when all memory is gone.

::

    chunks/ab/<sha256>[.zst]          pieces of shards, each once (see `store.objects.chunks`)
    steps/<step>-<generation>/        one course's checkpoint of one step
        <shard>.shard                 which chunks it consists of, and the checksum of the whole
        <digest>.layout               what lies where in a shard
        complete                      the shards and their seals; written last, it makes the checkpoint

Every rank's host writes its shards (`write_shard`), all agree, one writes ``complete`` (`complete_step`).
What is killed on the way leaves the older checkpoints as they were, and pieces that the next save finds and
uses. A step that was done again in a newer generation has a folder of its own, so shards of two courses never
meet.

All checksums are verified twice: the shard's own (xxh3_128, made when it was saved) when it is written,
against bytes that were damaged in memory; and all of them when it is read.
"""

from __future__ import annotations

import re
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass

import xxhash

from windtunnel.base.errors import UserError
from windtunnel.store.objects import chunks, collect
from windtunnel.store.objects.files import (
    Files,
    ObjectError,
    OtherVersion,
    checked,
    open_files,
    read_if_there,
    told,
)
from windtunnel.store.objects.manifest import checksum as check
from windtunnel.store.objects.manifest import seal, unseal
from windtunnel.training.checkpoint.policy.restore import StoredShard, StoredStep, needed_shards

STEPS, COMPLETE, SHARD, LAYOUT = "steps", "complete", ".shard", ".layout"
SHARD_KIND, STEP_KIND = "shard of a checkpoint", "step of a checkpoint"
VERSION = 1
TRANSFERS = 4
_STEP = re.compile(r"(\d+)-(\d+)")


@dataclass(frozen=True)
class ShardManifest:
    """One shard of one step; fields as in `checkpoint.model.Copy`. ``chunks``: its data, in order."""

    shard: str
    step: int
    world: int
    has_shared: bool
    generation: int
    layout: str
    nbytes: int
    checksum: str
    chunks: tuple[str, ...]


@dataclass(frozen=True)
class ShardEntry(StoredShard):
    """A shard as the step's manifest knows it; ``check``: the checksum of the shard's manifest."""

    check: str


@dataclass(frozen=True)
class StepManifest:
    """A complete step."""

    step: int
    world: int
    has_shared: bool
    generation: int
    shards: tuple[ShardEntry, ...]


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
        ObjectError: there is no space, the store cannot be written, ``data`` does not fit its checksum, or
            the step is complete already with other content.
    """
    files = open_files(url)
    folder = step_folder(step, generation)
    checked(shard)
    with told(f"shard {shard} of step {step}"):
        whole = xxhash.xxh3_128()
        written = _write_pieces(files, data, level, transfers, whole.update)
        if whole.hexdigest() != checksum:
            raise ObjectError(
                f"shard {shard} of step {step} is damaged in memory: its checksum is {whole.hexdigest()}, "
                f"saved as {checksum}"
            )
        manifest = ShardManifest(
            shard, step, world, has_shared, generation, layout, len(data), checksum, written
        )
        text = seal(SHARD_KIND, VERSION, manifest)
        name = f"{folder}/{shard}{SHARD}"
        if files.size(f"{folder}/{COMPLETE}") is not None and read_if_there(files, name) != text:
            raise ObjectError(f"step {step} of generation {generation} is complete with another {shard}")
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
        ObjectError: a shard is missing or of another checkpoint, or the store cannot be written.
    """
    files = open_files(url)
    folder = step_folder(step, generation)
    with told(f"step {step}"):
        entries = []
        for shard in needed_shards(world, has_shared):
            name = f"{folder}/{shard}{SHARD}"
            text = read_if_there(files, name)
            if text is None:
                raise ObjectError(f"step {step} cannot be completed: {name} is missing")
            one = unseal(ShardManifest, SHARD_KIND, VERSION, text, name)
            found = (one.shard, one.step, one.world, one.has_shared, one.generation)
            if found != (shard, step, world, has_shared, generation):
                raise ObjectError(
                    f"step {step} cannot be completed: {name} is of another checkpoint: {found}"
                )
            entries.append(ShardEntry(shard, one.nbytes, one.checksum, one.layout, check(text)))
        given = dict(layouts or {})
        for digest, blob in given.items():
            checked(digest)
            text = check(blob).encode() + b"\n" + blob
            files.write(f"{folder}/{digest}{LAYOUT}", text)
        files.settle()
        manifest = StepManifest(step, world, has_shared, generation, tuple(entries))
        files.write(f"{folder}/{COMPLETE}", seal(STEP_KIND, VERSION, manifest))
        files.settle()
    return manifest


def check_of(manifest: StepManifest) -> str:
    """The checksum of a step's manifest: it covers the shards' manifests, and these their data."""
    return check(seal(STEP_KIND, VERSION, manifest))


def steps(url: str | Files) -> list[StoredStep]:
    """All that is there, oldest first. What cannot be restored has in ``bad`` why."""
    files = open_files(url)
    with told("the list of steps"):
        found = [_listed(files, name) for name in files.names(STEPS)]
    return sorted(found, key=lambda one: (one.step, one.generation))


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
        ObjectError: it is missing, torn or damaged; the message names the file.
    """
    files = open_files(url)
    with told(f"shard {shard} of step {step}"):
        manifest = _shard(files, step, shard, generation)
        if into is not None and len(into) != manifest.nbytes:
            raise ObjectError(
                f"shard {shard} of step {step} has {manifest.nbytes} bytes; there is room for {len(into)}"
            )
        whole = xxhash.xxh3_128()
        at = 0
        for piece in chunks.get_all(files, manifest.chunks, transfers):
            if into is not None:
                into[at : at + len(piece)] = piece
            at += len(piece)
            whole.update(piece)
        if at != manifest.nbytes or whole.hexdigest() != manifest.checksum:
            raise ObjectError(f"shard {shard} of step {step} is damaged: its checksum does not match")
    return manifest.checksum


def layout(url: str | Files, digest: str) -> bytes:
    """A layout that `complete_step` was given.

    Raises:
        ObjectError: it is missing or damaged.
    """
    checked(digest)
    files = open_files(url)
    damaged = f"layout {digest} is missing"
    with told(f"layout {digest}"):
        for step in reversed(files.names(STEPS)):
            name = f"{STEPS}/{step}/{digest}{LAYOUT}"
            data = read_if_there(files, name)
            if data is None:
                continue
            told_of, _, blob = data.partition(b"\n")
            if check(blob).encode() == told_of:
                return blob
            damaged = f"{name} is truncated or damaged"
    raise ObjectError(damaged)


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
    except ObjectError as error:
        return StoredStep(step, generation=generation, bad=str(error))
    lacking = [one.shard for one in manifest.shards if f"{one.shard}{SHARD}" not in there]
    return StoredStep(
        step,
        manifest.world,
        manifest.has_shared,
        generation,
        tuple(StoredShard(one.shard, one.nbytes, one.checksum, one.layout) for one in manifest.shards),
        bad=f"{where} lacks {', '.join(lacking)}" if lacking else "",
        check=check_of(manifest),
    )


def _complete(files: Files, folder: str) -> StepManifest:
    name = f"{folder}/{COMPLETE}"
    text = read_if_there(files, name)
    if text is None:
        raise ObjectError(f"{name} is missing")
    manifest = unseal(StepManifest, STEP_KIND, VERSION, text, name)
    wanted = needed_shards(manifest.world, manifest.has_shared)
    if folder != step_folder(manifest.step, manifest.generation) or wanted != tuple(
        one.shard for one in manifest.shards
    ):
        raise ObjectError(f"{name} is of another step or of other shards")
    return manifest


def _shard(files: Files, step: int, shard: str, generation: int | None) -> ShardManifest:
    if generation is None:
        there = [int(m[2]) for n in files.names(STEPS) if (m := _STEP.fullmatch(n)) and int(m[1]) == step]
        whole = [g for g in there if files.size(f"{step_folder(step, g)}/{COMPLETE}") is not None]
        if not whole:
            raise ObjectError(f"step {step} is not in storage")
        generation = max(whole)
    folder = step_folder(step, generation)
    entry = next((one for one in _complete(files, folder).shards if one.shard == shard), None)
    name = f"{folder}/{shard}{SHARD}"
    text = read_if_there(files, name) if entry is not None else None
    if entry is None or text is None:
        raise ObjectError(f"{name} is missing")
    manifest = unseal(ShardManifest, SHARD_KIND, VERSION, text, name)
    if check(text) != entry.check:
        raise ObjectError(f"{name} is not the one that {folder}/{COMPLETE} was made of")
    return manifest


def _write_pieces(
    files: Files,
    data: memoryview,
    level: int | None,
    transfers: int,
    observe: Callable[[bytes], object],
) -> tuple[str, ...]:
    def copied() -> Iterator[bytes]:
        for piece in chunks.pieces(data):
            # A copy, so that what is checked, named and written are the same bytes.
            kept = bytes(piece)
            observe(kept)
            yield kept

    return tuple(chunks.in_order(lambda piece: chunks.put(files, piece, level), copied(), transfers))


def _write_missing(
    files: Files, data: memoryview, manifest: ShardManifest, level: int | None, transfers: int
) -> None:
    def written(both: tuple[str, memoryview]) -> None:
        name, piece = both
        if files.size(chunks.path(name)) is None and chunks.put(files, bytes(piece), level) != name:
            raise ObjectError(f"shard {manifest.shard} of step {manifest.step} changed while it was written")

    both = zip(manifest.chunks, chunks.pieces(data), strict=True)
    deque(chunks.in_order(written, both, transfers), maxlen=0)


def step_folder(step: int, generation: int) -> str:
    """Where all of a step lies."""
    return f"{STEPS}/{step:012d}-{generation}"


@dataclass(frozen=True)
class Pruned:
    """What was removed: ``steps`` of them, ``chunks`` of them; ``kept``: the steps that are left."""

    steps: int
    chunks: int
    kept: tuple[int, ...]


def prune(url: str | Files, keep: int) -> Pruned:
    """Free what old checkpoints take, beside writers that are at work (see `store.objects.collect`): all but
    the newest ``keep`` complete steps go, what is older and incomplete, and what no step needs.

    Raises:
        UserError: ``keep`` is not positive.
        ObjectError: the store failed; all that is needed is still there.
    """
    if keep < 1:
        raise UserError(f"keep is {keep}; at least 1 checkpoint is kept")
    files = open_files(url)
    with told("prune"):
        found = steps(files)
        whole = sorted({one.step for one in found if not one.bad})
        kept = whole[-keep:]
        dropped = [one for one in found if kept and 0 <= one.step < kept[0]]
        for one in found:
            if not one.bad:  # what is kept must be so after a power loss, before the others go
                files.rely(f"{step_folder(one.step, one.generation)}/{COMPLETE}")
        files.settle()
        for one in dropped:
            folder = step_folder(one.step, one.generation)
            # First what makes it a checkpoint: killed after this, it is one that was not completed.
            files.remove(f"{folder}/{COMPLETE}")
            files.remove(folder)
        # And these must not come back after one, without their chunks.
        files.settle()
        collect.tidy(files, STEPS)
        removed = collect.sweep(files, lambda: _needed(files))
    return Pruned(len(dropped), removed, tuple(kept))


def scrub(url: str | Files) -> list[str]:
    """Read all chunks that manifests name, and move damaged ones away, so that the next save writes them
    again.

    Returns what is damaged or missing, in words.
    """
    files = open_files(url)
    with told("scrub"):
        return collect.scrub(files, _needed(files))


def _needed(files: Files) -> set[str]:
    """The chunks that shards' manifests name.

    Raises:
        ObjectError: a manifest is of another version, so that what it needs is not known. (One that is
            damaged is of no use to anybody, and names nothing.)
    """
    needed: set[str] = set()
    for step in files.names(STEPS):
        for name in files.names(f"{STEPS}/{step}"):
            where = f"{STEPS}/{step}/{name}"
            text = read_if_there(files, where) if name.endswith(SHARD) else None
            if text is None:
                continue
            try:
                needed.update(unseal(ShardManifest, SHARD_KIND, VERSION, text, where).chunks)
            except OtherVersion as error:
                raise ObjectError(f"nothing can be removed: {error}") from error
            except ObjectError:
                continue
    return needed
