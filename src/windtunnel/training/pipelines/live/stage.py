"""Forward and backward of the layers that this host holds, for one microbatch.

The graph of autograd is cut between all layers, also within a stage: each layer's backward runs by itself, in
the reverse order, and hands its gradients out at once. So the arithmetic of a layer is the same wherever the
model is cut into stages, and gradients need no room beyond one layer's. For the same reason the random
numbers of a layer (dropout) are seeded by step, microbatch and layer.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from windtunnel.base.errors import UserError
from windtunnel.training.elastic.determinism import seed_for, seed_generators
from windtunnel.training.pipelines.live.layers import HostLayer

Loss = Callable[[Any, Any], Tensor]
Sink = Callable[[HostLayer, list[Tensor]], None]


@dataclass
class LayerActivations:
    """What one layer needs for its backward."""

    layer: HostLayer
    inputs: tuple[Tensor, ...]
    outputs: tuple[Tensor, ...]


@dataclass
class InFlight:
    """A microbatch between its forward and its backward. ``loss`` and ``head``: at the last stage."""

    layers: list[LayerActivations]
    loss: Tensor | None = None
    head: tuple[Tensor, ...] = ()


class LiveStage:
    """``layers`` in the order of the model."""

    def __init__(self, layers: Sequence[HostLayer], seed: int, autocast: torch.dtype | None) -> None:
        self.layers = layers
        self.seed = seed
        self.autocast = autocast

    def forward(self, step: int, microbatch: int, inputs: tuple[Tensor, ...]) -> InFlight:
        """Run all layers; the outputs are those of the last in ``layers``."""
        activations: list[LayerActivations] = []
        for layer in self.layers:
            seed_generators(seed_for(self.seed, step, microbatch, layer.index))
            fed = _cut(inputs)
            with self._precision(layer.device):
                output = layer.module(*fed)
            inputs = as_tuple(output, layer.name)
            activations.append(LayerActivations(layer, fed, inputs))
        return InFlight(activations)

    def loss(self, flight: InFlight, target: Any, loss: Loss) -> float:
        """The loss of the last layer's outputs; its backward begins there."""
        flight.head = _cut(flight.layers[-1].outputs)
        with self._precision(flight.layers[-1].layer.device):
            value = loss(flight.head[0] if len(flight.head) == 1 else flight.head, target)
        if value.dim():
            raise UserError(f"the loss has shape {list(value.shape)}; a single number is needed (a mean)")
        flight.loss = value
        return float(value.detach())

    def backward(self, flight: InFlight, gradients: list[Tensor], sink: Sink, weight: float) -> list[Tensor]:
        """Gradients of the inputs that want one.

        ``gradients``: of the outputs that want one; at the last stage those of ``weight`` times the loss are
        taken instead. ``sink`` gets each layer's gradients of its parameters, last layer first; they are its
        own.
        """
        if flight.loss is not None:
            inputs = [t for t in flight.head if t.requires_grad]
            start = torch.full_like(flight.loss, weight)
            gradients = _gradients([flight.loss], inputs, [start])
        while flight.layers:
            activations = flight.layers.pop()
            outputs = [t for t in activations.outputs if t.requires_grad]
            inputs = [t for t in activations.inputs if t.requires_grad]
            tensors = _gradients(outputs, [*activations.layer.parameters, *inputs], gradients)
            count = len(activations.layer.parameters)
            gradients = tensors[count:]
            if count:
                sink(activations.layer, tensors[:count])
        return gradients

    def _precision(self, device: torch.device) -> AbstractContextManager[Any]:
        return nullcontext() if self.autocast is None else torch.autocast(device.type, dtype=self.autocast)


def as_tuple(value: Any, name: str) -> tuple[Tensor, ...]:
    """A layer's output as a tuple of tensors.

    Raises:
        UserError: it is something else.
    """
    values = (value,) if isinstance(value, Tensor) else value
    if not isinstance(values, (tuple, list)) or not all(isinstance(t, Tensor) for t in values):
        raise UserError(f"layer {name} gives {type(value).__name__}; accepted: a tensor, a tuple of tensors")
    return tuple(values)


def _cut(tensors: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    return tuple(t.detach().requires_grad_(t.requires_grad) for t in tensors)


def _gradients(outputs: list[Tensor], inputs: list[Any], starts: list[Tensor]) -> list[Tensor]:
    """Gradients of ``wanted``, zeros where nothing depends on one."""
    if not inputs:
        return []
    if not outputs:
        return [torch.zeros_like(t) for t in inputs]
    tensors = torch.autograd.grad(outputs, inputs, starts, allow_unused=True)
    return [torch.zeros_like(t) if g is None else g for t, g in zip(inputs, tensors, strict=True)]
