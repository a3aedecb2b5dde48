"""A tiny model in layers, its data, and the same training written down plainly in one process."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from windtunnel.training.elastic.determinism import seed_for
from windtunnel.training.pipelines.live.layers import HostLayer, LayerSpec, even_templates
from windtunnel.training.pipelines.live.trainer import PipelineTrainer, SampleOrder

WIDTH = 16
SAMPLES = 40


class Block(nn.Module):
    """A residual layer that passes something else through, and draws random numbers."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)
        self.dropout = nn.Dropout(0.2)

    def forward(self, x: Tensor, skip: Tensor, mask: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        return x + self.dropout(torch.tanh(self.linear(x + 0.1 * skip))) * mask, skip, mask


class First(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, WIDTH)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        y = self.linear(x)
        return y, y * 0.5, x[:, :1] > -1


class Last(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, 4)

    def forward(self, x: Tensor, skip: Tensor, mask: Tensor) -> Tensor:
        return self.linear(x + skip)


def specs() -> list[LayerSpec]:
    return [
        LayerSpec("first", First),
        *(LayerSpec(f"block{i}", Block) for i in range(3)),
        LayerSpec("same", Pass),  # without parameters
        LayerSpec("last", Last),
    ]


class Pass(nn.Module):
    def forward(self, *inputs: Tensor) -> tuple[Tensor, ...]:
        return inputs


def data() -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(7)
    return torch.randn(SAMPLES, 8, generator=generator), torch.randint(4, (SAMPLES,), generator=generator)


def adamw(parameters: list[nn.Parameter]) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, lr=0.01)


def halving(optimizer: torch.optim.Optimizer) -> torch.optim.lr_scheduler.LRScheduler:
    return torch.optim.lr_scheduler.MultiStepLR(optimizer, [2, 4], gamma=0.5)


@dataclass(frozen=True)
class Problem:
    steps: int = 6
    microbatches: int = 6
    size: int = 2
    reduction: Any = "fixed"
    n0: int = 2
    largest: int = 4
    search: bool = False
    max_norm: float | None = None
    checkpoint: str | None = None
    every: int = 0
    scale: float = 2.0**40
    poison: int | None = None  # a sample whose input is infinite
    nonfinite: Any = "raise"
    autocast: torch.dtype | None = None

    def but(self, **changes: Any) -> Problem:
        return replace(self, **changes)

    def trainer(self) -> PipelineTrainer:
        inputs, targets = data()
        if self.poison is not None:
            inputs[self.poison] = float("inf")
        layers = specs()
        return PipelineTrainer(
            layers,
            adamw,
            nn.functional.cross_entropy,
            lambda indices: (inputs[indices], targets[indices]),
            samples=SAMPLES,
            microbatches=self.microbatches,
            microbatch_size=self.size,
            templates=even_templates(layers, n0=self.n0, largest=self.largest),
            reduction=self.reduction,
            scale=self.scale,
            scheduler=halving,
            max_norm=self.max_norm,
            nonfinite=self.nonfinite,
            autocast=self.autocast,
            checkpoint=self.checkpoint,
            checkpoint_every=self.every,
            search=self.search,
        )


def train(job: Any, problem: Problem) -> dict[str, Any]:
    trainer: PipelineTrainer = job.keep("trainer", problem.trainer)
    return trainer.fit(job, problem.steps)


def plain(problem: Problem) -> tuple[dict[int, float], dict[str, str]]:
    """Losses and hashes of a plain loop: one process, whole model, no pipeline."""
    inputs, targets = data()
    order = SampleOrder(SAMPLES, problem.microbatches, problem.size, 0)
    layers = [HostLayer(i, spec, 0, adamw, halving, torch.device("cpu")) for i, spec in enumerate(specs())]
    losses = {}
    for step in range(problem.steps):
        sums: dict[int, list[Tensor]] = {}
        step_losses = []
        for m in range(problem.microbatches):
            indices = order.microbatch(step, m)
            x: Any = (inputs[indices],)
            for i, layer in enumerate(layers):
                torch.manual_seed(seed_for(0, step, m, i))
                x = layer.module(*x)
                x = x if isinstance(x, tuple) else (x,)
            loss = nn.functional.cross_entropy(x[0], targets[indices])
            step_losses.append(loss.item())
            (loss / problem.microbatches).backward()
            for i, layer in enumerate(layers):
                if layer.parameters:
                    flat = torch.cat([p.grad.reshape(-1) for p in layer.parameters if p.grad is not None])
                    sums.setdefault(i, []).append(flat)
                    for parameter in layer.parameters:
                        parameter.grad = None
        losses[step] = sum(step_losses) / problem.microbatches
        totals = {i: _sum(rows, problem) for i, rows in sums.items()}
        if problem.max_norm is not None:
            norm = sum(float(t.double().square().sum()) for t in totals.values()) ** 0.5
            totals = {i: t * min(1.0, problem.max_norm / (norm + 1e-6)) for i, t in totals.items()}
        for i, layer in enumerate(layers):
            layer.apply(totals.get(i))
    return losses, {layer.name: layer.digest() for layer in layers}


def _sum(rows: list[Tensor], problem: Problem) -> Tensor:
    if problem.reduction == "fixed":
        whole = sum((row.double() * problem.scale).round().to(torch.int64) for row in rows)
        assert isinstance(whole, Tensor)
        return (whole.double() / problem.scale).float()
    total = torch.zeros_like(rows[0])
    for row in rows:
        total = total + row
    return total
