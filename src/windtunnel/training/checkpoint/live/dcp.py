"""Checkpoints to and from the format of torch.distributed.checkpoint (DCP), for other tools.

Export puts the whole of every tensor together from all shards and writes one DCP checkpoint of full tensors,
under the names of the layout ("model/0.weight"). What is not a tensor goes in as one tensor of bytes, in the
form of `objects`, so that no tool has to unpickle anything. Import makes one shard, as a job of one rank
would save it, which any world then reshards when it restores. No process group is needed; the memory for one
full state is.
"""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.filesystem import FileSystemReader
from torch.distributed.checkpoint.metadata import TensorStorageMetadata
from torch.distributed.checkpoint.state_dict_loader import load as dcp_load
from torch.distributed.checkpoint.state_dict_saver import save as dcp_save

from windtunnel.base.errors import HostError, UserError
from windtunnel.training.checkpoint.live import objects, snapshot, storage
from windtunnel.training.checkpoint.live.layout import (
    ShardLayout,
    Want,
    choose_moves,
    copy_overlap,
    room_for,
    view_of,
)
from windtunnel.training.checkpoint.live.state import RNG
from windtunnel.training.checkpoint.live.whole import Whole

OBJECTS = "windtunnel.objects"

Fetch = Callable[[str, memoryview], object]


def export(folder: str | Path, layouts: Sequence[ShardLayout], fetch: Fetch) -> list[str]:
    """Write a DCP checkpoint to ``folder``; the names in it.

    ``layouts``: of all shards of one step. ``fetch(shard, into)`` reads one. The generators' states are left
    out: they are each rank's own.

    Raises:
        UserError: a tensor is not whole in the shards. HostError: it cannot be written.
    """
    wholes: dict[str, torch.Tensor] = {}
    others: dict[str, Any] = {}
    wants = []
    for layout in layouts:
        for e in layout.entries:
            if e.name not in wholes and not _own(e.name):
                want = Want(e.name, e.dtype, e.whole, (0,) * len(e.whole), e.whole)
                wants.append(want)
                wholes[e.name] = room_for(want)
    moves = choose_moves(layouts, wants)
    for layout in layouts:
        if layout.shard not in moves and not layout.objects:
            continue
        data = memoryview(bytearray(layout.nbytes))
        fetch(layout.shard, data)
        for move in moves.get(layout.shard, []):
            copy_overlap(move, view_of(data, move.source), wholes[move.want.name])
        for name, value in snapshot.get_objects(layout, data).items():
            if not _own(name):
                others.setdefault(name, value)
    packed = torch.frombuffer(bytearray(objects.pack(others)), dtype=torch.uint8)
    try:
        with _quiet():
            dcp_save({**wholes, OBJECTS: packed}, checkpoint_id=str(folder), no_dist=True)
    except CheckpointException as error:
        why, _ = next(iter(error.failures.values()))
        raise HostError(f"the checkpoint in {folder} is not whole: {why!s:.200}") from error
    return sorted(wholes)


def export_stored(url: str, step: int, folder: str | Path) -> list[str]:
    """Write a step that is in storage at ``url`` as a DCP checkpoint.

    Raises:
        UserError: the step is not there, or not whole.
    """
    stored_steps = [stored for stored in storage.steps(url) if stored.step == step and not stored.bad]
    if not stored_steps:
        there = sorted({step.step for step in storage.steps(url) if not step.bad})
        names = ", ".join(map(str, there)) or "none"
        raise UserError(f"{url}: step {step} is not there; complete are {names}")
    newest = max(stored_steps, key=lambda stored_step: stored_step.generation)
    shards = {shard.name: shard for shard in newest.shards}
    layouts = [ShardLayout.of(storage.layout(url, shard)) for shard in newest.shards]
    return export(folder, layouts, lambda name, into: storage.read_shard(url, shards[name], into))


def load(folder: str | Path) -> tuple[dict[str, torch.Tensor], dict[str, Any]]:
    """All tensors of a DCP checkpoint, whole, by name, and the objects of one that `export` wrote.

    Raises:
        UserError: there is no DCP checkpoint.
    """
    try:
        metadata = FileSystemReader(str(folder)).read_metadata()
    except OSError as error:
        raise UserError(f"{folder}: no checkpoint of torch.distributed.checkpoint ({error})") from error
    tensors = {
        name: torch.empty(described.size, dtype=described.properties.dtype)
        for name, described in metadata.state_dict_metadata.items()
        if isinstance(described, TensorStorageMetadata)
    }
    with _quiet():
        dcp_load(tensors, checkpoint_id=str(folder), no_dist=True)
    packed = tensors.pop(OBJECTS, None)
    return tensors, {} if packed is None else objects.unpack(packed.numpy().tobytes())


def import_stored(
    folder: str | Path,
    url: str,
    step: int,
    *,
    names: dict[str, str] | None = None,
    others: dict[str, Any] | None = None,
) -> list[str]:
    """Put a DCP checkpoint into storage at ``url`` as ``step``, where `PeerCheckpointer.restore` finds it;
    the names of its tensors there.

    For one that another tool wrote, ``names``: names of the layout by names in it
    (``{"model.0.weight": "model/0.weight"}``), ``others``: what the state has that is not a tensor.

    Raises:
        UserError: there is no DCP checkpoint, or something in it cannot be saved.
    """
    loaded, with_it = load(folder)
    tensors = [((names or {}).get(name, name), value) for name, value in loaded.items()]
    plain = {**with_it, **(others or {})}
    objects.check(plain)
    whole = Whole.packed("rank0", tensors, plain)
    written = storage.write_shard(url, whole.shard("rank0", step, 1, 0), whole.data)
    storage.complete_step(url, [written], {written.shard.layout: whole.layout})
    return sorted(name for name, _ in tensors)


def _own(name: str) -> bool:
    return name == RNG or name.startswith(f"{RNG}/")


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "torch.distributed is disabled")  # that is what was asked for
        yield
