"""Layers copied: which go from whom to whom, and which to disk.

The plan follows from what each host holds in fact, not from the layout before: a recovery may have been
broken off by the next failure. Sources are chosen by the policy that the twin asks (`policy.transfers`). A
layer's whole state is sent: without the optimizer's the trajectory would change. Sends do not block, and all
hosts walk through the same list, so no order can deadlock.

On disk is what the job falls back to when the last copy of a layer is lost. A step is a folder
``step-00000040`` with one file a layer and, last, ``manifest.json`` with the checksum of each: a folder
without a whole manifest does not count. The folder must be one that all hosts see.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from windtunnel.base.errors import UserError
from windtunnel.store.objects.files import LocalFiles, ObjectError, told
from windtunnel.store.objects.manifest import seal, unseal
from windtunnel.training.pipelines.live.layers import Layer, checksum
from windtunnel.training.pipelines.model import Transfer
from windtunnel.training.pipelines.policy.transfers import spread

_TAG = 1 << 20  # above those of microbatches
_HEAD = 40  # bytes: the length of the block, and its checksum
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
    wanted = [
        (layer, rank)
        for rank, layers in assigned.items()
        for layer in layers
        if holders[layer] and rank not in holders[layer]
    ]
    return tuple(spread(wanted, holders.__getitem__, lambda layer: float(nbytes.get(layer, 0))))


def copy_layers(transfers: Sequence[Transfer], layers: Mapping[int, Layer], rank: int) -> dict[int, Tensor]:
    """Do this rank's part of ``transfers`` (ranks, not host ids); the blocks that it received, verified.

    Raises:
        TransferError: a block's checksum is not that of the sender.
        RuntimeError: the group broke.
    """
    last = {t.layer: number for number, t in enumerate(transfers) if t.source == rank}
    packed: dict[int, tuple[Tensor, Tensor]] = {}
    works: list[tuple[Any, Tensor]] = []
    received: dict[int, Tensor] = {}
    for number, transfer in enumerate(transfers):
        if transfer.source == rank:
            if transfer.layer not in packed:
                packed[transfer.layer] = _with_head(layers[transfer.layer].pack())
            for part in _parts(*packed[transfer.layer]):
                works.append((dist.isend(part, transfer.target, tag=_TAG + number), part))
            if last[transfer.layer] == number:
                del packed[transfer.layer]
        elif transfer.target == rank:
            received[transfer.layer] = _receive(transfer, _TAG + number)
    for work, _ in works:
        work.wait()
    return received


def _receive(transfer: Transfer, tag: int) -> Tensor:
    head = torch.empty(_HEAD, dtype=torch.uint8)
    dist.recv(head, transfer.source, tag=tag)
    length, digest = head[:8].numpy().tobytes(), head[8:].numpy().tobytes()
    block = torch.empty(int.from_bytes(length, "little"), dtype=torch.uint8)
    for part in block.split(_PART):
        dist.recv(part, transfer.source, tag=tag)
    if checksum(block) != digest.decode():
        raise TransferError(
            f"layer {transfer.layer} from rank {transfer.source}: the copy's checksum is {checksum(block)},"
            f" not {digest.decode()}"
        )
    return block


def _with_head(block: Tensor) -> tuple[Tensor, Tensor]:
    head = block.numel().to_bytes(8, "little") + checksum(block).encode()
    return torch.frombuffer(bytearray(head), dtype=torch.uint8), block


def _parts(head: Tensor, block: Tensor) -> list[Tensor]:
    return [head, *block.split(_PART)]


_KIND, _VERSION = "step of a pipeline", 1
_MANIFEST = "manifest.json"


@dataclass(frozen=True)
class Saved:
    """What a step's manifest says: names of the layers and checksums of their files."""

    step: int
    layers: tuple[str, ...]
    checksums: tuple[str, ...]


def write_layer(folder: Path, step: int, index: int, block: Tensor) -> str:
    """Write one layer's block of ``step``; its checksum."""
    _write(LocalFiles(str(folder)), _layer(step, index), block.numpy().data)
    return checksum(block)


def write_manifest(folder: Path, step: int, names: list[str], checksums: list[str], keep: int) -> None:
    """Make ``step`` count, and remove all but the ``keep`` newest steps."""
    files = LocalFiles(str(folder))
    saved = Saved(step, tuple(names), tuple(checksums))
    _write(files, f"{_folder(step)}/{_MANIFEST}", seal(_KIND, _VERSION, saved))
    with told(f"old steps in {folder}"):
        for old in saved_steps(folder)[keep:]:
            files.remove(f"{_folder(old)}/{_MANIFEST}")
            files.remove(_folder(old))


def saved_steps(folder: Path) -> list[int]:
    """Steps that have a manifest, the newest first."""
    found = [path.parent.name.removeprefix("step-") for path in folder.glob(f"step-*/{_MANIFEST}")]
    return sorted((int(step) for step in found if step.isdecimal()), reverse=True)


def read_layer(folder: Path, step: int, index: int, names: list[str]) -> Tensor:
    """A layer's verified block.

    Raises:
        UserError: the files are missing, cut short, altered, or of another model.
    """
    files, where = LocalFiles(str(folder)), folder / _folder(step) / _MANIFEST
    try:
        saved = unseal(Saved, _KIND, _VERSION, files.read(f"{_folder(step)}/{_MANIFEST}"), str(where))
        block = torch.frombuffer(bytearray(files.read(_layer(step, index))), dtype=torch.uint8)
    except (OSError, ObjectError, ValueError) as error:  # torch takes no empty buffer
        raise UserError(f"{where.parent}: layer {names[index]} cannot be read: {error}") from None
    if saved.layers != tuple(names):
        raise UserError(f"{where}: layers {list(saved.layers)}; the model has {names}")
    found, expected = checksum(block), saved.checksums[index]
    if found != expected:
        raise UserError(f"{folder / _layer(step, index)}: checksum {found}; the manifest says {expected}")
    return block


def _folder(step: int) -> str:
    return f"step-{step:08d}"


def _layer(step: int, index: int) -> str:
    return f"{_folder(step)}/layer-{index:04d}"


def _write(files: LocalFiles, name: str, data: bytes | memoryview) -> None:
    with told("a step cannot be saved"):
        files.write(name, data)
        files.settle()
