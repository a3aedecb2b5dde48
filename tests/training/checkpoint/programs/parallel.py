"""A rank of a replicated or sharded job, which keeps each step in storage.

parallel.py KIND FOLDER STEPS OUT
"""

from __future__ import annotations

import os
import sys
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

from windtunnel.training.checkpoint import PeerCheckpointer
from windtunnel.training.elastic import Job, run

KIND, FOLDER, STEPS, OUT = sys.argv[1], sys.argv[2], int(sys.argv[3]), sys.argv[4]


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(6, 14, bias=False)
        self.down = nn.Linear(14, 6)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(torch.relu(self.up(x)))


def build(world: int) -> dict[str, Any]:
    torch.manual_seed(3)
    blocks = [Block(), Block()]
    model: nn.Module = nn.Sequential(*blocks, nn.Linear(6, 5))
    if KIND == "ddp":
        model = nn.parallel.DistributedDataParallel(model)
    if KIND == "mesh":
        mesh = init_device_mesh("cpu", (world // 2, 2), mesh_dim_names=("data", "tensor"))
        for block in blocks:
            parallelize_module(block, mesh["tensor"], {"up": ColwiseParallel(), "down": RowwiseParallel()})
        fully_shard(model, mesh=mesh["data"])
    if KIND == "fsdp":
        for part in (*blocks, model):
            fully_shard(part, mesh=init_device_mesh("cpu", (world,)))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.02, foreach=False)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 2, 0.7)
    return {"model": model, "optimizer": optimizer, "scheduler": scheduler, "cursor": {"step": 0}}


def step_of(state: dict[str, Any], step: int) -> str:
    x = torch.randn(8, 6, generator=torch.Generator().manual_seed(step))
    loss = state["model"](x + torch.rand(())).square().mean()  # a draw from the generator that is saved
    loss.backward()
    state["optimizer"].step()
    state["optimizer"].zero_grad()
    state["scheduler"].step()
    state["cursor"]["step"] = step + 1
    return float(loss.detach()).hex()


def whole(state: dict[str, Any]) -> dict[str, torch.Tensor]:
    """The full state, by name."""
    out = {}
    for name, parameter in state["model"].named_parameters():
        held = {"": parameter, **state["optimizer"].state[parameter]}
        for key, tensor in held.items():
            full = tensor.full_tensor() if isinstance(tensor, DTensor) else tensor
            out[f"{name.removeprefix('module.')}/{key}"] = full.detach().clone()
    return out


def train(job: Job) -> None:
    state = build(job.world)
    checkpointer = PeerCheckpointer(job, persist=FOLDER, persist_every=1)
    torch.manual_seed(11)
    start = checkpointer.restore(state)
    restored = whole(state) if start else {}
    losses = []
    for step in range(start, STEPS):
        losses.append(step_of(state, step))
        checkpointer.step(step, state)
    if start == STEPS:  # only to be saved again, as cut here
        checkpointer.step(STEPS, state)
    left = whole(state)
    if job.rank == 0:
        result = {
            "start": start,
            "losses": losses,
            "found": restored,
            "left": left,
            "cursor": state["cursor"],
        }
        torch.save(result, OUT)
    dist.barrier()
    os._exit(0)  # gloo's destructors hang now and then


torch.set_num_threads(1)
run(train, backend="gloo")
