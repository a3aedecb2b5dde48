"""The operators that a piece of PyTorch code dispatches, as the data of an execution graph."""

from __future__ import annotations

from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from windtunnel.training.emulate.graph import Operator, TensorMeta


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
