"""The strongest peer of the bench: GEMINI's checkpoints in peer memory under a job of the same size.

Every rank holds what a host of the pipelines holds (half of the layers, with AdamW's state, none of it the
same on two ranks), works as long on a step, sums as many bytes of gradients, and saves every step with
`PeerCheckpointer`. A lost host is replaced; the others go on in their processes.
"""

from __future__ import annotations

import argparse
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from benchmarks.training.pipelines.job import (
    FORWARD,
    LAYERS,
    MICROBATCH_SIZE,
    MICROBATCHES,
    N0,
    WIDTH,
    Block,
)  # fmt: skip
from windtunnel.training import elastic
from windtunnel.training.checkpoint import PeerCheckpointer


def train(job: Any, steps: int, pipelines: int) -> float:
    """The last loss of this rank."""
    torch.manual_seed(job.rank)
    model = nn.Sequential(*(Block(FORWARD) for _ in range(LAYERS // N0)))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    state = {"model": model, "optimizer": optimizer}
    checkpointer = PeerCheckpointer(job, copies=2)
    loss = torch.zeros(())
    for step in range(checkpointer.restore(state), steps):
        for microbatch in range(MICROBATCHES // pipelines):
            generator = torch.Generator().manual_seed(step * MICROBATCHES + microbatch)
            x = torch.randn(MICROBATCH_SIZE, WIDTH, generator=generator)
            loss = nn.functional.mse_loss(model(x), x.flip(-1))
            loss.backward()  # type: ignore[no-untyped-call]
        _reduce([p.grad for p in model.parameters() if p.grad is not None])
        optimizer.step()
        optimizer.zero_grad()
        checkpointer.step(step, state)
        job.step(step, loss=loss.item())
    return loss.item()


def _reduce(gradients: list[Tensor]) -> None:
    """The traffic of a sum over pipelines; every rank keeps its own, so that states stay different."""
    flat = torch.cat([gradient.reshape(-1) for gradient in gradients])
    if dist.is_initialized():
        dist.all_reduce(flat)


def main() -> None:
    """Entry point; ``elastic.run`` does not return under a supervisor."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, required=True)
    parser.add_argument("--pipelines", type=int, required=True)
    options = parser.parse_args()
    elastic.run(lambda job: train(job, options.steps, options.pipelines), backend="gloo")


if __name__ == "__main__":
    main()
