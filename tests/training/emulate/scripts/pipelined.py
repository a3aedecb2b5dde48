"""A pipeline of two stages, whose micro-batches are alike or not."""

import os
import sys

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.pipelining import PipelineStage, Schedule1F1B
from torch.utils.checkpoint import checkpoint

CASE, MICRO_BATCHES, WIDTH = sys.argv[1], 6, 32
passes = {"forward": 0, "backward": 0}


class Doubled(torch.autograd.Function):
    """Its backward does more in the third micro-batch, of which the forward tells nothing."""

    @staticmethod
    def forward(ctx, x):
        return x * 2

    @staticmethod
    def backward(ctx, gradient):
        passes["backward"] += 1
        return gradient.sin() if passes["backward"] % MICRO_BATCHES == 3 else gradient


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.GELU(), nn.Linear(WIDTH, WIDTH))
        self.calls = 0

    def forward(self, x):
        passes["forward"] += 1
        if CASE == "counts":  # in an attribute, and does more in the fifth
            self.calls += 1
            x = x.sin() if self.calls % MICRO_BATCHES == 5 else x
        if CASE == "reads":
            x.sum().item()
        if CASE == "backward":
            x = Doubled.apply(x)
        return x + checkpoint(self.inner, x, use_reentrant=False)


class Part(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm, self.block = nn.LayerNorm(WIDTH), Block()

    def forward(self, x, weights):
        return self.block(self.norm(x) * weights.sum())


def hook(module, args):
    if passes["forward"] % MICRO_BATCHES == 3:
        return (args[0].sin(),)


local = int(os.environ["LOCAL_RANK"])
torch.cuda.set_device(local)
dist.init_process_group("nccl")
mesh = init_device_mesh("cuda", (2, 2), mesh_dim_names=("pp", "dp"))
place = mesh["pp"].get_local_rank()
part = Part().cuda()
fully_shard(part, mesh=mesh["dp"], reshard_after_forward=CASE == "gathers")
if CASE == "hook":
    part.block.register_forward_pre_hook(hook)
stage = PipelineStage(part, place, 2, torch.device("cuda", local), group=mesh["pp"].get_group())
schedule = Schedule1F1B(stage, MICRO_BATCHES, loss_fn=nn.functional.mse_loss)
optimizer = torch.optim.SGD(part.parameters(), 0.1)
for _ in range(3):
    inputs, targets = (torch.randn(MICRO_BATCHES, WIDTH, device="cuda") for _ in range(2))
    losses = []
    # the last micro-batch has one fewer
    weights = torch.ones(2 * MICRO_BATCHES - (CASE == "last"), device="cuda")
    if place == 0:
        schedule.step(inputs, weights=weights)
    else:
        schedule.step(weights=weights, target=targets, losses=losses)
        torch.stack(losses).mean().item()
    optimizer.step()
    optimizer.zero_grad()
