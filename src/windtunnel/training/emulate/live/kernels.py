"""Kernels that the script brings, for a device that is not there: recorded where they are launched.

Operators of the script (``torch.library.custom_op``) are answered by their fake implementation, which says
what comes out. Those made with ``torch.library.triton_op`` run as they are: what they launch is recorded, see
`tritons`. Either is written down under its own name and costed by the bytes that it reads and writes.
"""

from __future__ import annotations

import ctypes
import json
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch._library.custom_ops import CustomOpDef
from torch.utils._pytree import tree_leaves

from windtunnel.training.emulate.graph import EventKind
from windtunnel.training.emulate.live.host import plain


class Launches:
    """Writes work of the script's own to the native event list, on the current stream."""

    def __init__(self, native: ctypes.CDLL) -> None:
        self.native = native
        self._rows: dict[str, int] = {}

    def record(
        self,
        name: str,
        inputs: Sequence[Any],
        outputs: Iterable[torch.Tensor],
        changed: Iterable[torch.Tensor] = (),
    ) -> None:
        """One launch of ``name`` on ``inputs``, its arguments in order; it may write ``changed`` of them."""
        runs = list(outputs)
        described = [plain(tensor) for tensor in runs]
        written = [*runs, *changed]
        text = json.dumps({"n": name, "i": [plain(value) for value in inputs], "o": described, "r": 0})
        if text not in self._rows:
            self._rows[text] = int(self.native.wt_add_operator(text.encode()))
        read = [leaf for leaf in tree_leaves(list(inputs)) if isinstance(leaf, torch.Tensor)]
        blocks = [self.native.wt_storage_block(t.untyped_storage()._cdata) for t in (*read, *written)]
        flow = self.native.wt_flow((ctypes.c_int64 * len(blocks))(*blocks), len(read), len(written))
        self.native.wt_event(int(EventKind.OP), self.native.wt_stream(), self._rows[text], flow)

    def forget(self, tensors: Iterable[torch.Tensor]) -> None:
        """What the host knew of the values of these is overwritten by something that is not run."""
        for tensor in tensors:
            if tensor.is_cuda:
                self.native.wt_forget(tensor.untyped_storage()._cdata)


ON_DEVICE = (None, "cuda")  # device types for which an implementation may be registered that the device runs
RUN_AS_THEY_ARE = "torch._library.triton"
"""The module of the implementations that `torch.library.triton_op` makes."""


def install(launches: Launches) -> None:
    """Let fake implementations stand for kernels wherever there is one. Call once."""
    definition: Any = CustomOpDef
    register_fake, register_kernel = definition.register_fake, definition.register_kernel

    def stand_in(operator: Any, real: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            leaves = tree_leaves((args, kwargs))
            if not any(isinstance(leaf, torch.Tensor) and leaf.is_cuda for leaf in leaves):
                return real(*args, **kwargs)
            out = operator._abstract_fn(*args, **kwargs)
            written = [leaf for leaf in tree_leaves(out) if isinstance(leaf, torch.Tensor)]
            launches.record(str(operator._opoverload), (*args, *kwargs.values()), written)
            return out

        call.stands_in = True  # type: ignore[attr-defined]
        return call

    def replace(operator: Any) -> None:
        for kind in ON_DEVICE:
            real = operator._backend_fns.get(kind)
            if real is None or operator._abstract_fn is None:
                continue
            if not hasattr(real, "stands_in") and operator._init_fn.__module__ != RUN_AS_THEY_ARE:
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
