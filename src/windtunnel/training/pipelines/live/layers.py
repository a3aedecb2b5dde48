"""A layer with all that training keeps of it, as an object, as bytes and as a digest.

A layer is the unit that stages are made of, that gradients are summed over and that is copied to another
host. Its state is parameters and buffers, the optimizer's state, the scheduler's, and its *version*: the
number of steps that were applied to it. As bytes that is one block: the tensors one after the other, raw,
and a small skeleton of the rest, so that a copy costs little more than moving memory. Whoever reads a block
checks its xxh3_128 first.
"""

from __future__ import annotations

import io
import pickle
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import xxhash
from torch import Tensor, nn

from windtunnel.base.errors import UserError
from windtunnel.training.elastic.determinism import seed_for
from windtunnel.training.pipelines.model import LayerProfile, TemplateSet
from windtunnel.training.pipelines.policy.planner import plan
from windtunnel.training.pipelines.policy.templates import fingerprint

_ALIGN = 16  # bytes: a tensor of any dtype may begin there


@dataclass(frozen=True)
class LayerSpec:
    """One layer of the model: its name, and how to make it.

    ``build``: called on the hosts that hold the layer, with torch's random numbers seeded by the job's
    seed and the layer's position. The module takes what the layer before gives (a tensor, or a tuple as
    several arguments) and gives a tensor or a tuple of tensors.
    """

    name: str
    build: Callable[[], nn.Module]


MakeOptimizer = Callable[[list[nn.Parameter]], torch.optim.Optimizer]
MakeScheduler = Callable[[torch.optim.Optimizer], torch.optim.lr_scheduler.LRScheduler]


class Layer:
    """Layer ``index`` on this host. ``optimizer`` and ``scheduler`` are None where nothing is trained.

    Raises:
        UserError: it keeps statistics of its batches, which would depend on the layout.
    """

    def __init__(
        self,
        index: int,
        spec: LayerSpec,
        seed: int,
        optimizer: MakeOptimizer,
        scheduler: MakeScheduler | None,
        device: torch.device,
    ) -> None:
        self.index = index
        self.name = spec.name
        self.version = 0
        torch.manual_seed(seed_for(seed, index))
        self.module = spec.build().to(device)
        for name, part in self.module.named_modules():
            if isinstance(part, nn.modules.batchnorm._NormBase) and part.track_running_stats:
                raise UserError(
                    f"layer {spec.name}: {type(part).__name__} {name!r} tracks statistics of its batches;"
                    " accepted: normalisation without them (LayerNorm, RMSNorm, GroupNorm)"
                )
        self.parameters = [p for p in self.module.parameters() if p.requires_grad]
        self.optimizer = optimizer(self.parameters) if self.parameters else None
        self.scheduler = scheduler(self.optimizer) if scheduler and self.optimizer else None

    @property
    def device(self) -> torch.device:
        return next((p.device for p in self.module.parameters()), torch.device("cpu"))

    def apply(self, gradient: Tensor | None) -> None:
        """One step: ``gradient`` is flat, in the order of ``parameters``; None leaves the parameters as they
        are, as for a step whose gradient is no number."""
        if self.optimizer is not None and gradient is not None:
            parts = gradient.split([p.numel() for p in self.parameters])
            for parameter, part in zip(self.parameters, parts, strict=True):
                parameter.grad = part.view_as(parameter).to(parameter.dtype)
            self.optimizer.step()
            self.optimizer.zero_grad(set_to_none=True)
        if self.scheduler is not None:
            if gradient is None and self.optimizer is not None:
                self.optimizer._opt_called = True  # type: ignore[attr-defined] # else it warns of the order
            self.scheduler.step()
        self.version += 1

    def nbytes(self) -> int:
        """Bytes of all tensors of the state."""
        return sum(tensor.numel() * tensor.element_size() for _, tensor in _leaves(self._state()))

    def digest(self) -> str:
        """xxh3_128 of the state, the same on all hosts that hold the same state."""
        hasher = xxhash.xxh3_128()
        for path, leaf in sorted(_leaves(self._state(), values=True), key=lambda item: item[0]):
            if isinstance(leaf, Tensor):
                hasher.update(f"{path}:{leaf.dtype}{list(leaf.shape)}".encode())
                hasher.update(_raw(leaf).numpy().data)
            else:
                hasher.update(f"{path}={leaf!r}".encode())
        return hasher.hexdigest()

    def pack(self) -> Tensor:
        """The state as one block of bytes."""
        tensors: list[Tensor] = []
        skeleton = pickle.dumps(_take(self._state(), tensors))
        head = np.array([len(skeleton)], dtype=np.int64).tobytes() + skeleton
        sizes = [_aligned(len(head)), *(_aligned(t.numel() * t.element_size()) for t in tensors)]
        block = torch.zeros(sum(sizes), dtype=torch.uint8)
        block[: len(head)] = torch.frombuffer(bytearray(head), dtype=torch.uint8)
        at = sizes[0]
        for tensor, size in zip(tensors, sizes[1:], strict=True):
            raw = _raw(tensor)
            block[at : at + raw.numel()] = raw
            at += size
        return block

    def unpack(self, block: Tensor) -> None:
        """Take over the state in ``block``, whose checksum the caller has verified.

        Raises:
            UserError: it is a state of another layer.
        """
        length = int(np.frombuffer(block[:8].numpy().tobytes(), dtype=np.int64)[0])
        skeleton = _Reader(io.BytesIO(block[8 : 8 + length].numpy().tobytes())).load()
        state, _ = _put(skeleton, block, _aligned(8 + length))
        if state["name"] != self.name:
            raise UserError(f"the state is of layer {state['name']!r}; {self.name!r} is needed")
        try:
            self.module.load_state_dict(state["module"])
        except RuntimeError as error:
            raise UserError(f"layer {self.name}: the state does not fit the module: {error}") from None
        if self.optimizer is not None:
            groups = state["optimizer"]["param_groups"]
            self.optimizer.load_state_dict({"state": {}, "param_groups": groups})
            # Not through load_state_dict, which casts what the optimizer keeps to the parameter's dtype.
            for number, parameter in enumerate(self.parameters):
                kept = state["optimizer"]["state"].get(number, {})
                self.optimizer.state[parameter] = {
                    key: value.to(parameter.device) if isinstance(value, Tensor) and value.dim() else value
                    for key, value in kept.items()
                }
        if self.scheduler is not None:
            self.scheduler.load_state_dict(state["scheduler"])
        self.version = state["version"]

    def _state(self) -> dict[str, Any]:
        return {
            "name": self.name,
            "version": self.version,
            "module": dict(self.module.state_dict()),
            "optimizer": self.optimizer.state_dict() if self.optimizer else None,
            "scheduler": self.scheduler.state_dict() if self.scheduler else None,
        }


