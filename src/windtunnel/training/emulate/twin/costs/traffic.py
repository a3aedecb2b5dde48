"""Bytes that an operator reads from and writes to device memory.

The rule: every input is read once and every output written once, at the size of its storage (an expanded
dimension of stride 0 is stored once), and an intermediate that stays on the chip is free. The exceptions are
operators that do not read what they overwrite, that touch only some rows of a table, or that work in passes.
The same tensor given twice counts twice; a cache holds it only where it is small, and then it costs little.
"""

from __future__ import annotations

from math import prod

from windtunnel.training.emulate.graph import DTYPE_BYTES, Operator, TensorMeta
from windtunnel.training.emulate.twin.costs.kinds import Kind, base_name, kind_of, words

# The first argument is only written.
OVERWRITES = words(
    """
    copy_ fill_ zero_ zero uniform_ normal_ random_ bernoulli_ exponential_ arange _foreach_copy_
    _foreach_zero_ set_ trunc_normal_ log_normal_ geometric_ cauchy_
    """
)
# Look-ups of rows: what is read of the first argument is as much as comes out.
LOOKUPS = words(
    """
    embedding index_select gather index _unsafe_index take take_along_dim _embedding_bag
    _embedding_bag_forward_only masked_select
    """
)
# Writes to rows of the first argument, in place.
ROW_WRITES = words(
    """
    index_put_ _index_put_impl_ index_add_ index_copy_ scatter_ scatter_add_ index_fill_ embedding_renorm_
    """
)


def stored_bytes(tensor: TensorMeta) -> int:
    """Bytes of memory behind a tensor; dimensions of stride 0 are stored once."""
    shape = tensor.shape
    if len(tensor.stride) == len(shape):
        shape = tuple(size for size, stride in zip(shape, tensor.stride, strict=True) if stride or not size)
    return prod(shape) * DTYPE_BYTES.get(tensor.dtype, 4)


def is_contiguous(tensor: TensorMeta) -> bool:
    """Whether the innermost dimension of more than one element has stride 1 (rows are read in a piece)."""
    pairs = [(size, stride) for size, stride in zip(tensor.shape, tensor.stride, strict=False) if size > 1]
    return not pairs or pairs[-1][1] <= 1


def moved_bytes(op: Operator, kind: Kind | None = None) -> float:
    """Bytes that ``op`` moves through device memory, reads and writes together."""
    kind = kind or kind_of(op)
    if kind == "view":
        return 0.0
    base = base_name(op.name)
    tensors = op.tensors()
    written = float(sum(stored_bytes(tensor) for tensor in op.outputs))
    read = float(sum(stored_bytes(tensor) for tensor in tensors))
    if kind == "embedding":
        return _row_bytes(op, base, tensors, read, written)
    if base in ("nll_loss_forward", "nll_loss2d_forward"):
        # One score of each row is read, but with it its 32-byte sector.
        return (
            written + sum(stored_bytes(tensor) for tensor in tensors[1:]) + 32.0 * prod(tensors[0].shape[:1])
        )
    if base in ("nll_loss_backward", "nll_loss2d_backward"):
        return written + sum(stored_bytes(t) for t in tensors if t.shape != op.outputs[0].shape)
    if base in OVERWRITES or op.name.endswith((".out", "_out")):
        return read - _overwritten(op) + written
    if kind == "attention":
        # The backward kernel adds the query's gradient up in float32, and converts it.
        extra = 2.0 * op.outputs[0].numel * 4 if "backward" in base and op.outputs else 0.0
        return read + written + extra
    if base == "_fused_adamw_" or base == "_fused_adam_":
        return _fused_adam_bytes(op, read)
    if base.startswith(("zeros", "ones", "full", "new_zeros", "new_ones", "new_full")):
        return written
    return read + written


def _overwritten(op: Operator) -> float:
    """Bytes of the arguments that are written without being read."""
    first = op.inputs[-1] if op.name.endswith((".out", "_out")) else op.inputs[0]
    if isinstance(first, TensorMeta):
        return float(stored_bytes(first))
    if isinstance(first, tuple):
        return float(sum(stored_bytes(item) for item in first if isinstance(item, TensorMeta)))
    return 0.0


def _row_bytes(op: Operator, base: str, tensors: list[TensorMeta], read: float, written: float) -> float:
    if base in LOOKUPS and tensors:
        indices = sum(stored_bytes(tensor) for tensor in tensors[1:])
        return indices + written + min(written, float(stored_bytes(tensors[0])))
    if base == "embedding_dense_backward" and tensors:
        # The table's gradient is zeroed, then the rows that occur are read, added to and written.
        return read + written + 2.0 * min(written, float(stored_bytes(tensors[0])))
    if base in ROW_WRITES and tensors:
        touched = float(max((stored_bytes(t) for t in tensors[1:] if t.dtype == tensors[0].dtype), default=0))
        indices = sum(stored_bytes(t) for t in tensors[1:] if t.dtype != tensors[0].dtype)
        return indices + touched + 2.0 * min(touched, float(stored_bytes(tensors[0])))
    return read + written


def _fused_adam_bytes(op: Operator, read: float) -> float:
    """Parameters, gradients and both moments are read; all but the gradients are written."""
    lists = [arg for arg in op.inputs[:5] if isinstance(arg, tuple)]
    sizes = [float(sum(stored_bytes(t) for t in items if isinstance(t, TensorMeta))) for items in lists]
    return read + sum(size for position, size in enumerate(sizes) if position != 1)
