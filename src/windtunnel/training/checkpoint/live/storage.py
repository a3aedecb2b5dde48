"""Checkpoints in a folder or an object store: what is left when all memory is gone.

::

    steps/<step>-<generation>/        one course's checkpoint of one step
        <shard>.<number>              a shard's data, in parts of `PART` bytes
        <digest>.layout               what lies where in a shard
        complete                      the shards, with the SHA-256 of each; it makes the checkpoint

The protocol of a commit, for every writer: each host writes its shards (`write_shard`), all agree, by
telling each other what they wrote (`Written`), and one writes ``complete`` (`complete_step`). What is killed
on the way leaves the older checkpoints as they were. A step that was done again in a newer generation has a
folder of its own, so shards of two courses never meet.

All checksums are verified twice: the shard's own (xxh3_128, made when it was saved) when it is written,
against bytes that were damaged in memory; and both when it is read.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import xxhash

from windtunnel.base.errors import UserError
from windtunnel.store.objects.chunks import in_order
from windtunnel.store.objects.files import (
    Files,
    ObjectError,
    checked,
    object_errors,
    open_files,
    read_if_there,
)
from windtunnel.store.objects.manifest import checksum as check
from windtunnel.store.objects.manifest import seal, unseal
from windtunnel.training.checkpoint.model import Shard, StoredStep

STEPS, COMPLETE, LAYOUT = "steps", "complete", ".layout"
KIND, VERSION = "step of a checkpoint", 2
PART = 32 << 20
TRANSFERS = 4
STALE = 86_400.0
"""Seconds after which an unfinished write is taken for abandoned."""
_STEP = re.compile(r"(\d+)-(\d+)")


@dataclass(frozen=True)
class Written:
    """A shard that is in storage. ``sha256``: of its data, so that a log which knows the manifest vouches for
    every byte."""

    shard: Shard
    sha256: str


@dataclass(frozen=True)
class StepManifest:
    """A complete step."""

    shards: tuple[Written, ...]


def write_shard(url: str | Files, shard: Shard, data: memoryview, *, transfers: int = TRANSFERS) -> Written:
    """Write one shard of a step; the step exists only after `complete_step`.

    Raises:
        ObjectError: there is no space, the store cannot be written, ``data`` does not fit its checksum, or
            the step is complete already with other content.
    """
    files, what = open_files(url), f"shard {shard.name} of step {shard.step}"
    checked(shard.name)
    with object_errors(what):
        whole, strong = xxhash.xxh3_128(), hashlib.sha256()
        for _, piece in _parts(shard, data):
            whole.update(piece)
            strong.update(piece)
        if whole.hexdigest() != shard.checksum:
            raise ObjectError(
                f"{what} is damaged in memory: its checksum is {whole.hexdigest()}, saved as {shard.checksum}"
            )
        written = Written(shard, strong.hexdigest())
        folder = step_folder(shard.step, shard.generation)
        if files.size(f"{folder}/{COMPLETE}") is not None and written not in _complete(files, folder).shards:
            raise ObjectError(
                f"step {shard.step} of generation {shard.generation} is complete with another {shard.name}"
            )

        def write(part: tuple[str, memoryview]) -> None:
            files.write(*part)

        for _ in in_order(write, _parts(shard, data), transfers):
            pass
        files.settle()
    return written


def complete_step(url: str | Files, shards: Iterable[Written], layouts: Mapping[str, bytes]) -> StepManifest:
    """Make the step a checkpoint: all its ``shards`` are written. ``layouts``: by digest, what lies where.

    Raises:
        ObjectError: a shard is missing or of another checkpoint, or the store cannot be written.
    """
    files = open_files(url)
    by_name = {shard.shard.name: shard for shard in shards}
    first = next(iter(by_name.values())).shard
    folder = step_folder(first.step, first.generation)
    with object_errors(f"step {first.step}"):
        for name in first.needed:
            if name not in by_name:
                raise ObjectError(f"step {first.step} cannot be completed: {name} is missing")
            shard = by_name[name].shard
            if (step_folder(shard.step, shard.generation), shard.needed) != (folder, first.needed):
                raise ObjectError(
                    f"step {first.step} cannot be completed: {name} is of another checkpoint: {shard}"
                )
            for part, nbytes in _places(shard):
                if files.size(part) != nbytes:
                    raise ObjectError(f"step {first.step} cannot be completed: {part} is missing")
        for digest, blob in layouts.items():
            files.write(f"{folder}/{checked(digest)}{LAYOUT}", blob)
        files.settle()
        manifest = StepManifest(tuple(by_name[name] for name in first.needed))
        files.write(f"{folder}/{COMPLETE}", seal(KIND, VERSION, manifest))
        files.settle()
    return manifest


def check_of(manifest: StepManifest) -> str:
    """The checksum of a step's manifest: it covers all of the shards' data."""
    return check(seal(KIND, VERSION, manifest))


def steps(url: str | Files) -> list[StoredStep]:
    """All that is there, oldest first. What cannot be restored has in ``bad`` why."""
    files = open_files(url)
    with object_errors("the list of steps"):
        stored_steps = [_listed(files, name) for name in files.names(STEPS)]
    return sorted(stored_steps, key=lambda stored_step: (stored_step.step, stored_step.generation))


def read_shard(
    url: str | Files, shard: Shard, into: memoryview | None = None, *, transfers: int = TRANSFERS
) -> str:
    """Read a shard of a complete step (as `steps` lists it) and verify it; returns its checksum.

    ``into``: exactly as long as the shard; None only verifies.

    Raises:
        ObjectError: it is missing, torn or damaged.
    """
    files, what = open_files(url), f"shard {shard.name} of step {shard.step}"
    with object_errors(what):
        folder = step_folder(shard.step, shard.generation)
        match = next((record for record in _complete(files, folder).shards if record.shard == shard), None)
        if match is None:
            raise ObjectError(f"{what} is not the one that {folder}/{COMPLETE} was made of")
        if into is not None and len(into) != shard.nbytes:
            raise ObjectError(f"{what} has {shard.nbytes} bytes; there is room for {len(into)}")
        whole, strong, at = xxhash.xxh3_128(), hashlib.sha256(), 0
        for piece in in_order(lambda part: files.read(part[0]), _places(shard), transfers):
            if into is not None and at + len(piece) <= len(into):
                into[at : at + len(piece)] = piece
            at += len(piece)
            whole.update(piece)
            strong.update(piece)
        if (at, whole.hexdigest(), strong.hexdigest()) != (shard.nbytes, shard.checksum, match.sha256):
            raise ObjectError(f"{what} is damaged: its checksum does not match")
    return shard.checksum


def layout(url: str | Files, shard: Shard) -> bytes:
    """What lies where in ``shard``.

    Raises:
        ObjectError: it is missing or damaged.
    """
    files = open_files(url)
    name = f"{step_folder(shard.step, shard.generation)}/{checked(shard.layout)}{LAYOUT}"
    with object_errors(f"layout {shard.layout}"):
        blob = read_if_there(files, name)
    if blob is None or xxhash.xxh3_128_hexdigest(blob) != shard.layout:
        raise ObjectError(f"{name} is missing" if blob is None else f"{name} is truncated or damaged")
    return blob


def step_folder(step: int, generation: int) -> str:
    """Where all of a step lies."""
    return f"{STEPS}/{step:012d}-{generation}"


def _places(shard: Shard) -> Iterator[tuple[str, int]]:
    """The names of a shard's parts, and the bytes of each; one of an empty shard."""
    folder = step_folder(shard.step, shard.generation)
    for number, at in enumerate(range(0, max(1, shard.nbytes), PART)):
        yield f"{folder}/{shard.name}.{number:05d}", min(PART, shard.nbytes - at)


