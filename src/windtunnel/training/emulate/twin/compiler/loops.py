"""The loops that Inductor makes of an operator.

They are *pointwise* (a value for each point), a *row* reduction (over the innermost dimension, whose result
the same kernel can go on with), or *staged*, a reduction to one number or over other dimensions: it is done
over pieces first, so that what reads its result needs another kernel. Norms and softmax are row reductions.
Reductions of up to `UNROLLED` elements are written out and are pointwise; one of up to `UNSPLIT` elements to
a number is done in one piece, as a row. Whatever is no such loop is *extern*: matrix products, attention,
convolutions, look-ups, and operators on complex numbers, for which Inductor has no code.

Source: PyTorch 2.13, ``torch/_inductor`` (``lowering.py``, ``ir.py``: ``Reduction.num_splits``,
``decomposition.py``, ``config.unroll_reductions_threshold``).
"""

from __future__ import annotations

from dataclasses import dataclass
from math import prod
from typing import Literal

from windtunnel.training.emulate.graph import Operator, TensorMeta
from windtunnel.training.emulate.twin.costs.work import base_name, kind_of

UNROLLED = 8
UNSPLIT = 8192


@dataclass(frozen=True, slots=True)
class KernelLoops:
    """``points``: how often the innermost statement runs; ``rows``: results of a row reduction, else 0."""

    kind: Literal["pointwise", "row", "staged"]
    points: int
    rows: int = 0


NORMS = ("_fused_rms_norm", "native_layer_norm")
NEVER = frozenset({"split_with_sizes_copy", "_chunk_cat", "_local_scalar_dense", "item", "_pin_memory"})
UNEVEN = ("topk", "sort", "msort", "median", "cumsum", "cumprod")
"""Called reductions for what they cost, which they are not."""


def loops_of(op: Operator) -> KernelLoops | None:
    """The loops of ``op``; None where it is extern."""
    tensors, base, kind = op.tensors(), base_name(op.name), kind_of(op)
    every = [*tensors, *op.outputs]
    if base in NEVER or base.startswith("_foreach") or not op.outputs:
        return None
    if any(tensor.dtype.startswith("complex") for tensor in every):
        return None
    if len({tensor.device for tensor in every if tensor.shape}) > 1:
        return None  # a copy between host and device
    points = max(tensor.numel for tensor in every)
    if base in NORMS and len(op.outputs) > 1:
        return KernelLoops("row", points, op.outputs[-1].numel)
    if base.removesuffix("_backward") in NORMS and len(tensors) > 2:
        return KernelLoops("row", points, tensors[2].numel)
    if kind == "softmax" and base.endswith(("softmax", "softmax_backward_data")):
        axis = next((arg for arg in op.inputs if isinstance(arg, int) and not isinstance(arg, bool)), -1)
        shape = op.outputs[0].shape
        return KernelLoops("row", points, points // max(1, shape[axis] if shape else 1))
    if kind == "reduction" and tensors and base not in UNEVEN:
        return _reduction(op, tensors[0])
    if kind in ("elementwise", "copy"):
        return KernelLoops("pointwise", max(tensor.numel for tensor in op.outputs))
    if op.name.endswith(".out") and kind == "other" and len(op.outputs) == 1:
        return KernelLoops("pointwise", points)
    return None


def _reduction(op: Operator, source: TensorMeta) -> KernelLoops:
    out, rank = op.outputs[0].numel, len(source.shape)
    each = source.numel // max(1, out)
    if each <= UNROLLED:
        return KernelLoops("pointwise", max(out, 1))
    if out == 1:
        return KernelLoops("row" if source.numel <= UNSPLIT else "staged", source.numel, 1)
    axes: tuple[int, ...] = next((arg for arg in op.inputs[1:] if isinstance(arg, tuple)), ())
    if not axes and base_name(op.name) != "linalg_vector_norm":
        axes = tuple(arg for arg in op.inputs[1:] if isinstance(arg, int) and not isinstance(arg, bool))[:1]
    inner = {axis % rank for axis in axes} == set(range(rank - len(axes), rank))
    if axes and inner and prod(source.shape[rank - len(axes) :]) == each:
        return KernelLoops("row", source.numel, out)
    return KernelLoops("staged", source.numel)
