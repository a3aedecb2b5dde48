"""Free what old checkpoints take, beside writers that are at work.

A chunk may be needed by a checkpoint that is being written: the writer found it there and did not write it
again. So prune goes about it in this order, and the writer in its own:

- prune: mark all chunks that manifests name (also those of steps that are not complete); move the others to a
  folder of this prune; mark again; move back what is named now; delete the rest;
- writer: write the chunks that are missing; publish the shard's manifest; look whether all chunks are
  there, and write again those that are not.

If the manifest was published before the second mark, the chunk is moved back. Else the writer looks after it
was moved away, and writes it again. A reader meanwhile finds it in the folder. A prune that was killed
leaves its folder behind; the next one begins by moving back what is needed of it.
"""

from __future__ import annotations

import contextlib
import secrets
from dataclasses import dataclass

from windtunnel.base.errors import UserError
from windtunnel.training.checkpoint.live import chunks
from windtunnel.training.checkpoint.live.files import Files
from windtunnel.training.checkpoint.live.manifest import ChunkFile, OtherVersion, StorageError, shard_of
from windtunnel.training.checkpoint.live.storage import (
    COMPLETE,
    SHARD,
    STEPS,
    _files,
    _folder,
    _read,
    _told,
    steps,
)

STALE = 86_400.0
"""Seconds after which an unfinished write is taken for abandoned."""


@dataclass(frozen=True)
class Pruned:
    """What was removed: ``steps`` of them, ``chunks`` of them; ``kept``: the steps that are left."""

    steps: int
    chunks: int
    kept: tuple[int, ...]


def prune(url: str | Files, keep: int) -> Pruned:
    """Remove all but the newest ``keep`` complete steps, what is older and incomplete, and what no step
    needs.

    Raises:
        UserError: ``keep`` is not positive.
        StorageError: the store failed; all that is needed is still there.
    """
    if keep < 1:
        raise UserError(f"keep is {keep}; at least 1 checkpoint is kept")
    files = _files(url)
    with _told("prune"):
        found = steps(files)
        whole = sorted({one.step for one in found if not one.bad})
        kept = whole[-keep:]
        dropped = [one for one in found if kept and 0 <= one.step < kept[0]]
        for one in found:
            if not one.bad:  # what is kept must be so after a power loss, before the others go
                files.rely(f"{_folder(one.step, one.generation)}/{COMPLETE}")
        files.settle()
        for one in dropped:
            folder = _folder(one.step, one.generation)
            # First what makes it a checkpoint: killed after this, it is one that was not completed.
            files.remove(f"{folder}/{COMPLETE}")
            files.remove(folder)
        # And these must not come back after one, without their chunks.
        files.settle()
        _tidy(files)
        removed = _sweep(files)
    return Pruned(len(dropped), removed, tuple(kept))


def scrub(url: str | Files) -> list[str]:
    """Read all chunks that manifests name, and move damaged ones away, so that the next save writes them
    again.

    Returns what is damaged or missing, in words.
    """
    files = _files(url)
    told = []
    with _told("scrub"):
        for chunk in sorted(_needed(files).values(), key=lambda one: one.name):
            try:
                chunks.get(files, chunk)
            except StorageError as error:
                told.append(str(error))
                with contextlib.suppress(FileNotFoundError):
                    files.move(chunks.path(chunk.name), f"damaged/{chunk.name}")
    return told


def _sweep(files: Files) -> int:
    for left in files.names(chunks.TRASH):
        _empty(files, left)
    needed = _needed(files)
    mine = secrets.token_hex(6)
    for folder in files.names(chunks.FOLDER):
        for name in files.names(f"{chunks.FOLDER}/{folder}"):
            if name not in needed:
                with contextlib.suppress(FileNotFoundError):
                    files.move(chunks.path(name), f"{chunks.TRASH}/{mine}/{name}")
    return _empty(files, mine)


def _empty(files: Files, folder: str) -> int:
    """Move back what of a folder of removed chunks is needed, remove the rest; returns how many went."""
    where = f"{chunks.TRASH}/{folder}"
    # In this order: what another prune moves here after the marking is not touched.
    there = files.names(where)
    needed = _needed(files) if there else {}
    removed = 0
    for name in there:
        if name in needed and files.size(chunks.path(name)) is None:
            with contextlib.suppress(FileNotFoundError):
                files.move(f"{where}/{name}", chunks.path(name))
            continue
        files.remove(f"{where}/{name}")
        removed += name not in needed
    files.settle()
    files.remove_empty(where)
    return removed


def _needed(files: Files) -> dict[str, ChunkFile]:
    """The chunks that shards' manifests name.

    Raises:
        StorageError: a manifest is of another version, so that what it needs is not known. (One that is
            damaged is of no use to anybody, and names nothing.)
    """
    needed: dict[str, ChunkFile] = {}
    for step in files.names(STEPS):
        for name in files.names(f"{STEPS}/{step}"):
            where = f"{STEPS}/{step}/{name}"
            text = _read(files, where) if name.endswith(SHARD) else None
            if text is None:
                continue
            try:
                needed.update((chunk.name, chunk) for chunk in shard_of(text, where).chunks)
            except OtherVersion as error:
                raise StorageError(f"nothing can be removed: {error}") from error
            except StorageError:
                continue
    return needed


def _tidy(files: Files) -> None:
    for folder in [STEPS, chunks.FOLDER, chunks.TRASH]:
        for inside in ["", *files.names(folder)]:
            files.tidy(f"{folder}/{inside}".rstrip("/"), STALE)
