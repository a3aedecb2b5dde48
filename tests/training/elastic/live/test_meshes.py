"""Meshes of two generations are not taken for each other, nor what DTensor worked out for the first."""

from __future__ import annotations

import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard

from windtunnel.training.elastic.live import group


def piece(rank: int) -> DTensor:
    """Of three rows over four ranks, the last of which has none."""
    mesh = DeviceMesh("cpu", [0, 1, 2, 3], mesh_dim_names=("dp",), _init_backend=False, _rank=rank)
    rows = torch.zeros(1 if rank < 3 else 0, 5)
    return DTensor.from_local(
        rows, mesh, [Shard(0)], run_check=False, shape=torch.Size((3, 5)), stride=(5, 1)
    )


def rank_of_a_result(tensor: DTensor) -> list[int]:
    empty: DTensor = torch.empty_like(tensor)  # type: ignore[assignment]
    return list(empty.device_mesh.get_coordinate() or ())


def test_a_process_that_goes_on_under_another_rank() -> None:
    group.part_meshes()
    before = piece(3)
    assert before.device_mesh == piece(3).device_mesh
    assert rank_of_a_result(before) == [3]
    group.part_meshes()
    after = piece(2)
    assert after.device_mesh != before.device_mesh
    assert rank_of_a_result(after) == [2]
