"""A job of which all ranks hold the same data: ``alike.py ddp|fsdp FILE [real]``.

With ``real`` each collective of FSDP2 gets what rank 0 has, on every rank: what the uniform rule says of
virtual ranks, done over gloo. Rank 0 writes a digest of its parameters after ten steps to FILE.
"""

from __future__ import annotations

import hashlib
import sys
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

STEPS = 10
CALLS = "all_gather_single", "reduce_scatter_single", "all_gather_into_tensor", "reduce_scatter_tensor"


def give_first(name: str) -> None:
    """Let all ranks give what rank 0 has."""
    original = getattr(dist, name)

    def call(output: Any, input: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        input = input.clone()
        dist.broadcast(input, 0)
        return original(output, input, *args, **kwargs)

    setattr(dist, name, call)


def main() -> None:
    kind, file, *real = sys.argv[1:]
    dist.init_process_group("gloo")
    for name in CALLS if real and kind == "fsdp" else ():
        if hasattr(dist, name):
            give_first(name)
    torch.manual_seed(3)
    layers = [torch.nn.Linear(256, 256) for _ in range(4)]
    model: Any = torch.nn.Sequential(*(part for layer in layers for part in (layer, torch.nn.GELU())))
    if kind == "fsdp":
        for layer in layers:
            fully_shard(layer)
        fully_shard(model)
    else:
        model = DistributedDataParallel(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    for step in range(STEPS):
        torch.manual_seed(step)
        optimizer.zero_grad()
        model(torch.randn(16, 256)).square().mean().backward()
        optimizer.step()
    local = [p.to_local() if hasattr(p, "to_local") else p for p in model.parameters()]
    if dist.get_rank() == 0:
        data = b"".join(p.detach().numpy().tobytes() for p in local)
        Path(file).write_text(hashlib.sha256(data).hexdigest())
    dist.barrier()


main()
