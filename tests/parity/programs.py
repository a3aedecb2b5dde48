"""Training scripts whose runs are recorded."""

from __future__ import annotations

FAILING = """
from pathlib import Path
import torch
from windtunnel.training import elastic
from windtunnel.training.checkpoint import PeerCheckpointer

FAILED = Path(__file__).with_suffix(".failed")

def train(job):
    state = {"x": torch.zeros(8)}
    checkpointer = PeerCheckpointer(job, copies=2, mode="blocking")
    for step in range(checkpointer.restore(state), 10):
        if step == 4 and job.rank == 1 and not FAILED.exists():
            FAILED.touch()
            raise ValueError("once")
        state["x"] += 1
        checkpointer.step(step, state)
        job.step(step)

elastic.run(train)
"""

KEPT = """
import time
import torch
import torch.distributed as dist
from windtunnel.training import elastic
from windtunnel.training.checkpoint import PeerCheckpointer

def train(job):
    state = {{"x": torch.full(({numel},), float(job.rank))}}
    checkpointer = PeerCheckpointer(job, copies=2, {options})
    for step in range(checkpointer.restore(state), {steps}):
        while step == {stored} and not job.checkpoints()["persisted"]:
            time.sleep(0.02)
        for _ in range(2):
            time.sleep(0.02)
            dist.all_reduce(torch.ones(1 << 18))
        state["x"] += 1
        checkpointer.step(step, state)
        job.step(step)

elastic.run(train)
"""

SLOW = """
import sys
from dataclasses import replace
from pathlib import Path
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from windtunnel.store.eventlog import EventLog
from windtunnel.training import gradsync
from windtunnel.training.gradsync.policy import PlanRequest, decide

dist.init_process_group("gloo")
torch.manual_seed(0)
ddp = DistributedDataParallel(nn.Sequential(nn.Linear(512, 256), nn.Linear(256, 512)))
batch = torch.randn(2, 512)

def step():
    ddp(batch).square().mean().backward()

profile = gradsync.profile(ddp, step, codecs=("fp16",))
calls = (replace(call, fixed=1e-3, per_byte=1e-6) for call in profile.network.collectives)
profile = replace(profile, network=replace(profile.network, collectives=tuple(calls)))
request = PlanRequest(profile, steps={"fp16": 1.0})
plan = decide(request)
log = EventLog(Path(sys.argv[1])) if dist.get_rank() == 0 else None
if log is not None:
    log.append("started")
    log.decision("training.gradsync", "search", request, plan)
handle = gradsync.apply(ddp, plan, event=log and log.append)
for _ in range(3):
    step()
handle.close()
dist.destroy_process_group()
"""

EMULATED = """
import torch
import torch.distributed as dist

dist.init_process_group("nccl")
rank = dist.get_rank()
layer = torch.nn.Linear(64, 64, device=torch.device("cuda", rank % torch.cuda.device_count()))
for _ in range(3):
    layer(torch.ones(4, 64, device=layer.weight.device)).sum().backward()
    if rank == 5:
        print("five")
    dist.all_reduce(layer.weight.grad)
    layer.weight.grad = None
"""
