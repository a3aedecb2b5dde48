"""All of a state as one shard in memory: how it goes to storage and to other hosts where no agent keeps it.

    whole = Whole.of("rank3", state)
    store(job, url, step, {"rank3": whole}, job.world, key, job.generation)
    Whole.read(url, shard).put(state)

What is written this way is a checkpoint as any other, which a job of any size restores. `export_stored`
writes one for other tools.
"""

from __future__ import annotations

import json
import warnings
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import xxhash

from windtunnel.base.errors import HostError, UserError
from windtunnel.base.plain import from_plain, to_plain
from windtunnel.training.checkpoint.live import objects, snapshot, state, storage
from windtunnel.training.checkpoint.live.layout import (
    ShardLayout,
    Want,
    choose_moves,
    copy_overlap,
    digest,
    room_for,
    view_of,
)
from windtunnel.training.checkpoint.live.slot import checksum_of
from windtunnel.training.checkpoint.live.state import RNG
from windtunnel.training.checkpoint.model import Shard


@dataclass(frozen=True)
class Whole:
    """``layout``: the text of what lies where in ``data``."""

    layout: bytes
    data: memoryview

    @staticmethod
    def of(name: str, program: state.State, rng: bool = False) -> Whole:
        """``program`` as it is now, as the shard ``name``. ``rng``: with the global generators.

        Raises:
            UserError: something in it cannot be saved.
        """
        return Whole.packed(name, *state.walk(program, rng))

    @staticmethod
    def packed(name: str, tensors: snapshot.Tensors, others: dict[str, Any]) -> Whole:
        """A state that was walked over."""
        packed = objects.pack(others)
        plan = snapshot.plan(tensors, tuple(others), len(packed), None, name)
        layout, moves = plan.layouts[name], plan.moves[name]
        data = memoryview(bytearray(layout.nbytes))
        snapshot.put_objects(packed, layout.tail, data)
        snapshot.copy(tensors, moves, snapshot.views(layout, moves, data))
        return Whole(plan.blobs[name], data)

    @staticmethod
    def read(url: str, shard: Shard) -> Whole:
        """A shard that is in storage, verified.

        Raises:
            ObjectError: it is missing or damaged.
        """
        layout, data = storage.layout(url, shard), memoryview(bytearray(shard.nbytes))
        storage.read_shard(url, shard, data)
        return Whole(layout, data)

    def checksum(self) -> str:
        """xxh3_128 of both, hexadecimal."""
        return xxhash.xxh3_128_hexdigest((digest(self.layout) + checksum_of(self.data)).encode())

    def content(self) -> str:
        """xxh3_128 of the state, the same for equal states; bytes of equal objects may differ."""
        layout = ShardLayout.of(self.layout)
        named = [(entry.name, entry.dtype, entry.shape) for entry in layout.entries]
        text = json.dumps([named, self.objects()], sort_keys=True, default=repr)
        hasher = xxhash.xxh3_128(text.encode())
        hasher.update(self.data[layout.tail :])
        return hasher.hexdigest()

    def shard(self, name: str, step: int, world: int, generation: int) -> Shard:
        """As the shard ``name`` of ``world`` such."""
        nbytes, checksum = len(self.data), checksum_of(self.data)
        return Shard(name, step, world, False, generation, digest(self.layout), nbytes, checksum)

    def objects(self) -> dict[str, Any]:
        """What is not a tensor, by name."""
        return snapshot.get_objects(ShardLayout.of(self.layout), self.data)

    def put(self, program: state.State) -> None:
        """Into ``program``.

        Raises:
            UserError: it is of another state; nothing was changed.
        """
        saved = {entry.name: entry for entry in ShardLayout.of(self.layout).entries}
        others = self.objects()
        state.wants(program, saved, set(others), rng=False)
        state.put(
            program,
            lambda name: view_of(self.data, saved[name]),
            lambda name: saved[name].whole,
            others,
            rng=False,
        )


def store(
    job: Any,
    url: str,
    step: int,
    wholes: Mapping[str, Whole],
    world: int,
    key: str,
    generation: int,
    keep: int = 0,
) -> None:
    """Write each rank's shards (by their names) to storage, then the word that the step is complete; all but
    the newest ``keep`` steps go (0: none). All ranks call it, and together they have ``world`` shards.
    ``generation``: larger than that of another course of this step that may be there.

    Raises:
        ObjectError: it cannot be written.
        TimeoutError: not all ranks came.
    """
    mine = []
    for name, whole in wholes.items():
        written = storage.write_shard(url, whole.shard(name, step, world, generation), whole.data)
        mine.append([to_plain(written), whole.layout.decode()])
    answers = job.agree(f"stored/{key}", mine)
    if job.rank == 0:
        parts = [pair for pairs in answers.values() for pair in pairs]
        layouts = {digest(text.encode()): text.encode() for _, text in parts}
        storage.complete_step(url, [from_plain(storage.Written, record) for record, _ in parts], layouts)
        if keep:
            storage.prune(url, keep)
    job.agree(f"stored-complete/{key}")


def export_stored(url: str, step: int, folder: str | Path) -> list[str]:
    """Write a step that is in storage at ``url`` as a checkpoint of torch.distributed.checkpoint (DCP) to
    ``folder``; the names in it.

    The whole of every tensor is put together from all shards, and goes under the name that it has in the
    layout ("model/0.weight"). What is not a tensor, and the generators' states, which are each rank's own,
    are left out. No process group is needed; the memory for one full state is.

    Raises:
        UserError: the step is not there, or a tensor is not whole in it. HostError: it cannot be written.
    """
    from torch.distributed.checkpoint.api import CheckpointException
    from torch.distributed.checkpoint.state_dict_saver import save as dcp_save

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