def checksum(block: Tensor) -> str:
    """xxh3_128 of a block of bytes."""
    return xxhash.xxh3_128_hexdigest(block.numpy().data)


@dataclass(frozen=True)
class _Place:
    """Stands for a tensor in a skeleton."""

    dtype: str
    shape: tuple[int, ...]


def _take(tree: Any, tensors: list[Tensor]) -> Any:
    if isinstance(tree, Tensor):
        tensors.append(tree)
        return _Place(str(tree.dtype).removeprefix("torch."), tuple(tree.shape))
    if isinstance(tree, dict):
        # A plain dict, or one that counts (MultiStepLR's milestones)
        return type(tree)({key: _take(value, tensors) for key, value in tree.items()})
    if isinstance(tree, (list, tuple)):
        return type(tree)(_take(value, tensors) for value in tree)
    return tree


def _put(tree: Any, block: Tensor, at: int) -> tuple[Any, int]:
    if isinstance(tree, _Place):
        dtype: torch.dtype = getattr(torch, tree.dtype)
        nbytes = dtype.itemsize * int(np.prod(tree.shape, dtype=np.int64))
        raw = block[at : at + nbytes].clone()  # else one tensor that is kept would hold the whole block
        return raw.view(dtype).view(tree.shape), at + _aligned(nbytes)
    if isinstance(tree, dict):
        made = type(tree)()
        for key, value in tree.items():
            made[key], at = _put(value, block, at)
        return made, at
    if isinstance(tree, (list, tuple)):
        values = []
        for value in tree:
            value, at = _put(value, block, at)
            values.append(value)
        return type(tree)(values), at
    return tree, at


class _Reader(pickle.Unpickler):
    """Plain values only: a block from elsewhere cannot name a function to call."""

    def find_class(self, module: str, name: str) -> Any:
        if (module, name) == (__name__, "_Place"):
            return _Place
        if (module, name) in (("collections", "Counter"), ("collections", "OrderedDict")):
            return super().find_class(module, name)
        raise pickle.UnpicklingError(f"a layer's state holds {module}.{name}, which is no plain value")


def _leaves(tree: Any, path: str = "", values: bool = False) -> Iterable[tuple[str, Any]]:
    """Tensors of a tree with their paths; with ``values`` the other leaves, too."""
    if isinstance(tree, dict):
        for key, value in tree.items():
            yield from _leaves(value, f"{path}/{key}", values)
    elif isinstance(tree, (list, tuple)):
        for number, value in enumerate(tree):
            yield from _leaves(value, f"{path}/{number}", values)
    elif isinstance(tree, Tensor) or values:
        yield path, tree


def _raw(tensor: Tensor) -> Tensor:
    return tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8)


def _aligned(nbytes: int) -> int:
    return -(-nbytes // _ALIGN) * _ALIGN


def even_templates(
    layers: Sequence[LayerSpec], *, n0: int = 1, failures: int = 1, largest: int | None = None
) -> TemplateSet:
    """Cuts of ``layers`` into stages of as equal length as can be, for ``n0`` .. ``largest`` hosts.

    ``n0``: fewest hosts whose memory holds the model, as the caller knows. ``failures``: hosts that
    may be lost at once. ``largest``: as many as there are layers unless given; at least ``2 n0 - 1`` is of
    use.

    Raises:
        UserError: there are fewer layers than hosts.
    """
    largest = len(layers) if largest is None else largest
    if not 1 <= n0 <= largest <= len(layers):
        raise UserError(f"templates for {n0} to {largest} hosts; accepted: 1 to {len(layers)}, the layers")
    profile = [LayerProfile(layer.name, forward=1.0, backward=2.0) for layer in layers]
    made = [plan(profile, hosts, 1, 1.0) for hosts in range(n0, largest + 1)]
    templates = tuple(template for template in made if template is not None)
    return TemplateSet(n0, failures, templates, fingerprint(profile, (n0, failures, largest)))
