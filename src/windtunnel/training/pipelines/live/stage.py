"""Forward and backward of the layers of this host, for one microbatch, and what goes to its neighbours.

The graph of autograd is cut between all layers, also within a stage: each layer's backward runs by itself, in
the reverse order, and hands its gradients out at once. So the arithmetic of a layer is the same wherever the
model is cut into stages, and gradients need no room beyond one layer's. For the same reason the random
numbers of a layer (dropout) are seeded by step, microbatch and layer.

*Activations and gradients* between neighbouring stages: a message is all tensors of one microbatch in one
block of bytes, so one send and one receive, told apart by its tag (microbatch and direction). Sends return at
once and are waited for at the end of the step; a receive is posted one action ahead, so that gloo moves the
data while the stage computes. The first message of a layout says beforehand which shapes and dtypes follow,
and which tensors want a gradient; later ones must be alike.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any, Literal

import torch
import torch.distributed as dist
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


_HEADER = 4096  # bytes of the first message
_ALIGN = 16
_HEADER_TAG = 1

Spec = list[tuple[str, list[int], bool]]  # dtype, shape, whether it wants a gradient


class StageExchange:
    """The two neighbours of this stage in its pipeline: their ranks, None at the ends."""

    def __init__(self, before: int | None, after: int | None, device: torch.device) -> None:
        self.before = before
        self.after = after
        self.device = device
        self._incoming: Spec | None = None
        self._outgoing: Spec | None = None
        self._expected: dict[int, tuple[Any, Tensor]] = {}
        self._sent: list[tuple[Any, Tensor]] = []

    def expect(self, kind: Literal["forward", "backward"], microbatch: int) -> None:
        """Post the receive that a forward or backward will need, if its shapes are known yet."""
        if kind == "forward" and self.before is not None and self._incoming is not None:
            self._expect(self.before, _forward_tag(microbatch), self._incoming)
        if kind == "backward" and self.after is not None and self._outgoing is not None:
            self._expect(self.after, _backward_tag(microbatch), _wanting(self._outgoing))

    def activations(self, microbatch: int) -> tuple[Tensor, ...]:
        """The input of this stage for a microbatch, marked where the neighbour wants a gradient."""
        assert self.before is not None
        if self._incoming is None:
            header = torch.empty(_HEADER, dtype=torch.uint8)
            _wait(dist.irecv(header, self.before, tag=_HEADER_TAG))
            self._incoming = json.loads(header.numpy().tobytes().rstrip(b"\0"))
        spec = self._incoming
        received = self._receive(self.before, _forward_tag(microbatch), spec)
        return tuple(t.requires_grad_(wants) for t, (_, _, wants) in zip(received, spec, strict=True))

    def send_activations(self, microbatch: int, tensors: tuple[Tensor, ...]) -> None:
        """Give this stage's output on.

        Raises:
            UserError: its shapes differ from those of the microbatch before.
        """
        assert self.after is not None
        spec: Spec = [(_name(t), list(t.shape), t.requires_grad) for t in tensors]
        if self._outgoing is None:
            self._outgoing = spec
            text = json.dumps(spec).encode()
            if len(text) > _HEADER:
                raise UserError(f"a stage gives {len(tensors)} tensors to the next, too many to describe")
            header = torch.frombuffer(bytearray(text.ljust(_HEADER, b"\0")), dtype=torch.uint8)
            self._send(header, self.after, _HEADER_TAG)
        if spec != self._outgoing:
            raise UserError(f"a stage's output is {spec}, before it was {self._outgoing}; all must be alike")
        self._send(_block(tensors), self.after, _forward_tag(microbatch))

    def gradients(self, microbatch: int) -> list[Tensor]:
        """Gradients of those outputs that want one, in their order."""
        assert self.after is not None and self._outgoing is not None
        return self._receive(self.after, _backward_tag(microbatch), _wanting(self._outgoing))

    def send_gradients(self, microbatch: int, gradients: list[Tensor]) -> None:
        assert self.before is not None
        self._send(_block(gradients), self.before, _backward_tag(microbatch))

    def finish(self) -> None:
        """Return when all that was sent has arrived."""
        for work, _ in self._sent:
            _wait(work)
        self._sent.clear()

    def _expect(self, peer: int, tag: int, spec: Spec) -> None:
        if tag not in self._expected and spec:
            buffer = torch.empty(sum(_sizes(spec)), dtype=torch.uint8)
            self._expected[tag] = (dist.irecv(buffer, peer, tag=tag), buffer)

    def _receive(self, peer: int, tag: int, spec: Spec) -> list[Tensor]:
        if not spec:
            return []
        self._expect(peer, tag, spec)
        work, buffer = self._expected.pop(tag)
        _wait(work)
        tensors, at = [], 0
        for (name, shape, _), size in zip(spec, _sizes(spec), strict=True):
            dtype: torch.dtype = getattr(torch, name)
            nbytes = dtype.itemsize * _count(shape)
            tensors.append(buffer[at : at + nbytes].view(dtype).view(shape).to(self.device))
            at += size
        return tensors

    def _send(self, block: Tensor, peer: int, tag: int) -> None:
        if block.numel():
            # The tensor must live until the peer has it
            self._sent.append((dist.isend(block, peer, tag=tag), block))


def _wait(work: Any) -> None:
    assert work is not None
    work.wait()


def _forward_tag(microbatch: int) -> int:
    return 2 + 2 * microbatch


def _backward_tag(microbatch: int) -> int:
    return 3 + 2 * microbatch


def _wanting(spec: Spec) -> Spec:
    return [entry for entry in spec if entry[2]]


def _name(tensor: Tensor) -> str:
    return str(tensor.dtype).removeprefix("torch.")


def _count(shape: list[int]) -> int:
    count = 1
    for size in shape:
        count *= size
    return count


def _sizes(spec: Spec) -> list[int]:
    """Bytes of each tensor in a block, each beginning where any dtype may."""
    return [_padded(getattr(torch, name).itemsize * _count(shape)) for name, shape, _ in spec]


def _padded(nbytes: int) -> int:
    return -(-nbytes // _ALIGN) * _ALIGN


def _block(tensors: tuple[Tensor, ...] | list[Tensor]) -> Tensor:
    parts = []
    for tensor in tensors:
        raw = tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8)
        pad = _padded(raw.numel()) - raw.numel()
        parts += [raw, torch.zeros(pad, dtype=torch.uint8)] if pad else [raw]
    return parts[0] if len(parts) == 1 else torch.cat(parts) if parts else torch.empty(0, dtype=torch.uint8)
