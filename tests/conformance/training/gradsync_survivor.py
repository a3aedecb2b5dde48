"""A loop that survives the loss of a host, with a plan whose codecs leave something to wait."""

import hashlib
import sys
from pathlib import Path

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from windtunnel.training.checkpoint import PeerCheckpointer
from windtunnel.training.elastic import Job, run
from windtunnel.training.gradsync import apply
from windtunnel.training.gradsync.model import GradientGroup, IterationForecast, Option, SyncPlan

STEPS = 12


def train(job: Job) -> None:
    torch.manual_seed(0)
    ddp = DistributedDataParallel(nn.Sequential(nn.Linear(32, 32), nn.ReLU(), nn.Linear(32, 4)))
    optimizer = torch.optim.SGD(ddp.parameters(), 0.05, momentum=0.9)
    groups = (
        GradientGroup(("2.bias", "2.weight"), Option("fp16")),
        GradientGroup(("0.bias", "0.weight"), Option("dragonn:0.1", "alltoall")),
    )
    order = ((0, 0), (1, 0), (1, 1))
    handle = apply(
        ddp, SyncPlan(groups, order, (IterationForecast("plan", 1.0, 0),), 1.0, job.world, 1), deadline=20.0
    )
    state = {"model": ddp, "optimizer": optimizer, "gradsync": handle}
    checkpointer = PeerCheckpointer(job)
    step = checkpointer.restore(state)
    while step < STEPS:
        batch = torch.Generator().manual_seed(97 * step + job.rank)
        optimizer.zero_grad()
        loss = ddp(torch.randn(8, 32, generator=batch)).square().mean()
        loss.backward()
        optimizer.step()
        checkpointer.step(step, state)
        job.step(step, loss=loss.item())
        step += 1
    waits = handle.state_dict()["residuals"]
    digest = hashlib.sha256(
        repr([tensor.tolist() for tensor in [*waits.values(), *ddp.parameters()]]).encode()
    ).hexdigest()
    Path(sys.argv[1], str(job.rank)).write_text(digest)
    handle.close()


run(train)
