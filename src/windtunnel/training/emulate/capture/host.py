"""Capture of a job whose device is the CPU: it runs for real, and every operator is written down as it passes.

Where the target's device is the host itself nothing needs to be absent: the script's tensors are real, one rank of the world
runs, and only its peers are pretended. A dispatch mode sees every operator and the life of every storage.
"""

from __future__ import annotations

import ctypes
import json
import weakref
from collections.abc import Callable
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from windtunnel.training.emulate.graph import EventKind


def install(native: ctypes.CDLL) -> None:
    """Record this process's CPU operators and storages from now on."""
    recorder = OperatorMode(native)
    native.wt_storage_block = recorder.storages.block
    recorder.__enter__()


class Storages:
    """Tells the life of every CPU storage: ``on_alloc(number, bytes)`` when one is first seen, ``on_free(number)`` when it is gone.

    Counts bytes as they are held (``storage.nbytes()``), each storage once however many tensors view it.
    """

    def __init__(self, on_alloc: Callable[[int], int], on_free: Callable[[int], None]) -> None:
        self.on_alloc, self.on_free = on_alloc, on_free
        self.numbers: dict[int, int] = {}

    def see(self, tensor: torch.Tensor) -> None:
        storage = tensor.untyped_storage()
        key = storage._cdata
        if key in self.numbers or storage.device.type != "cpu" or storage.nbytes() == 0:
            return
        number = self.numbers[key] = self.on_alloc(storage.nbytes())
        weakref.finalize(storage, self._gone, key, number)

    def block(self, key: int) -> int:
        return self.numbers.get(key, -1)

    def _gone(self, key: int, number: int) -> None:
        self.numbers.pop(key, None)
        self.on_free(number)


class StorageMode(TorchDispatchMode):
    """Shows every operator's tensors to `Storages`; the base of what records operators as well."""

    supports_higher_order_operators = True

    def __init__(self, storages: Storages) -> None:
        super().__init__()
        self.storages = storages

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if any(hasattr(kind, "__tensor_flatten__") for kind in types):
            return NotImplemented  # DTensor and the like come again as local operators
        out = func(*args, **(kwargs or {}))
        self.after(func, args, kwargs or {}, out)
        return out

    def after(self, func: Any, args: Any, kwargs: Any, out: Any) -> None:
        for leaf in tree_leaves(out):
            if isinstance(leaf, torch.Tensor):
                self.storages.see(leaf)


class OperatorMode(StorageMode):
    """Writes operators and storages to the native event list."""

    def __init__(self, native: ctypes.CDLL) -> None:
        self.native = native
        self.rows: dict[str, int] = {}
        super().__init__(Storages(self._alloc, self._free))

    def _alloc(self, size: int) -> int:
        number = int(self.native.wt_new_block())
        self.native.wt_event(int(EventKind.ALLOC), 0, number, size)
        return number

    def _free(self, number: int) -> None:
        self.native.wt_event(int(EventKind.FREE), 0, number, 0)

    def after(self, func: Any, args: Any, kwargs: Any, out: Any) -> None:
        super().after(func, args, kwargs, out)
        if func.namespace == "c10d":
            return  # recorded where they arrive
        self.native.wt_note_node()
        text = json.dumps({
            "n": str(func), "i": [_describe(a) for a in (*args, *kwargs.values())],
            "o": [_describe(leaf) for leaf in tree_leaves(out) if isinstance(leaf, torch.Tensor)], "r": 0,
        })  # fmt: skip
        row = self.rows.get(text)
        if row is None:
            row = self.rows[text] = int(self.native.wt_add_operator(text.encode()))
        self.native.wt_event(int(EventKind.OP), 0, row, 0)


def _describe(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        return {
            "t": str(value.dtype).removeprefix("torch."),
            "s": list(value.shape),
            "d": list(value.stride()),
            "c": 1,
        }
    if isinstance(value, list | tuple):
        return [_describe(item) for item in value]
    if isinstance(value, torch.dtype):
        return str(value).removeprefix("torch.")
    return value if isinstance(value, int | float | bool | str | type(None)) else None