def _parts(shard: Shard, data: memoryview) -> Iterator[tuple[str, memoryview]]:
    at = 0
    for name, nbytes in _places(shard):
        yield name, data[at : at + nbytes]
        at += nbytes


def _listed(files: Files, name: str) -> StoredStep:
    match = _STEP.fullmatch(name)
    if not match:
        return StoredStep(-1, bad=f"{STEPS}/{name} is not a step of a checkpoint")
    step, generation = int(match[1]), int(match[2])
    where = f"{STEPS}/{name}"
    there = set(files.names(where))
    if COMPLETE not in there:
        return StoredStep(step, generation, bad=f"{where} was not completed: it has no manifest")
    try:
        manifest = _complete(files, where)
    except ObjectError as error:
        return StoredStep(step, generation, bad=str(error))
    shards = tuple(shard.shard for shard in manifest.shards)
    lacking = [
        shard.name for shard in shards if not {part.rpartition("/")[2] for part, _ in _places(shard)} <= there
    ]
    bad = f"{where} lacks {', '.join(lacking)}" if lacking else ""
    return StoredStep(step, generation, shards, bad, check_of(manifest))


def _complete(files: Files, folder: str) -> StepManifest:
    name = f"{folder}/{COMPLETE}"
    text = read_if_there(files, name)
    if text is None:
        raise ObjectError(f"{name} is missing")
    manifest = unseal(StepManifest, KIND, VERSION, text, name)
    shards = [shard.shard for shard in manifest.shards]
    names = tuple(shard.name for shard in shards)
    if not shards or any(
        (step_folder(shard.step, shard.generation), shard.needed) != (folder, names) for shard in shards
    ):
        raise ObjectError(f"{name} is of another step or of other shards")
    return manifest


def prune(url: str | Files, keep: int) -> Sequence[StoredStep]:
    """Free what old checkpoints take, beside writers that are at work: all but the newest ``keep`` complete
    steps go, and what is older and incomplete. Returns what went.

    Raises:
        UserError: ``keep`` is not positive.
        ObjectError: the store failed, or has a checkpoint of another version; all that is needed is still
            there.
    """
    if keep < 1:
        raise UserError(f"keep is {keep}; at least 1 checkpoint is kept")
    files = open_files(url)
    with object_errors("prune"):
        stored_steps = steps(files)
        whole = sorted({stored_step.step for stored_step in stored_steps if not stored_step.bad})
        oldest = whole[-keep:][0] if whole else 0
        dropped = [stored_step for stored_step in stored_steps if 0 <= stored_step.step < oldest]
        folders = [step_folder(stored_step.step, stored_step.generation) for stored_step in dropped]
        for stored in stored_steps:
            if not stored.bad:  # what is kept must be so after a power loss, before the others go
                files.rely(f"{step_folder(stored.step, stored.generation)}/{COMPLETE}")
        files.settle()
        for folder in folders:
            # First what makes it a checkpoint: killed after this, it is one that was not completed.
            files.remove(f"{folder}/{COMPLETE}")
        files.settle()
        for folder in folders:
            files.remove(folder)
        files.settle()
        for name in files.names(STEPS):
            files.tidy(f"{STEPS}/{name}", STALE)
    return dropped
