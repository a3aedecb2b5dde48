"""Operators that the script brings (``torch.library.custom_op``): answered by their fake implementation.

Their kernels are written for a device that is not there; the fake implementation says what comes out. Such an
operator is recorded under its own name and costed by the bytes that it reads and writes.
"""

from __future__ import annotations

import ctypes
import json
from collections.abc import Callable
from typing import Any

import torch
from torch._library.custom_ops import CustomOpDef
from torch.utils._pytree import tree_leaves

from windtunnel.training.emulate.graph import EventKind

ON_DEVICE = (None, "cuda")  # device types for which an implementation may be registered that the device runs


def install(native: ctypes.CDLL) -> None:
    """Let fake implementations stand for kernels wherever there is one. Call once."""
    definition: Any = CustomOpDef
    register_fake, register_kernel = definition.register_fake, definition.register_kernel
    rows: dict[str, int] = {}

    def record(name: str, args: Any, kwargs: Any, out: Any) -> None:
        inputs = [_describe(value) for value in (*args, *kwargs.values())]
        outputs = [_describe(leaf) for leaf in tree_leaves(out) if isinstance(leaf, torch.Tensor)]
        text = json.dumps({"n": name, "i": inputs, "o": outputs, "r": 0})
        if text not in rows:
            rows[text] = int(native.wt_add_operator(text.encode()))
        native.wt_event(int(EventKind.OP), native.wt_stream(), rows[text], 0)

    def stand_in(operator: Any, real: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            leaves = tree_leaves((args, kwargs))
            if not any(isinstance(leaf, torch.Tensor) and leaf.is_cuda for leaf in leaves):
                return real(*args, **kwargs)
            out = operator._abstract_fn(*args, **kwargs)
            record(str(operator._opoverload), args, kwargs, out)
            return out

        call.stands_in = True  # type: ignore[attr-defined]
        return call

    def replace(operator: Any) -> None:
        for kind in ON_DEVICE:
            real = operator._backend_fns.get(kind)
            if real is not None and operator._abstract_fn is not None and not hasattr(real, "stands_in"):
                operator._backend_fns[kind] = stand_in(operator, real)

    def fake(self: Any, fn: Any, *args: Any, **kwargs: Any) -> Any:
        result = register_fake(self, fn, *args, **kwargs)
        replace(self)
        return result

    def kernel(self: Any, device_types: Any, fn: Any = None, /) -> Any:
        if fn is None:
            return lambda given: kernel(self, device_types, given)
        result = register_kernel(self, device_types, fn)
        replace(self)
        return result

    definition.register_fake, definition.register_kernel = fake, kernel


def _describe(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        told = {
            "t": str(value.dtype).removeprefix("torch."),
            "s": list(value.shape),
            "d": list(value.stride()),
        }
        return told if value.is_cuda else {**told, "c": 1}
    if isinstance(value, list | tuple):
        return [_describe(item) for item in value]
    return value if isinstance(value, int | float | bool | str | type(None)) else None
