"""Host tensors that nobody has looked at take no memory: what the native library (`native/untouched.cpp`)
cannot see of them by itself.

It sees operators and touched memory. Two things are neither: ``trunc_normal_`` is five operators that each
read what the one before wrote, and the kernel of the operating system, which reads and writes an array
of NumPy for whoever gives it to a file, touches nothing.
"""

from __future__ import annotations

import ctypes
import functools
from typing import Any

import numpy as np
import torch


def install(native: ctypes.CDLL) -> None:
    """Let large fills wait from now on. Call once, in the process of a rank."""
    native.wt_untouched()
    module: Any = torch.nn.init
    tensors: Any = torch.Tensor
    filled, array = module._no_grad_trunc_normal_, torch.Tensor.numpy

    @functools.wraps(filled)
    def trunc_normal_(
        tensor: torch.Tensor, mean: float, std: float, a: float, b: float, generator: Any = None
    ) -> torch.Tensor:
        if generator is None and tensor.device.type == "cpu":
            with torch.no_grad():
                if torch.ops.windtunnel.truncated_normal_(tensor, mean, std, a, b):
                    return tensor
        return filled(tensor, mean, std, a, b, generator=generator)  # type: ignore[no-any-return]

    @functools.wraps(array)
    def numpy(self: torch.Tensor, *args: Any, **options: Any) -> Any:
        result = array(self, *args, **options)
        begin, end = np.lib.array_utils.byte_bounds(result)
        native.wt_touch(begin, end - begin)
        return result

    module._no_grad_trunc_normal_ = trunc_normal_
    tensors.numpy = numpy
