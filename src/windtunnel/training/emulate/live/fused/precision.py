"""What ``transformer_engine`` calls recipes and quantisation: which products run in float8, and its casts.

A quantised tensor is held twice, by rows and by columns, as a float8 product on Hopper takes its operands;
what is kept for the backward pass is the one by columns. Current scaling looks through the tensor first.
(``transformer_engine/pytorch/{quantization,tensor/float8_tensor}.py``, 2.6)
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from enum import Enum
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from windtunnel.training.emulate.live.fused.kernel import launch

Format = Enum("Format", ("E4M3", "E5M2", "HYBRID"))


class Recipe:
    """How tensors are scaled; ``delayed()`` and its like say which recipe it is."""

    kind = ""

    def __init__(self, fp8_format: Any = Format.HYBRID, **options: Any) -> None:
        self.fp8_format, self.reduce_amax, self.fp8_dpa, self.fp8_mha = fp8_format, True, False, False
        vars(self).update(options)

    def __getattr__(self, name: str) -> Any:
        if name not in KINDS:
            raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")
        return lambda: name == self.kind


KINDS = {
    "delayed": "DelayedScaling", "float8_current_scaling": "Float8CurrentScaling",
    "float8_block_scaling": "Float8BlockScaling", "mxfp8": "MXFP8BlockScaling",
}  # fmt: skip
RECIPES: dict[str, Any] = {name: type(name, (Recipe,), {"kind": kind}) for kind, name in KINDS.items()}
DelayedScaling = RECIPES["DelayedScaling"]


class FP8GlobalStateManager:
    """Which recipe is in force."""

    recipe: Any = None
    layers = 0  # that have run since the outermost region began

    @classmethod
    def is_fp8_enabled(cls) -> bool:
        return cls.recipe is not None

    @classmethod
    def is_fp8_calibration(cls) -> bool:
        return False

    @classmethod
    def get_fp8_recipe(cls) -> Any:
        return cls.recipe or DelayedScaling()


@contextmanager
def fp8_autocast(
    enabled: bool = True, calibrating: bool = False, fp8_recipe: Any = None, fp8_group: Any = None,
    _graph: bool = False,
) -> Iterator[None]:  # fmt: skip
    """Delayed scaling reduces its largest values over the group where the outermost one ends."""
    state, before = FP8GlobalStateManager, FP8GlobalStateManager.recipe
    state.recipe = (fp8_recipe or DelayedScaling()) if enabled else None
    state.layers = state.layers if before else 0
    try:
        yield
        recipe = state.recipe
        outermost = before is None and torch.is_grad_enabled() and dist.is_initialized()
        if recipe is not None and recipe.delayed() and recipe.reduce_amax and outermost:
            dist.all_reduce(torch.empty(3 * state.layers, device="cuda"), dist.ReduceOp.MAX, fp8_group)
    finally:
        state.recipe = before


class Quantised(NamedTuple):
    """A tensor (n, m) in float8, by rows and, in memory of its own, by columns (m, n)."""

    rows: torch.Tensor
    columns: torch.Tensor


def quantise(tensor: torch.Tensor, gradient: bool = False) -> Quantised:
    """``tensor`` (n, m) by the recipe in force."""
    recipe = FP8GlobalStateManager.get_fp8_recipe()
    if recipe.float8_current_scaling():
        launch("transformer_engine.amax", (tensor,), (tensor.new_empty(1, dtype=torch.float32),))
    wide = gradient and recipe.fp8_format == Format.HYBRID
    dtype = torch.float8_e5m2 if wide else torch.float8_e4m3fn
    copies = [tensor.new_empty(size, dtype=dtype) for size in (tensor.shape, tensor.shape[::-1])]
    launch("transformer_engine._to_copy", (tensor,), copies)
    return Quantised(*copies)


def multiply(left: torch.Tensor, right: torch.Tensor, out: torch.Tensor, add: bool = False) -> torch.Tensor:
    """``out`` = ``left`` (m, k) @ ``right`` (k, n), on top of what it holds where ``add``; what cuBLAS's
    epilogue does to the bias is part of it."""
    base = "_scaled_mm" if left.dtype.itemsize == 1 else "mm"
    launch(f"transformer_engine.{base}", (left, right, *((out,) if add else ())), (out,))
    return out
