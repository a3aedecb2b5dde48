"""Storages of the absent device as Python sees them: resized, created, copied, printed and saved.

They have no bytes. What is read from them on the host (``print``, ``torch.save``) are zeros, or the values of
the small tensors that the host put there.
"""

from __future__ import annotations

import ctypes
from typing import Any

import torch


def install(native: ctypes.CDLL) -> None:
    """Let storages and printing know the absent device. Call once."""
    _resize(native)
    _create()
    _print_from_host()


def _resize(native: ctypes.CDLL) -> None:
    """FSDP frees and re-allocates gathered parameters with ``storage.resize_``, which no dispatcher sees."""
    original = torch.UntypedStorage.resize_

    def resize_(self: torch.UntypedStorage, size: int) -> torch.UntypedStorage:
        if self.device.type == "cuda":
            native.wt_storage_resize(self._cdata, int(size))
            return self
        original(self, size)
        return self

    torch.UntypedStorage.resize_ = resize_  # type: ignore[method-assign, assignment]


def _create() -> None:
    """A CPU-only build refuses to create a storage on a CUDA device, which ``copy.deepcopy`` and
    ``torch.load`` do."""
    original = torch.UntypedStorage.__new__

    def new(cls: type, *args: Any, device: Any = None, **kwargs: Any) -> Any:
        if device is not None and torch.device(device).type == "cuda":
            size = args[0] if args else kwargs.get("size", 0)
            return torch.empty(int(size), dtype=torch.uint8, device=device).untyped_storage()
        if device is not None:
            kwargs["device"] = device
        return original(cls, *args, **kwargs)

    torch.UntypedStorage.__new__ = new  # type: ignore[method-assign, assignment]


def _print_from_host() -> None:
    """Formatting looks at the values to choose digits, which is not possible on the device."""
    module: Any = torch._tensor_str
    original = module._tensor_str

    def tensor_str(tensor: torch.Tensor, indent: int) -> str:
        return original(tensor.detach().cpu() if tensor.is_cuda else tensor, indent)  # type: ignore[no-any-return]

    module._tensor_str = tensor_str
