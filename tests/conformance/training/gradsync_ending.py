"""Rank 0 fails in the midst of a step, where a collective waits for rank 1: it ends, and does not abort.

Its interpreter ends slowly: an object of this module holds it until rank 1 is through with that step, so that
a thread which was left in the collective comes back from it meanwhile.
"""

from __future__ import annotations

import os
import sys
import threading
from functools import partial

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from windtunnel.training.gradsync.live.exchange import Peers
from windtunnel.training.gradsync.live.hook import apply
from windtunnel.training.gradsync.model import GradientGroup, IterationForecast, Option, SyncPlan

PIPE = sys.argv[1]
"""Rank 1 begins its step when rank 0's interpreter opens it, which ends when rank 1 closes it."""
fails, waiting = False, threading.Event()


class Fails(torch.autograd.Function):
    @staticmethod
    def forward(ctx: object, x: Tensor) -> Tensor:
        return x + 0.0

    @staticmethod
    def backward(ctx: object, *given: Tensor) -> Tensor:
        if fails:
            waiting.wait()
            raise ValueError("it failed")
        return given[0]


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.one, self.two = nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.two(Fails.apply(self.one(x))).sum()  # type: ignore[no-any-return, no-untyped-call]


class Last:
    """Goes as the interpreter does, when modules may be gone."""

    def __init__(self) -> None:
        self.open, self.write = partial(os.open, PIPE, os.O_WRONLY), os.write

    def __del__(self) -> None:
        self.write(self.open(), bytes(1 << 20))  # more than it holds


def step() -> None:
    ddp.zero_grad(set_to_none=True)
    ddp(torch.ones(2, 4)).backward()


dist.init_process_group("gloo")
ddp = DistributedDataParallel(Net())
names = ("two", "one")
groups = tuple(GradientGroup((f"{layer}.bias", f"{layer}.weight"), Option("fp16")) for layer in names)
apply(ddp, SyncPlan(groups, ((0, 0), (1, 0)), (IterationForecast("plan", 1.0, 0),), 1.0, 2, 1))
for _ in range(2):  # from the third on DDP has a bucket for each group
    step()
if dist.get_rank() == 0:
    last, waits = Last(), Peers._wait

    def noted_wait(*arguments: object) -> None:
        waiting.set()
        waits(*arguments)  # type: ignore[arg-type]

    Peers._wait = noted_wait  # type: ignore[method-assign, assignment]
    fails = True
    step()
os.open(PIPE, os.O_RDONLY)
try:
    step()
except RuntimeError as error:
    print(f"rank 1: {error}".splitlines()[0], flush=True)
os._exit(0)
