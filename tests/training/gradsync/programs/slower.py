"""A job whose link becomes slow under way; each rank is in a network namespace of its own."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from windtunnel.linux import network
from windtunnel.training import gradsync
from windtunnel.training.gradsync.policy import PATIENCE, PAUSE


def trained(rate: float) -> dict[str, Any]:
    """With links of ``rate`` bytes/s from some step on: what was decided then, and which codecs were used
    before and after."""
    torch.manual_seed(0)
    ddp = DistributedDataParallel(nn.Sequential(nn.Linear(1024, 512), nn.Linear(512, 1024)))
    batch = torch.randn(2, 1024)

    def step() -> None:
        ddp(batch).square().mean().backward()

    profile = gradsync.profile(ddp, step, codecs=("fp16",))
    plain = gradsync.plan(replace(profile, codecs=()))
    handle = gradsync.apply(ddp, plain, profile=profile)
    codecs = [sorted({one.option.codec for one in handle.plan.groups})]

    def steps(count: int) -> None:
        for _ in range(count):
            ddp.zero_grad(set_to_none=True)
            step()

    steps(PAUSE)
    network.set_rate(network.INTERFACE, rate)
    steps(PATIENCE + 2)
    answer = handle.check()
    steps(1)
    codecs.append(sorted({one.option.codec for one in handle.plan.groups}))
    handle.close()
    return {"reason": answer.reason, "codecs": codecs}
