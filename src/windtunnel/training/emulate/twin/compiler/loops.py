"""The loops that Inductor makes of an operator, which decide what can share a kernel with it.

An operator becomes one part or several, each *pointwise* (a value for each point), a *row* reduction (over
the innermost dimension, whose result the same kernel can go on with), a *full* reduction (to one number) or a
*column* reduction (over other dimensions). The last two are done in two stages, the first over pieces: what
reads their result needs another kernel. Whatever is no such loop is *extern*: matrix products, attention,
convolutions, look-ups, and operators on complex numbers, for which Inductor has no code.

As Inductor decomposes it, a norm is statistics by rows and then a pointwise part, so that the normalised
values can be computed again from saved statistics; its backward is a row reduction for the input and a column
reduction for the weights. Reductions of up to `UNROLLED` elements are written out and are pointwise; one of
up to `UNSPLIT` elements to a number is done in one piece, as a row.

Source: PyTorch 2.13, ``torch/_inductor`` (``lowering.py``, ``ir.py``: ``Reduction.num_splits`` and
``create_multilayer_existing_ranges``, ``decomposition.py``, ``config.unroll_reductions_threshold``).
"""

from __future__ import annotations

from dataclasses import dataclass
from math import prod
from typing import Literal

from windtunnel.training.emulate.graph import Operator, TensorMeta
from windtunnel.training.emulate.twin.costs.work import OVERWRITES, base_name, kind_of

UNROLLED = 8
UNSPLIT = 8192


@dataclass(frozen=True, slots=True)
class Loops:
    """``points``: how often the innermost statement runs; ``rows``: results of a row reduction, else 0."""

    kind: Literal["pointwise", "row", "full", "column"]
    points: int
    rows: int = 0

    @property
    def staged(self) -> bool:
        """Whether what reads the result needs another kernel."""
        return self.kind in ("full", "column")


@dataclass(frozen=True, slots=True)
class Part:
    """A part of an operator: its loops (None: extern), which of the operator's inputs it reads, which results
    it reads that an earlier part wrote, and which it writes; positions among tensors."""

    loops: Loops | None
    reads: tuple[int, ...]
    again: tuple[int, ...]
    writes: tuple[int, ...]


NORMS = {"_fused_rms_norm": 1, "native_layer_norm": 1}
NORM_BACKWARDS = ("_fused_rms_norm_backward", "native_layer_norm_backward")
NEVER = frozenset({"split_with_sizes_copy", "_chunk_cat", "_local_scalar_dense", "item", "_pin_memory"})


def parts_of(op: Operator) -> tuple[Part, ...]:
    """The parts of ``op``, in order; an operator that is no loop has one, with ``loops`` None."""
    tensors, base, kind = op.tensors(), base_name(op.name), kind_of(op)
    reads, writes = tuple(range(len(tensors))), tuple(range(len(op.outputs)))
    extern = (Part(None, reads, (), writes),)
    every = [*tensors, *op.outputs]
    if (
        base in NEVER
        or base.startswith("_foreach")
        or any(tensor.dtype.startswith("complex") for tensor in every)
    ):
        return extern
    if len({tensor.device for tensor in every if tensor.shape}) > 1 or not op.outputs:
        return extern  # a copy between host and device
    points = max(tensor.numel for tensor in every)
    if base in NORMS and len(op.outputs) > 1 and tensors:
        rows = op.outputs[-1].numel
        return (
            Part(Loops("row", points, rows), (0,), (), writes[1:]),
            Part(Loops("pointwise", points), reads, writes[1:], (0,)),
        )
    if base in NORM_BACKWARDS and len(tensors) > 2:
        rows = min(tensor.numel for tensor in tensors[2:3])
        given = [Part(Loops("row", points, rows), reads, (), (0,))]
        if writes[1:]:
            given.append(Part(Loops("column", points), reads[:-1], (), writes[1:]))
        return tuple(given)
    if kind == "softmax" and base.endswith(("softmax", "softmax_backward_data")):
        axis = next((arg for arg in op.inputs if isinstance(arg, int) and not isinstance(arg, bool)), -1)
        shape = op.outputs[0].shape
        rows = points // max(1, shape[axis] if shape else 1)
        return (Part(Loops("row", points, rows), reads, (), writes),)
    if (
        kind == "reduction"
        and tensors
        and base not in ("topk", "sort", "msort", "median", "cumsum", "cumprod")
    ):
        return (Part(_reduction(op, tensors[0]), reads, (), writes),)
    if op.name.endswith(".out") and kind in ("elementwise", "other") and len(op.outputs) == 1 and reads[1:]:
        # The last tensor is only written; where it is made to fit, it is recorded as it was before.
        return (Part(Loops("pointwise", max(t.numel for t in tensors)), reads[:-1], (), writes),)
    if kind in ("elementwise", "copy"):
        overwritten = base in OVERWRITES
        points = max(tensor.numel for tensor in op.outputs)
        return (Part(Loops("pointwise", points), reads[1:] if overwritten else reads, (), writes),)
    return extern


def _reduction(op: Operator, given: TensorMeta) -> Loops:
    out = op.outputs[0].numel
    each = given.numel // max(1, out)
    if each <= UNROLLED:
        return Loops("pointwise", max(out, 1))
    axes = next((arg for arg in op.inputs[1:] if isinstance(arg, tuple) and arg), None)
    if axes is None:
        number = next((a for a in op.inputs[1:] if isinstance(a, int) and not isinstance(a, bool)), None)
        axes = None if number is None or base_name(op.name) == "linalg_vector_norm" else (number,)
    rank = len(given.shape)
    if out == 1 and given.numel <= UNSPLIT:
        return Loops("row", given.numel, 1)
    if out == 1 or axes is None or not all(isinstance(axis, int) for axis in axes):
        return Loops("full", given.numel)
    inner = {axis % rank for axis in axes} == set(range(rank - len(axes), rank))
    if inner and prod(given.shape[rank - len(axes) :]) == each:
        return Loops("row", given.numel, out)
    return Loops("column", given.numel)
