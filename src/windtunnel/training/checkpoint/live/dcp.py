"""Steps in storage as checkpoints of torch.distributed.checkpoint (DCP), for other tools.

The whole of every tensor is put together from all shards, and goes under the name that it has in the layout
("model/0.weight"). What is not a tensor, and the generators' states, which are each rank's own, are left out.
No process group is needed; the memory for one full state is.
"""

from __future__ import annotations

import warnings
from pathlib import Path

import torch
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.state_dict_saver import save as dcp_save

from windtunnel.base.errors import HostError, UserError
from windtunnel.training.checkpoint.live import storage
from windtunnel.training.checkpoint.live.layout import (
    ShardLayout,
    Want,
    choose_moves,
    copy_overlap,
    room_for,
    view_of,
)
from windtunnel.training.checkpoint.live.state import RNG


def export_stored(url: str, step: int, folder: str | Path) -> list[str]:
    """Write a step that is in storage at ``url`` as a DCP checkpoint to ``folder``; the names in it.

    Raises:
        UserError: the step is not there, or a tensor is not whole in it. HostError: it cannot be written.
    """
    stored_steps = [stored for stored in storage.steps(url) if stored.step == step and not stored.bad]
    if not stored_steps:
        there = sorted({step.step for step in storage.steps(url) if not step.bad})
        names = ", ".join(map(str, there)) or "none"
        raise UserError(f"{url}: step {step} is not there; complete are {names}")
    newest = max(stored_steps, key=lambda stored_step: stored_step.generation)
    shards = {shard.name: shard for shard in newest.shards}
    layouts = [ShardLayout.of(storage.layout(url, shard)) for shard in newest.shards]
    wholes: dict[str, torch.Tensor] = {}
    wants = []
    for layout in layouts:
        for e in layout.entries:
            if e.name not in wholes and e.name != RNG and not e.name.startswith(f"{RNG}/"):
                want = Want(e.name, e.dtype, e.whole, (0,) * len(e.whole), e.whole)
                wants.append(want)
                wholes[e.name] = room_for(want)
    for name, moves in choose_moves(layouts, wants).items():
        data = memoryview(bytearray(shards[name].nbytes))
        storage.read_shard(url, shards[name], data)
        for move in moves:
            copy_overlap(move, view_of(data, move.source), wholes[move.want.name])
    try:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "torch.distributed is disabled")  # that is what was asked for
            dcp_save(wholes, checkpoint_id=str(folder), no_dist=True)
    except CheckpointException as error:
        why, _ = next(iter(error.failures.values()))
        raise HostError(f"the checkpoint in {folder} is not whole: {why!s:.200}") from error
    return sorted(wholes)
