"""A job whose computing is replayed: layers that sleep in forward and in backward for as long as a trace
says, and give gradients that were drawn once. All that follows a gradient is real."""

from __future__ import annotations

import time
from collections.abc import Sequence
from functools import partial

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel


class GradientReplay(nn.Module):
    """``numels``: elements of each layer's gradient, in the order of forward; ``backward``: seconds of each;
    ``forward``: of all together."""

    def __init__(
        self, numels: Sequence[int], backward: Sequence[float], forward: float, device: torch.device
    ) -> None:
        super().__init__()
        self.layers = nn.ParameterList(nn.Parameter(torch.zeros(numel, device=device)) for numel in numels)
        self._forward = forward
        draws = torch.Generator(device).manual_seed(dist.get_rank())
        for layer, seconds in zip(self.layers, backward, strict=True):
            gradient = torch.randn(layer.shape, generator=draws, device=device)
            layer.register_hook(partial(_computed, gradient, seconds))

    def forward(self, x: Tensor) -> Tensor:
        time.sleep(self._forward)
        for layer in self.layers:  # a chain: backward comes to one layer after the other
            x = x + layer[0]
        return x


def _computed(gradient: Tensor, seconds: float, _: Tensor) -> Tensor:
    time.sleep(seconds)
    return gradient.clone()


def replay(ddp: DistributedDataParallel) -> None:
    """A forward and backward of a `GradientReplay`."""
    ddp.zero_grad(set_to_none=True)
    ddp(torch.zeros(1, device=next(ddp.parameters()).device)).sum().backward()
