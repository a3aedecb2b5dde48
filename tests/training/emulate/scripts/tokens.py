"""Ranks that look the same tokens up, and ranks that do not: ``python tokens.py KIND``.

Pairs of ranks hold halves of a vocabulary, in groups without a name (``group``), in a ``mesh``, or in one of
the names that ``lightning`` gives; or all ranks are replicas (``data``) of a model that is ``taught``, whose
table is ``frozen``, that has ``several`` of one size, or that has ``none``.
"""

import os
import sys

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

RANK, WORLD = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
dist.init_process_group("nccl")


class Added(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, group):
        x = x.clone()
        dist.all_reduce(x, group=group)
        return x

    @staticmethod
    def backward(ctx, grad):
        return grad, None


class Model(nn.Module):
    def __init__(self, group):
        super().__init__()
        self.group = group
        self.table = None if sys.argv[1] == "none" else nn.Embedding(64, 16)
        if sys.argv[1] == "frozen":
            self.table.requires_grad_(False)
        self.values = nn.ModuleList(nn.Embedding(64, 16) for _ in range(3 * (sys.argv[1] == "several")))
        self.out = nn.Linear(16, 16)

    def forward(self, tokens):
        x = (
            self.table(tokens)
            if self.table is not None
            else tokens.float().mean(1, keepdim=True).expand(-1, 16)
        )
        x = sum((values(tokens) for values in self.values), x)
        return self.out(x if self.group is None else Added.apply(x, self.group))


def pair(kind):
    names = {"mesh": ("dp", "tp"), "lightning": ("data_parallel", "tensor_parallel")}.get(kind)
    if names:
        return init_device_mesh("cuda", (WORLD // 2, 2), mesh_dim_names=names).get_group(names[1])
    groups = [dist.new_group([first, first + 1]) for first in range(0, WORLD, 2)]
    return groups[RANK // 2] if kind == "group" else None


model = Model(pair(sys.argv[1])).cuda()
if sys.argv[1] in ("data", "frozen", "none", "several", "taught"):
    model = nn.parallel.DistributedDataParallel(model)
teacher = Model(None).cuda()
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for _ in range(4):
    tokens = torch.randint(64, (3, 10), device="cuda")
    if sys.argv[1] == "taught":
        with torch.no_grad():
            teacher(tokens)
    loss = model(tokens).mean()
    loss.backward()
    reported = loss.detach()
    dist.all_reduce(reported)
    optimizer.step()
    optimizer.zero_grad()
