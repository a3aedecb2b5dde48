"""Real ranks over gloo, each a process, with memory as slots in a folder that outlives them."""

from __future__ import annotations

import json
import os
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from checkpoint_world import Cluster, FakeJob, FakeMemory
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

from support import preloaded
from support.ports import free_port
from windtunnel.training.checkpoint.live import checkpointer
from windtunnel.training.checkpoint.live.access import Access


class _Layouts(dict[str, bytes]):
    """Layouts as files, for all processes."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def __setitem__(self, digest: str, blob: bytes) -> None:
        path = self._folder / f"layout-{digest}"
        path.with_suffix(f".{os.getpid()}").write_bytes(blob)
        path.with_suffix(f".{os.getpid()}").rename(path)

    def __contains__(self, digest: object) -> bool:
        return (self._folder / f"layout-{digest}").exists()

    def __getitem__(self, digest: str) -> bytes:
        return (self._folder / f"layout-{digest}").read_bytes()


class GlooJob(FakeJob):
    """Agreements through the process group."""

    def agree(self, key: str, value: Any = None, timeout: float | None = None) -> dict[int, Any]:
        out: list[Any] = [None] * self.world
        dist.all_gather_object(out, json.loads(json.dumps({"key": key, "value": value})))
        assert {one["key"] for one in out} == {key}
        return {rank: one["value"] for rank, one in enumerate(out)}


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(6, 14, bias=False)
        self.down = nn.Linear(14, 6)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(torch.relu(self.up(x)))


def build(kind: str, world: int) -> dict[str, Any]:
    torch.manual_seed(3)
    model: nn.Module = nn.Sequential(Block(), Block(), nn.Linear(6, 5))
    if kind == "ddp":
        model = nn.parallel.DistributedDataParallel(model)
    if kind == "mesh":
        mesh = init_device_mesh("cpu", (world // 2, 2), mesh_dim_names=("data", "tensor"))
        for block in (model[0], model[1]):  # type: ignore[index]
            parallelize_module(block, mesh["tensor"], {"up": ColwiseParallel(), "down": RowwiseParallel()})
        fully_shard(model, mesh=mesh["data"])
    if kind == "fsdp":
        mesh = init_device_mesh("cpu", (world,))
        for block in (model[0], model[1]):  # type: ignore[index]
            fully_shard(block, mesh=mesh)
        fully_shard(model, mesh=mesh)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.02, foreach=False)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 2, 0.7)
    return {"model": model, "optimizer": optimizer, "scheduler": scheduler, "cursor": {"step": 0}}


def train(state: dict[str, Any], step: int) -> str:
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
        name = name.removeprefix("module.")
        tensors = {
            name: parameter,
            **{f"{name}/{k}": v for k, v in state["optimizer"].state[parameter].items()},
        }
        for key, tensor in tensors.items():
            out[key] = (tensor.full_tensor() if isinstance(tensor, DTensor) else tensor).detach().clone()
    return out


def launch(world: int, kind: str, folder: Path, steps: int, generation: int) -> dict[str, Any]:
    """``world`` ranks restore, train up to ``steps``, saving each; what rank 0 found and got."""
    port = free_port()
    out = folder / f"result-{generation}.pt"
    ranks = [
        preloaded.call(_rank, rank, world, kind, str(folder), steps, generation, port, str(out))
        for rank in range(world)
    ]
    try:
        assert [process.wait(120) for process in ranks] == [0] * world
    finally:
        for process in ranks:
            process.kill()
            process.wait()
    return torch.load(out)


def _rank(
    rank: int, world: int, kind: str, folder: str, steps: int, generation: int, port: int, out: str
) -> None:
    torch.set_num_threads(1)
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    limit = timedelta(seconds=60)
    dist.init_process_group(
        "gloo", init_method=f"tcp://127.0.0.1:{port}", rank=rank, world_size=world, timeout=limit
    )
    cluster = Cluster(Path(folder), world, generation=generation, alone=True)
    cluster.layouts = _Layouts(Path(folder))
    checkpointer.attach = lambda job, settings: Access(job, settings, FakeMemory(cluster, rank))  # type: ignore
    state = build(kind, world)
    ck = checkpointer.PeerCheckpointer(GlooJob(cluster, rank))
    torch.manual_seed(11)
    start = ck.restore(state)
    found = whole(state) if start else {}
    losses = []
    for step in range(start, steps):
        losses.append(train(state, step))
        ck.step(step, state)
        ck.flush()
        dist.barrier()
    if start == steps:  # only to be saved again, as cut here
        ck.step(steps, state)
        ck.flush()
    left = whole(state)
    if rank == 0:
        told = [event for event in cluster.events if event["kind"] == "restored"]
        result = {
            "start": start,
            "losses": losses,
            "found": found,
            "left": left,
            "cursor": state["cursor"],
            "tier": told[0]["tier"] if told else "",
            "shards": sorted({p.name.split(".")[0] for p in Path(folder).glob("*/*.slot")}),
        }
        torch.save(result, out)
    dist.barrier()
    os._exit(0)  # gloo's destructors hang now and then
