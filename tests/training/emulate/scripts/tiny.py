"""A small model on any device: ``python tiny.py [ddp|fsdp|plain] [sgd|adamw]`` trains it for eight steps."""

import os
import sys

import torch
import torch.distributed as dist
from torch import nn

STEPS, WIDTH, BLOCKS = 8, 64, 4


def build(device: str) -> nn.Module:
    torch.manual_seed(0)
    blocks = [nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.GELU(), nn.LayerNorm(WIDTH)) for _ in range(BLOCKS)]
    return nn.Sequential(*blocks, nn.Linear(WIDTH, 10)).to(device)


def step(model: nn.Module, optimizer: torch.optim.Optimizer, device: str) -> None:
    x = torch.randn(16, WIDTH, device=device)
    y = torch.randint(0, 10, (16,), device=device)
    nn.functional.cross_entropy(model(x).float(), y).backward()
    optimizer.step()
    optimizer.zero_grad(set_to_none=True)


def main(parallel: str, kind: str) -> None:
    local = int(os.environ["LOCAL_RANK"])
    torch.cuda.set_device(local)
    dist.init_process_group("nccl")
    model = build("cuda")
    if parallel == "ddp":
        model = nn.parallel.DistributedDataParallel(model, device_ids=[local])
    elif parallel == "fsdp":
        from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

        policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
        for block in model:
            fully_shard(block, mp_policy=policy)
        fully_shard(model, mp_policy=policy)
    options = {"foreach": False} if kind == "sgd" else {"fused": True}
    optimizer = {"sgd": torch.optim.SGD, "adamw": torch.optim.AdamW}[kind](
        model.parameters(), lr=0.1, **options
    )
    for _ in range(STEPS):
        step(model, optimizer, "cuda")


if __name__ == "__main__":
    main(*(sys.argv[1:] or ["plain", "sgd"]))
