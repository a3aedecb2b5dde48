"""Free what old checkpoints take, beside writers that are at work (see `store.objects.collect`)."""

from __future__ import annotations

from dataclasses import dataclass

from windtunnel.base.errors import UserError
from windtunnel.store.objects import collect
from windtunnel.store.objects.files import Files, ObjectError, OtherVersion, open_files, read_if_there, told
from windtunnel.store.objects.manifest import unseal
from windtunnel.training.checkpoint.live.storage import (
    COMPLETE,
    SHARD,
    SHARD_KIND,
    STEPS,
    VERSION,
    ShardManifest,
    step_folder,
    steps,
)


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
