"""A job whose computing is replayed: layers that sleep in forward and in backward for as long as a trace
says, and give gradients that were drawn once. All that follows a gradient is real."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel


class _Layer(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, parameter: Tensor, gradient: Tensor, seconds: float) -> Tensor:
        ctx.gradient, ctx.seconds = gradient, seconds
        return x + 0.0

    @staticmethod
    def backward(ctx: Any, *given: Tensor) -> Any:
        time.sleep(ctx.seconds)
        return given[0], ctx.gradient.clone(), None, None


class Replay(nn.Module):
    """``numels``: elements of each layer's gradient, in the order of forward; ``backward``: seconds of each;
    ``forward``: of all together."""

    def __init__(
        self, numels: Sequence[int], backward: Sequence[float], forward: float, device: torch.device
    ) -> None:
        super().__init__()
        self.layers = nn.ParameterList(nn.Parameter(torch.zeros(numel, device=device)) for numel in numels)
        drawn = torch.Generator(device).manual_seed(dist.get_rank())
        self._gradients = [torch.randn(numel, generator=drawn, device=device) for numel in numels]
        self._backward, self._forward = backward, forward

    def forward(self, x: Tensor) -> Tensor:
        time.sleep(self._forward)
        for layer, gradient, seconds in zip(self.layers, self._gradients, self._backward, strict=True):
            x = _Layer.apply(x, layer, gradient, seconds)
        return x


def replay(ddp: DistributedDataParallel) -> None:
    """A forward and backward of a `Replay`."""
    device = next(ddp.parameters()).device
    ddp.zero_grad(set_to_none=True)
    ddp(torch.zeros(1, requires_grad=True, device=device)).sum().backward()
