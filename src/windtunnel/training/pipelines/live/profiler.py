"""What each layer of a model costs on the device at hand, measured.

The layers run one after another on a microbatch, each on copies of its own, so that the model stays as it
is: its parameters, buffers, gradients and the random numbers are not touched. A time is the median over
repetitions after some that do not count. Activations are what autograd saves for backward, parameters left
out, each storage once; what a layer gives on is counted where the next one saves it.
"""

from __future__ import annotations

import copy
import statistics
import time
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch import nn

from windtunnel.base.errors import UserError
from windtunnel.training.pipelines.model import LayerProfile

MakeOptimizer = Callable[[Iterable[nn.Parameter]], torch.optim.Optimizer]


def measure_layers(
    layers: Sequence[nn.Module],
    microbatch: torch.Tensor,
    *,
    optimizer: MakeOptimizer | None = None,
    names: Sequence[str] | None = None,
    repeats: int = 5,
    warm: int = 2,
) -> tuple[LayerProfile, ...]:
    """Profiles of ``layers``, each of which takes what the one before it returns (one tensor).

    ``microbatch``: the first one's input, on the layers' device. ``optimizer``: makes the optimizer that will
    be used, whose state is measured; without it, Adam's is assumed (twice the parameters).

    Raises:
        UserError: a layer does not return one tensor, or does not take what it gets.
    """
    if names is not None and len(names) != len(layers):
        raise UserError(f"{len(names)} names for {len(layers)} layers; one for each is needed")
    layer_profiles = []
    value = microbatch.detach()
    devices = [value.device] if value.device.type == "cuda" else []
    with torch.random.fork_rng(devices=devices):
        for i, module in enumerate(layers):
            name = names[i] if names is not None else f"{i}.{type(module).__name__}"
            twin = copy.deepcopy(module)
            profile, value = _measure(name, twin, value, optimizer, repeats, warm)
            layer_profiles.append(profile)
    return tuple(layer_profiles)


def _measure(
    name: str,
    module: nn.Module,
    value: torch.Tensor,
    optimizer: MakeOptimizer | None,
    repeats: int,
    warm: int,
) -> tuple[LayerProfile, torch.Tensor]:
    forward, backward = [], []
    saved, output = 0, value
    for turn in range(warm + repeats):
        module.zero_grad(set_to_none=True)
        given = value.detach()
        if given.is_floating_point() or given.is_complex():
            given.requires_grad_(True)
        if turn == 0:
            output, saved = _saved_bytes(name, module, given)
        began = _now(value.device)
        result = _call(name, module, given)
        between = _now(value.device)
        if result.requires_grad:
            gradient = torch.ones_like(result)
            start = _now(value.device)
            result.backward(gradient)
            ended = _now(value.device)
        else:
            start = ended = between
        if turn >= warm:
            forward.append(between - began)
            backward.append(ended - start)
    parameters = sum(p.numel() * p.element_size() for p in module.parameters())
    trained = [p for p in module.parameters() if p.grad is not None]
    gradients = sum(p.numel() * p.element_size() for p in trained)
    buffers = sum(b.numel() * b.element_size() for b in module.buffers())
    kept = 2 * gradients if optimizer is None else _optimizer_bytes(optimizer, trained)
    profile = LayerProfile(
        name,
        statistics.median(forward),
        statistics.median(backward),
        float(parameters + gradients + buffers + kept),
        float(saved),
    )
    return profile, output


def _call(name: str, module: nn.Module, given: torch.Tensor) -> torch.Tensor:
    try:
        result = module(given)
    except (RuntimeError, TypeError, ValueError) as error:
        shape = tuple(given.shape)
        raise UserError(
            f"layer {name} does not take a tensor of shape {shape}, {given.dtype}: {error}"
        ) from error
    if not isinstance(result, torch.Tensor):
        raise UserError(f"layer {name} returns a {type(result).__name__}; one tensor is needed")
    return result


def _saved_bytes(name: str, module: nn.Module, given: torch.Tensor) -> tuple[torch.Tensor, int]:
    """The output, and the bytes that autograd saves for its backward."""
    own = {p.untyped_storage().data_ptr() for p in [*module.parameters(), *module.buffers()]}
    # Storages are kept till the end: an address that is free again could be given to the next one.
    held: dict[int, torch.UntypedStorage] = {}

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in own:
            held[storage.data_ptr()] = storage
        return tensor

    def unpack(tensor: torch.Tensor) -> torch.Tensor:
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, unpack):
        result = _call(name, module, given)
    return result.detach(), sum(storage.nbytes() for storage in held.values())


def _optimizer_bytes(make: MakeOptimizer, parameters: Sequence[nn.Parameter]) -> int:
    if not parameters:
        return 0
    optimizer = make(parameters)
    optimizer.step()
    tensors: list[Any] = [value for state in optimizer.state.values() for value in state.values()]
    return sum(t.numel() * t.element_size() for t in tensors if isinstance(t, torch.Tensor))


def _now(device: torch.device) -> float:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter()
