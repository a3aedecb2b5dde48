"""Trains with DDP in each of its ways, and goes on from every step with a DDP made anew; prints, for each
way, the steps from which it ended otherwise."""

from __future__ import annotations

import contextlib
import copy
import json
from typing import Any

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from windtunnel.training.elastic import Job, run

STEPS = 4
WAYS: dict[str, tuple[dict[str, Any], int]] = {  # options, microbatches of a step
    "plain": ({}, 1),
    "no_sync": ({}, 3),
    "views": ({"gradient_as_bucket_view": True}, 1),
    "static, views": ({"static_graph": True, "gradient_as_bucket_view": True}, 1),
    "static, unused": ({"static_graph": True, "find_unused_parameters": True}, 1),
    "unused": ({"find_unused_parameters": True}, 1),
    "small buckets": ({"bucket_cap_mb": 0.02}, 1),
}


class Odd(nn.Module):
    """Parameters of two types, that are not used in the order in which they are defined."""

    def __init__(self, unused: bool) -> None:
        super().__init__()
        self.head = nn.Linear(96, 8)
        self.embedding = nn.Embedding(50, 64)
        self.first, self.second = nn.Linear(64, 200), nn.Linear(200, 96)
        self.scale = nn.Parameter(torch.randn(96, dtype=torch.bfloat16))
        if unused:
            self.unused = nn.Linear(3, 3)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        hidden = torch.relu(self.first(self.embedding(tokens).mean(1)))
        return self.head(torch.relu(self.second(hidden)) * self.scale.float())


def build(way: str) -> tuple[DistributedDataParallel, torch.optim.Optimizer]:
    torch.manual_seed(0)
    model = DistributedDataParallel(Odd("unused" in way or "static" in way), **WAYS[way][0])
    return model, torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)


def train_from(way: str, first: int, rank: int, saved: list[Any]) -> list[torch.Tensor]:
    """The parameters at the end, begun after step ``first - 1``; what each step leaves goes to ``saved``."""
    model, optimizer = build(way)
    if first:
        model.module.load_state_dict(saved[first - 1][0])
        optimizer.load_state_dict(copy.deepcopy(saved[first - 1][1]))
    batches = WAYS[way][1]
    for step in range(first, STEPS):
        for micro in range(batches):
            generator = torch.Generator().manual_seed(1000 * step + 10 * micro + rank)
            tokens = torch.randint(50, (16, 5), generator=generator)
            with model.no_sync() if micro < batches - 1 else contextlib.nullcontext():
                model(tokens).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        if not first:
            saved.append(copy.deepcopy((model.module.state_dict(), optimizer.state_dict())))
    return [parameter.detach() for parameter in model.parameters()]


def train(job: Job) -> None:
    differ = {}
    for way in WAYS:
        saved: list[Any] = []
        end = train_from(way, 0, job.rank, saved)
        again = {first: train_from(way, first, job.rank, saved) for first in range(1, STEPS)}
        differ[way] = [
            first
            for first, parameters in again.items()
            if not all(
                torch.equal(parameter, other) for parameter, other in zip(end, parameters, strict=True)
            )
        ]
    if job.rank == 0:
        print(json.dumps(differ))


if __name__ == "__main__":
    run(train)
