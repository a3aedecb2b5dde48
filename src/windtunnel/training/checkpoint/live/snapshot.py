"""From a live state into slots: planned once, then only bytes are copied.

The plan (which tensor goes to which offset of which shard) holds as long as names, shapes and types stay;
every save looks at the tensors again, since their storages may have been replaced. Tensors go straight from
where they are into the slot's mapped memory, without pickling, and are hashed there block by block, while the
processor's cache still holds what was written: memory is read once and written once.
"""

from __future__ import annotations

import struct
from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from typing import Any, cast

import torch
import xxhash
from torch import nn
from torch.optim import Optimizer

from windtunnel.training.checkpoint.live import objects as plain
from windtunnel.training.checkpoint.live import state
from windtunnel.training.checkpoint.live.layout import ShardLayout, arrange, digest, view_of
from windtunnel.training.checkpoint.live.slot import checksum_of
from windtunnel.training.checkpoint.model import SHARED, Shard

_HOT = 2 << 20  # bytes: a part of a processor's last cache, and enough that the calls cost nothing
_LENGTH = struct.Struct("<Q")

Tensors = Sequence[tuple[str, torch.Tensor]]
Signature = tuple[tuple[str, torch.Size, torch.dtype], ...]


@dataclass(frozen=True)
class SnapshotPlan:
    """``layouts``, their texts and digests by shard; ``moves[shard]``: number of the tensor in the walk,
    number of its entry."""

    signature: Signature
    layouts: dict[str, ShardLayout]
    blobs: dict[str, bytes]
    digests: dict[str, str]
    moves: dict[str, tuple[tuple[int, int], ...]]
    tail: int

    def shard(self, name: str, step: int, world: int, generation: int, checksum: str = "") -> Shard:
        """What a shard of this plan is at ``step``."""
        nbytes = self.layouts[name].nbytes
        return Shard(
            name, step, world, SHARED in self.layouts, generation, self.digests[name], nbytes, checksum
        )


def signature(tensors: Tensors) -> Signature:
    """What a plan depends on."""
    return tuple((name, state.local(tensor).shape, tensor.dtype) for name, tensor in tensors)


