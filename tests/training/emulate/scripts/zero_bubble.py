"""A pipeline whose backward pass is split: gradients of inputs first, those of weights when there is time."""

import os

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.pipelining import PipelineStage, ScheduleInterleavedZeroBubble

MICRO_BATCHES, WIDTH = 6, 32
rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
device = torch.device("cuda", rank)
torch.cuda.set_device(device)
dist.init_process_group("nccl")


def layers():
    return nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(4))).to(device)


stages = [PipelineStage(layers(), place, 2 * world, device) for place in (rank, rank + world)]
schedule = ScheduleInterleavedZeroBubble(stages, MICRO_BATCHES, loss_fn=nn.functional.mse_loss)
optimizer = torch.optim.SGD([p for stage in stages for p in stage.submod.parameters()], 0.1)
inputs, targets = (torch.randn(MICRO_BATCHES, WIDTH, device=device) for _ in range(2))
for _ in range(6):
    if rank == 0:
        schedule.step(inputs)
    else:
        schedule.step(target=targets, losses=[])
    optimizer.step()
    optimizer.zero_grad()
