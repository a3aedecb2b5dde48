"""The job of the bench: a script that `launch` starts on every emulated host.

All of it is real (processes, 1F1B over gloo, fixed-point gradients, AdamW, commits, copies of layers) but the
accelerator: a layer's matrix product is small, and it *sleeps* for the time that a device of its own would
take, forward and twice that backward. On a computer with fewer cores than hosts, training would else not get
slower by the loss of a host, and recoveries would wait for the arithmetic of the others.
"""

from __future__ import annotations

import argparse
import time
from typing import Any

import torch
from torch import Tensor, nn

from windtunnel.training import elastic
from windtunnel.training.pipelines.live.layers import LayerSpec, even_templates
from windtunnel.training.pipelines.live.trainer import PipelineTrainer

LAYERS, WIDTH = 8, 256
FORWARD = 0.004  # seconds a layer and microbatch
MICROBATCHES, MICROBATCH_SIZE = 12, 4
SAMPLES = 960
N0, LARGEST = 2, 3


class _Busy(torch.autograd.Function):
    """Passes its input on after `FORWARD`, and its gradient after twice as long."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        time.sleep(FORWARD)
        return x.clone()

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Tensor:
        time.sleep(2 * FORWARD)
        return gradients[0]


class Block(nn.Module):
    """A residual layer on a device of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        y = x + torch.tanh(self.linear(x))
        # the first layer's input needs no gradient, its output does
        return _Busy.apply(y)  # type: ignore[no-any-return, no-untyped-call]


def build(options: argparse.Namespace) -> PipelineTrainer:
    """The trainer, the same on all hosts."""
    specs = [LayerSpec(f"block{index}", Block) for index in range(LAYERS)]
    inputs = torch.randn(SAMPLES, WIDTH, generator=torch.Generator().manual_seed(1))
    return PipelineTrainer(
        specs, lambda parameters: torch.optim.AdamW(parameters, lr=1e-3), nn.functional.mse_loss,
        lambda indices: (inputs[indices], inputs[indices].flip(-1)), samples=SAMPLES,
        microbatches=MICROBATCHES, microbatch_size=MICROBATCH_SIZE,
        templates=even_templates(specs, n0=N0, largest=LARGEST), reduction="fixed",
        checkpoint=options.checkpoint, checkpoint_every=options.every,
    )  # fmt: skip


def main() -> None:
    """Entry point; ``elastic.run`` does not return under a supervisor."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, required=True)
    parser.add_argument("--checkpoint", default=None)
    parser.add_argument("--every", type=int, default=0)
    options = parser.parse_args()

    def train(job: Any) -> dict[str, Any]:
        trainer: PipelineTrainer = job.keep("trainer", lambda: build(options))
        return trainer.fit(job, options.steps)

    elastic.run(train, backend="gloo")


if __name__ == "__main__":
    main()