def plan(
    tensors: Tensors,
    objects: tuple[str, ...],
    packed: int,
    shared: frozenset[str] | None,
    own: str,
) -> SnapshotPlan:
    """Where everything goes, in the shard ``own``. ``packed``: bytes of the objects now;
    ``shared``: tensors alike on all ranks; None: there is no shard for such."""
    tail = max(4096, (2 * packed + plain.LENGTH + 4095) // 4096 * 4096)
    by_shard: dict[str, list[int]] = {own: [], **({} if shared is None else {SHARED: []})}
    for number, (name, _) in enumerate(tensors):
        by_shard[SHARED if shared and name in shared else own].append(number)
    layouts, moves = {}, {}
    for shard, numbers in by_shard.items():
        entries = [
            (state.entry(tensors[n][0], tensors[n][1], 0), _identity(tensors[n][1], n)) for n in numbers
        ]
        mine = shard == own
        layouts[shard] = arrange(shard, entries, tail if mine else 0, objects if mine else ())
        first: dict[int, tuple[int, int]] = {}  # tied tensors are copied once
        for at, number in enumerate(numbers):
            if layouts[shard].entries[at].nbytes:
                first.setdefault(layouts[shard].entries[at].offset, (number, at))
        moves[shard] = tuple(first.values())
    blobs = {shard: layout.blob() for shard, layout in layouts.items()}
    digests = {shard: digest(blob) for shard, blob in blobs.items()}
    return SnapshotPlan(signature(tensors), layouts, blobs, digests, moves, tail)


def views(layout: ShardLayout, moves: Sequence[tuple[int, int]], data: memoryview) -> list[torch.Tensor]:
    """The places in a slot's memory that the moves write to."""
    return [view_of(data, layout.entries[at]) for _, at in moves]


def copy(tensors: Tensors, moves: Sequence[tuple[int, int]], targets: list[torch.Tensor]) -> None:
    """All tensors of a shard into its slot. Returns when the bytes are there."""
    sources = [state.local(tensors[number][1]) for number, _ in moves]
    if targets:
        with torch.no_grad():
            torch._foreach_copy_(targets, sources)
    if any(source.is_cuda for source in sources):
        torch.cuda.synchronize()


def copy_hashed(
    tensors: Tensors,
    layout: ShardLayout,
    moves: Sequence[tuple[int, int]],
    targets: list[torch.Tensor],
    data: memoryview,
) -> str:
    """`copy`, and the checksum of ``data`` (the slot's, with the objects already in it) afterwards."""
    sources = [state.local(tensors[number][1]) for number, _ in moves]
    if any(source.is_cuda for source in sources):
        copy(tensors, moves, targets)
        return checksum_of(data)
    hashed, whole = 0, xxhash.xxh3_128()
    into: list[torch.Tensor] = []
    out: list[torch.Tensor] = []
    with torch.no_grad():
        for (_, at), source, target in zip(moves, sources, targets, strict=True):
            entry = layout.entries[at]
            if entry.nbytes > _HOT and source.is_contiguous():
                count = _HOT // source.element_size()
                pieces = list(zip(target.view(-1).split(count), source.view(-1).split(count), strict=True))
            else:
                pieces = [(target, source)]
            done = entry.offset
            for to, of in pieces:
                into.append(to)
                out.append(of)
                done += of.nbytes
                if done - hashed >= _HOT:
                    torch._foreach_copy_(into, out)
                    whole.update(data[hashed:done])
                    hashed = done
                    into, out = [], []
        if into:
            torch._foreach_copy_(into, out)
    whole.update(data[hashed:])
    return whole.hexdigest()


def put_objects(packed: bytes, tail: int, data: memoryview) -> None:
    """The objects' bytes before the tensors, with zeros behind, so that equal states are equal bytes."""
    data[: plain.LENGTH] = _LENGTH.pack(len(packed))
    data[plain.LENGTH : plain.LENGTH + len(packed)] = packed
    data[plain.LENGTH + len(packed) : tail] = bytes(tail - plain.LENGTH - len(packed))


def get_objects(layout: ShardLayout, data: memoryview) -> dict[str, object]:
    """The inverse of `put_objects`.

    Raises:
        UserError: what is there cannot be read.
    """
    if not layout.tail:
        return {}
    (length,) = _LENGTH.unpack(data[: plain.LENGTH])
    return plain.unpack(bytes(data[plain.LENGTH : plain.LENGTH + min(length, layout.tail)]))


def fingerprints(tensors: Tensors) -> dict[str, str]:
    """A checksum of every tensor that lies whole on this rank, by name."""
    out = {}
    for name, tensor in tensors:
        here = state.local(tensor)
        if here.shape == tensor.shape and here.numel():
            flat = here.cpu().resolve_conj().resolve_neg().contiguous().reshape(-1).view(torch.uint8)
            content = xxhash.xxh3_64_hexdigest(cast(Any, flat.numpy()))
            out[name] = f"{content}/{here.dtype}/{tuple(here.shape)}"
    return out


def _identity(tensor: torch.Tensor, number: int) -> Hashable:
    """Equal for tied tensors: the same memory, read the same way."""
    here = state.local(tensor)
    if not here.numel():
        return number
    return here.data_ptr(), here.shape, here.stride(), here.dtype, here.is_conj(), here.is_neg(), here.device


def agree_alike(
    job: Any, program: state.State, tensors: Tensors, before: frozenset[str] | None, key: str
) -> frozenset[str] | None:
    """Names of the tensors that are equal on all ranks now. All ranks call it; ``key`` is its own.

    ``before``: what was found last, None for the first time: names only ever leave the set. The first time,
    None where they make up less than an eighth of the state: a shard of its own is not worth it.
    """
    if before is None:
        kinds = (nn.Module, Optimizer)
        replicas = tuple(f"{item}/" for item, value in program.items() if isinstance(value, kinds))
        candidates = [(name, tensor) for name, tensor in tensors if name.startswith(replicas)]
    else:
        candidates = [(name, tensor) for name, tensor in tensors if name in before]
    prints = fingerprints(candidates)
    answers = job.agree(f"alike/{key}", prints)
    alike = frozenset(n for n, p in prints.items() if all(other.get(n) == p for other in answers.values()))
    if before is not None:
        left = sorted(before - alike)
        if left and job.rank == 0:
            text = f"{left[0]} was equal on all ranks and is not any more ({len(left)} tensors in all)"
            job.event("note", text=text + "; it is saved for each rank from now on")
        return alike
    sizes = {name: state.local(tensor).nbytes for name, tensor in tensors}
    much = 8 * sum(sizes[name] for name in alike) >= sum(sizes.values())
    weights = job.agree(f"alike-share/{key}", bool(alike) and much)
    return alike if all(weights.values()) else None
