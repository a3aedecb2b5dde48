"""What PyTorch works out for every parameter anew is worked out once for those that are alike. What comes
out is the same; on a device that is there nobody would notice, but a large job is emulated with many
ranks."""

from __future__ import annotations

import contextlib
from typing import Any

import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp._fully_shard import _fsdp_param
from torch.distributed.tensor import _sharding_prop
from torch.distributed.tensor._ops import utils
from torch.distributed.tensor.placement_types import _StridedShard


def install() -> None:
    """Call once. What another version of PyTorch does not have is left as it is."""
    for function in (_flags_once, _strategies_once, _one_empty, _sizes_once, _meshes_once, _meshes_compared):
        with contextlib.suppress(AttributeError):
            function()


def _flags_once() -> None:
    """Of an operator on lists, the whole list is walked for each tensor, to see whether one of them is
    strided."""
    module: Any = _sharding_prop
    propagate = module._propagate_use_strided_shard_flag
    last: list[Any] = [None, False]

    def once(op_strategy: Any, op_schema: Any) -> None:
        if last[0] is not op_schema:
            strided = (isinstance(p, _StridedShard) for spec in op_schema.args_spec for p in spec.placements)
            last[:] = op_schema, any(strided)
        if last[1]:
            propagate(op_strategy, op_schema)

    module._propagate_use_strided_shard_flag = once


def _strategies_once() -> None:
    """The ways to shard one tensor of a list are those of each that has its shape and placements."""
    module: Any = utils
    expand = module.expand_to_full_mesh_op_strategy
    known: dict[Any, Any] = {}

    def once(mesh: Any, op_schema: Any, single: Any, **options: Any) -> Any:
        meta = options.get("output_tensor_meta")
        given = {**options, "output_tensor_meta": tuple(meta) if isinstance(meta, list) else meta}
        try:
            key = (mesh, op_schema, tuple(map(tuple, single)), tuple(given.items()))
            if key not in known:
                known[key] = expand(mesh, op_schema, single, **options)
            return known[key]
        except TypeError:  # a part of the key has no hash
            return expand(mesh, op_schema, single, **options)

    module.expand_to_full_mesh_op_strategy = once


def _one_empty() -> None:
    """FSDP makes an empty tensor for each rank that has no part of a parameter."""
    module: Any = _fsdp_param
    chunk = module._chunk_with_empty

    def chunk_with_empty(tensor: torch.Tensor, num_chunks: int, dim: int) -> list[torch.Tensor]:
        if not tensor.is_meta:
            return list(chunk(tensor, num_chunks, dim))  # there each is an operator
        chunks = list(torch.chunk(tensor, num_chunks, dim=dim))
        return chunks + [chunks[0].new_empty(0)] * (num_chunks - len(chunks))

    module._chunk_with_empty = chunk_with_empty


def _sizes_once() -> None:
    """How much a rank has of a dimension that is sharded by strides is found by sharding a list of all its
    places, in as many parts as there are ranks."""
    kind: Any = _StridedShard
    size_of = kind.local_shard_size_and_offset
    known: dict[tuple[Any, ...], tuple[int, int]] = {}

    def once(self: Any, size: Any, chunks: Any, rank: Any, *mode: Any, **more: Any) -> Any:
        plain = type(size) is int and type(rank) is int and not (mode or more)
        if not plain or torch.get_default_device().type != "cpu":  # elsewhere each is an operator
            return size_of(self, size, chunks, rank, *mode, **more)
        key = self, size, chunks, rank
        if key not in known:
            known[key] = size_of(*key)
        return known[key]

    kind.local_shard_size_and_offset = once


def _meshes_once() -> None:
    """FSDP puts the mesh of its shards and that of tensor parallelism together for each parameter."""
    module: Any = DeviceMesh
    concatenate = module._concatenate
    known: dict[tuple[int, ...], tuple[list[Any], Any]] = {}

    def once(meshes: list[Any]) -> Any:
        key = tuple(map(id, meshes))
        if key not in known:
            known[key] = meshes, concatenate(meshes)  # they stay, and with them their numbers
        return known[key][1]

    module._concatenate = staticmethod(once)


def _meshes_compared() -> None:
    """Meshes are compared by the numbers of all ranks of the world: those that were equal have one list of
    them from then on."""
    module: Any = DeviceMesh
    equal = module.__eq__
    others = ("_layout", "_device_type", "_mesh_dim_names", "_thread_id")

    def compared(self: Any, other: object) -> bool:
        if not isinstance(other, DeviceMesh):
            return bool(equal(self, other))
        one: Any = other
        if self._flatten_rank_map is not one._flatten_rank_map:
            if self._flatten_rank_map != one._flatten_rank_map:
                return False
            one._flatten_rank_map = self._flatten_rank_map
        return all(getattr(self, name) == getattr(one, name) for name in others)

    module.__eq__ = compared
