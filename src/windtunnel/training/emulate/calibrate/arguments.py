"""Operators as calls: those that a piece of PyTorch code dispatches, and real arguments to run one again.

A captured operator tells shapes, dtypes, strides and plain values in schema order, but no data. Tensors are
made with those strides and filled with positive numbers of ordinary size (no denormals, whose arithmetic is
slow); index tensors are filled with indices that their table has.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from windtunnel.training.emulate.graph import Operator, TensorMeta
from windtunnel.training.emulate.twin.costs.kinds import base_name

INTEGERS = ("int64", "int32", "int16", "int8", "uint8")


@dataclass(frozen=True)
class Plan:
    """How to call an operator: ``function``, its plain arguments, and where tensors go.

    ``positional`` and ``keywords`` hold a `TensorMeta` (or a tuple with some) wherever a tensor is wanted.
    """

    function: Callable[..., Any]
    positional: tuple[Any, ...]
    keywords: dict[str, Any]
    index_limit: int


def plan_call(op: Operator, device: str) -> Plan | None:
    """How to run ``op`` on ``device`` (``"cpu"`` or ``"cuda"``); None where PyTorch has no such operator or
    the operator was captured without its arguments (views)."""
    function = find_operator(op.name)
    if function is None or not op.inputs:
        return None
    positional: list[Any] = []
    keywords: dict[str, Any] = {}
    for argument, value in zip(function._schema.arguments, op.inputs, strict=False):
        given = _plain(argument.name, str(argument.type), value, op, device)
        if argument.kwarg_only:
            keywords[argument.name] = given
        else:
            positional.append(given)
    return Plan(function, tuple(positional), keywords, _index_limit(op))


def find_operator(name: str) -> Any:
    """``"aten.mm.default"`` as ``torch.ops`` has it, or None."""
    namespace, _, rest = name.partition(".")
    base, _, overload = rest.partition(".")
    try:
        packet = getattr(getattr(torch.ops, namespace), base)
        return getattr(packet, overload or "default")
    except (AttributeError, RuntimeError):
        return None


def make_tensor(meta: TensorMeta, device: str, index_limit: int = 1) -> torch.Tensor:
    """A tensor like ``meta`` on ``device``, filled as the module says."""
    dtype = getattr(torch, meta.dtype)
    stride = meta.stride if len(meta.stride) == len(meta.shape) else None
    if stride is None:
        flat = torch.empty(meta.shape, dtype=dtype, device=device)
        return _fill(flat, meta.dtype, index_limit)
    extent = 1 + sum((size - 1) * step for size, step in zip(meta.shape, stride, strict=True))
    flat = torch.empty(max(1, extent) if meta.numel else 0, dtype=dtype, device=device)
    return torch.as_strided(_fill(flat, meta.dtype, index_limit), meta.shape, stride)


def _fill(flat: torch.Tensor, dtype: str, index_limit: int) -> torch.Tensor:
    if dtype in INTEGERS:
        return flat.random_(0, max(1, min(index_limit, 127 if dtype in ("int8", "uint8") else index_limit)))
    if dtype == "bool":
        return flat.random_(0, 2)
    if dtype.startswith("float8"):
        return flat.copy_(torch.full_like(flat, 0.5, dtype=torch.float32).to(flat.dtype))
    if dtype.startswith("complex"):
        return flat.fill_(0.5)
    return flat.uniform_(0.1, 1.0)


def _index_limit(op: Operator) -> int:
    """Indices below this are valid in every integer tensor of ``op``."""
    base = base_name(op.name)
    tensors = [arg for arg in op.inputs if isinstance(arg, TensorMeta)]
    if base == "embedding_dense_backward":
        return int(op.inputs[2])
    if base in ("nll_loss_forward", "nll_loss2d_forward"):
        return tensors[0].shape[-1] if len(tensors[0].shape) == 1 else tensors[0].shape[1]
    if base in ("nll_loss_backward", "nll_loss2d_backward"):
        return tensors[1].shape[-1] if len(tensors[1].shape) == 1 else tensors[1].shape[1]
    if base in (
        "index_select",
        "gather",
        "scatter",
        "scatter_",
        "scatter_add",
        "scatter_add_",
        "index_add_",
        "index_add",
    ):
        return tensors[0].shape[int(op.inputs[1])] if tensors[0].shape else 1
    if base in (
        "embedding",
        "index",
        "_unsafe_index",
        "index_put_",
        "_index_put_impl_",
        "index_put",
        "_embedding_bag",
    ):
        return (
            min(tensors[0].shape) if base.startswith(("index", "_index", "_unsafe")) else tensors[0].shape[0]
        )
    return 2


def _plain(name: str, kind: str, value: Any, op: Operator, device: str) -> Any:
    """A captured value as the Python call wants it."""
    if value is None:
        return None
    if name == "dtype":
        return getattr(torch, op.outputs[0].dtype) if op.outputs else None
    if name in ("layout", "pin_memory"):
        return None
    if name == "memory_format":
        formats = (
            torch.contiguous_format,
            torch.preserve_format,
            torch.channels_last,
            torch.channels_last_3d,
        )
        return formats[value] if isinstance(value, int) else None
    if "Device" in kind:
        return device
    if isinstance(value, str) and ("number" in kind or "float" in kind):
        return float(value)
    return value


def map_tensors(value: Any, make: Callable[[TensorMeta], torch.Tensor]) -> Any:
    """``value`` with every `TensorMeta` in it replaced by ``make`` of it; tuples become lists."""
    if isinstance(value, TensorMeta):
        return make(value)
    if isinstance(value, tuple):
        return [map_tensors(item, make) for item in value]
    return value


def describe(value: Any) -> Any:
    """A tensor as its `TensorMeta`, a list as a tuple, a plain value as it is, anything else as None."""
    if isinstance(value, torch.Tensor):
        device = "cpu" if value.device.type == "cpu" else "cuda"
        return TensorMeta(
            tuple(value.shape), str(value.dtype).removeprefix("torch."), tuple(value.stride()), device
        )
    if isinstance(value, (list, tuple)):
        return tuple(describe(item) for item in value)
    return value if isinstance(value, (int, float, bool, str)) else None


class Recorder(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Collects every operator dispatched while it is entered, in ``operators``, below autograd."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.operators: list[Operator] = []

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        result = func(*args, **kwargs)
        inputs: list[Any] = []
        for position, argument in enumerate(func._schema.arguments):
            given = (
                args[position] if position < len(args) else kwargs.get(argument.name, argument.default_value)
            )
            # PyTorch's own numbers for dtypes are not visible from Python; the output tells the dtype.
            inputs.append(0 if isinstance(given, torch.dtype) else describe(given))
        outputs = describe(result if isinstance(result, (tuple, list)) else (result,))
        tensors = tuple(out for out in outputs if isinstance(out, TensorMeta))
        if not tensors:  # foreach and fused operators return nothing and write their lists
            written = [
                inputs[position]
                for position, argument in enumerate(func._schema.arguments)
                if argument.alias_info is not None and argument.alias_info.is_write
            ]
            tensors = tuple(
                item for group in written for item in (group if isinstance(group, tuple) else (group,))
            )
        self.operators.append(Operator(str(func), tuple(inputs), tensors))
        return result
