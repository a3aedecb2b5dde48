"""Layers copied: which go from whom to whom, and which to disk.

The plan follows from what each host holds in fact, not from the layout before: a recovery may have been
broken off by the next failure. Sources are chosen by the policy that the twin asks (`policy.transfers`). A
layer's whole state is sent: without the optimizer's the trajectory would change. Sends do not block, and all
hosts walk through the same list, so no order can deadlock.

In storage is what the job falls back to when the last copy of a layer is lost: a checkpoint as any job's, in
which each layer is a shard.
"""

from __future__ import annotations

import struct
from collections.abc import Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from windtunnel.base.errors import UserError
from windtunnel.store.objects.files import ObjectError
from windtunnel.training.checkpoint import Whole, steps
from windtunnel.training.checkpoint.model import StoredStep
from windtunnel.training.pipelines.live.layers import HostLayer, require_name
from windtunnel.training.pipelines.model import Transfer
from windtunnel.training.pipelines.policy.transfers import spread

_TAG = 1 << 20  # above those of microbatches
_HEAD = struct.Struct("<QQ32s")  # bytes of the layout and of the data, and their checksum
_PART = 64 << 20  # bytes of a message: each must arrive within the group's timeout


class TransferError(ConnectionError):
    """What arrived is not what was sent."""


def plan_transfers(
    assigned: Mapping[int, Sequence[int]],
    holders: Mapping[int, Sequence[int]],
    nbytes: Mapping[int, int],
) -> tuple[Transfer, ...]:
    """What has to be copied so that each rank holds its layers.

    ``assigned``: layers of each rank; ``holders``: ranks that hold each layer now; both by rank numbers, as
    the result. Layers without a holder are left out.
    """
    missing = [
        (layer, rank)
        for rank, layers in assigned.items()
        for layer in layers
        if holders[layer] and rank not in holders[layer]
    ]
    return tuple(spread(missing, holders.__getitem__, lambda layer: float(nbytes.get(layer, 0))))


def copy_layers(
    transfers: Sequence[Transfer], layers: Mapping[int, HostLayer], rank: int
) -> dict[int, Whole]:
    """Do this rank's part of ``transfers`` (ranks, not host ids); what it received, verified.

    Raises:
        TransferError: a checksum is not that of the sender.
        RuntimeError: the group broke.
    """
    last = {t.layer: number for number, t in enumerate(transfers) if t.source == rank}
    packed: dict[int, list[Tensor]] = {}
    works: list[tuple[Any, Tensor]] = []
    received: dict[int, Whole] = {}
    for number, transfer in enumerate(transfers):
        if transfer.source == rank:
            if transfer.layer not in packed:
                packed[transfer.layer] = _messages(layers[transfer.layer].pack())
            for part in packed[transfer.layer]:
                works.append((dist.isend(part, transfer.target, tag=_TAG + number), part))
            if last[transfer.layer] == number:
                del packed[transfer.layer]
        elif transfer.target == rank:
            received[transfer.layer] = _receive(transfer, _TAG + number)
    for work, _ in works:
        work.wait()
    return received


def _messages(whole: Whole) -> list[Tensor]:
    head = _HEAD.pack(len(whole.layout), len(whole.data), whole.checksum().encode())
    text, data = torch.frombuffer(bytearray(whole.layout), dtype=torch.uint8), _bytes(whole.data)
    return [torch.frombuffer(bytearray(head), dtype=torch.uint8), text, *data.split(_PART)]


def _receive(transfer: Transfer, tag: int) -> Whole:
    def received(count: int) -> memoryview:
        block = memoryview(bytearray(count))
        for part in _bytes(block).split(_PART):
            dist.recv(part, transfer.source, tag=tag)
        return block

    length, nbytes, expected = _HEAD.unpack(received(_HEAD.size))
    whole = Whole(bytes(received(length)), received(nbytes))
    if (checksum := whole.checksum()) != expected.decode():
        raise TransferError(
            f"layer {transfer.layer} from rank {transfer.source}: the copy's checksum is {checksum}, "
            f"not {expected.decode()}"
        )
    return whole


def _bytes(block: memoryview) -> Tensor:
    return torch.frombuffer(block, dtype=torch.uint8)


def saved_steps(url: str) -> list[StoredStep]:
    """The whole checkpoints, the newest first.

    Raises:
        UserError: the place cannot be read.
    """
    try:
        return sorted((step for step in steps(url) if not step.bad), key=lambda s: (-s.step, -s.generation))
    except ObjectError as error:
        raise UserError(str(error)) from None


def read_layer(url: str, saved: StoredStep, index: int, names: Sequence[str]) -> Whole:
    """A layer of a checkpoint, verified.

    Raises:
        UserError: it is missing, cut short, altered, or of another model.
    """
    if len(saved.shards) != len(names):
        raise UserError(
            f"step {saved.step} in {url} has {len(saved.shards)} layers; the model has {len(names)}"
        )
    try:
        whole = Whole.read(url, saved.shards[index])
    except ObjectError as error:
        raise UserError(f"{url}: layer {names[index]} cannot be read: {error}") from None
    require_name(whole, names[index])
    return whole
