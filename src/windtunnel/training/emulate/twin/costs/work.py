"""The work of an operator: of what kind it is, its floating point operations, the bytes that it moves.

An operator's name is ``namespace.base.overload``. Views, metadata and bare allocations are free on the
device. The lists hold the names that reach a device under PyTorch 2.13; whatever is left is elementwise
when its output has the broadcast shape of its inputs, and "other" otherwise.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import prod
from typing import Literal

from windtunnel.training.emulate.graph import DTYPE_BYTES, Operator, TensorMeta

Kind = Literal[
    "view", "matmul", "attention", "conv", "norm", "softmax", "reduction", "embedding", "optimizer", "copy",
    "elementwise", "compiled", "other",
]  # fmt: skip


def words(text: str) -> frozenset[str]:
    """The words of ``text``."""
    return frozenset(text.split())


VIEWS = words(
    """
    alias as_strided as_strided_ chunk detach detach_ diagonal expand expand_as lift_fresh movedim narrow
    permute _reshape_alias reshape resize_ resize_as_ select set_ slice split split_with_sizes squeeze
    squeeze_ swapaxes t t_ transpose transpose_ unbind unfold _unsafe_view unsafe_split
    unsafe_split_with_sizes unsqueeze unsqueeze_ view view_as view_as_complex view_as_real real imag _conj
    _neg_view conj resolve_conj resolve_neg is_same_size is_pinned record_stream size stride numel dim
    storage_offset empty empty_like empty_strided empty_permuted new_empty new_empty_strided
    _efficientzerotensor _version is_nonzero
    """
)
MATMULS = words(
    """
    mm addmm bmm baddbmm _scaled_mm _scaled_mm_v2 _scaled_grouped_mm _scaled_grouped_mm_v2 _grouped_mm _int_mm
    mv addmv addmv_ addbmm addbmm_ linear _addmm_activation matmul addmm_ baddbmm_ mkldnn_linear
    """
)
CONVS = words(
    """
    convolution _convolution convolution_overrideable convolution_backward convolution_backward_overrideable
    cudnn_convolution cudnn_convolution_transpose _slow_conv2d_forward _slow_conv2d_backward
    mkldnn_convolution conv_depthwise3d _conv_depthwise2d miopen_convolution
    """
)
NORMS = words(
    """
    native_layer_norm native_layer_norm_backward _fused_rms_norm _fused_rms_norm_backward rms_norm
    native_batch_norm native_batch_norm_backward cudnn_batch_norm cudnn_batch_norm_backward
    native_group_norm native_group_norm_backward batch_norm_stats batch_norm_elemt
    batch_norm_backward_reduce batch_norm_backward_elemt batch_norm_gather_stats_with_counts
    _native_batch_norm_legit _batch_norm_with_update batch_norm_backward miopen_batch_norm
    miopen_batch_norm_backward
    """
)
SOFTMAXES = words(
    """
    _softmax _softmax_backward_data _log_softmax _log_softmax_backward_data nll_loss_forward
    nll_loss_backward nll_loss2d_forward nll_loss2d_backward _masked_softmax _masked_softmax_backward
    logsumexp _safe_softmax
    """
)
REDUCTIONS = words(
    """
    sum mean max min amax amin argmax argmin any all prod norm linalg_vector_norm _foreach_norm var var_mean
    std std_mean cumsum cumprod aminmax median topk sort msort count_nonzero _unique2 unique_consecutive
    bincount histc nansum equal dot vdot
    """
)
EMBEDDINGS = words(
    """
    embedding embedding_dense_backward embedding_renorm_ index_select index_select_backward gather index
    _unsafe_index take take_along_dim scatter scatter_ scatter_add scatter_add_ scatter_reduce index_add
    index_add_ index_copy index_copy_ index_put index_put_ _index_put_impl_ _unsafe_index_put index_fill
    index_fill_ _embedding_bag _embedding_bag_forward_only _embedding_bag_dense_backward masked_select
    nonzero
    """
)
COPIES = words(
    """
    copy_ _to_copy clone cat _cat concat stack hstack vstack repeat repeat_interleave roll flip
    constant_pad_nd split_with_sizes_copy split_copy _chunk_cat _foreach_copy_ slice_scatter select_scatter
    as_strided_scatter slice_backward select_backward view_copy expand_copy as_strided_copy t_copy
    permute_copy transpose_copy unfold_backward _pin_memory pixel_shuffle tril triu contiguous copy
    _local_scalar_dense item fill_ zero_ zeros zeros_like ones ones_like full full_like new_zeros new_ones
    new_full fill zero arange
    """
)


COMPILED = "compiled."  # the namespace of kernels that a compiler made of several operators


def base_name(name: str) -> str:
    """``"aten.mm.default"`` -> ``"mm"``; a name without namespace or overload is its own base."""
    parts = name.replace("::", ".").split(".")
    return parts[1] if len(parts) > 1 else parts[0]


def kind_of(op: Operator) -> Kind:
    """The kind of ``op``."""
    base = base_name(op.name)
    if op.name.startswith("triton."):
        return "other"  # a kernel of the script's, whatever it is called
    if op.name.startswith(COMPILED):
        return "compiled"
    if not op.outputs and not op.tensors():
        return "view"
    if "attention" in op.name and "mask" not in base:
        return "attention"
    for kind, members in _TABLE:
        if base in members:
            return kind
    if base.startswith(("_fused_", "_foreach_", "_amp_")):
        return "optimizer"
    if base.startswith(("empty", "new_empty", "sym_")):
        return "view"
    return "elementwise" if _is_pointwise(op) else "other"


_TABLE: tuple[tuple[Kind, frozenset[str]], ...] = (
    ("view", VIEWS), ("matmul", MATMULS), ("conv", CONVS), ("norm", NORMS), ("softmax", SOFTMAXES),
    ("reduction", REDUCTIONS), ("embedding", EMBEDDINGS), ("copy", COPIES),
)  # fmt: skip


def _is_pointwise(op: Operator) -> bool:
    """Whether every output has the broadcast shape of the inputs."""
    shapes = [tensor.shape for tensor in op.tensors()]
    if not shapes or not op.outputs:
        return bool(op.outputs)
    rank = max(len(shape) for shape in shapes)
    widest = tuple(
        max(shape[axis - rank] if rank - axis <= len(shape) else 1 for shape in shapes)
        for axis in range(rank)
    )
    return all(out.shape == widest for out in op.outputs)


def first_tensor(op: Operator) -> TensorMeta | None:
    """The first tensor among the inputs, else the first output, else None."""
    tensor_metas = op.tensors()
    if tensor_metas:
        return tensor_metas[0]
    return op.outputs[0] if op.outputs else None


def dtype_of(op: Operator) -> str:
    """The dtype that ``op`` computes in: that of its first tensor."""
    tensor = first_tensor(op)
    return tensor.dtype if tensor else "float32"


def units_of(op: Operator) -> str:
    """The dtype at whose peak ``op`` runs: ``"tf32"`` of a product of float32 where the script allows it, and
    of a convolution, where cuDNN takes it unless it is told otherwise."""
    dtype, kind = dtype_of(op), kind_of(op)
    return "tf32" if dtype == "float32" and (kind == "conv" or (kind == "matmul" and op.tf32)) else dtype


Shape = tuple[int, ...]

# What `live.fused` records, forward and backward: queries, keys and values (batch, heads,
# sequence, head dimension) first, and last whether causal and the share of the scores that the mask leaves.
WITH_SHARE = words("flash_attention cudnn_attention flex_attention")


def _with_share(base: str) -> bool:
    return base.removesuffix("_backward") in WITH_SHARE


# Where an operator's arguments say whether it is causal (of `_efficient_attention`: the kind of mask, not 0).
CAUSAL = {
    "_scaled_dot_product_flash_attention": 4, "_scaled_dot_product_flash_attention_backward": 11,
    "_scaled_dot_product_efficient_attention": 6, "_scaled_dot_product_efficient_attention_backward": 11,
    "_scaled_dot_product_cudnn_attention": 6, "_scaled_dot_product_cudnn_attention_backward": 14,
    "_scaled_dot_product_flash_attention_for_cpu": 4,
    "_scaled_dot_product_flash_attention_for_cpu_backward": 7,
    "_scaled_dot_product_fused_attention_overrideable": 5,
    "_scaled_dot_product_fused_attention_overrideable_backward": 13, "scaled_dot_product_attention": 5,
    "_flash_attention_forward": 8, "_flash_attention_forward_no_dropout_inplace": 9,
    "_flash_attention_backward": 11, "_cudnn_attention_forward": 10, "_cudnn_attention_backward": 14,
    "_efficient_attention_forward": 9, "_efficient_attention_backward": 14,
    "_triton_attention_forward": 3, "_triton_attention_backward": 6,
}  # fmt: skip


def matmul_shape(op: Operator) -> tuple[int, int, int, int]:
    """(batch, M, N, K) of a matrix product; zeros when the operands are not matrices."""
    base = base_name(op.name).rstrip("_")
    operands = [arg.shape for arg in op.inputs if isinstance(arg, TensorMeta)]
    if base in ("addmm", "baddbmm", "addbmm", "addmv", "_addmm_activation"):
        operands = operands[1:]
    if len(operands) < 2:
        return 0, 0, 0, 0
    left, right = operands[0], operands[1]
    if base.startswith("_scaled") and any(tensor.dtype == "float4_e2m1fn_x2" for tensor in op.tensors()[:1]):
        left, right = (*left[:-1], 2 * left[-1]), right  # two elements a byte, counted as one
    if base in ("linear", "mkldnn_linear"):
        return 1, prod(left[:-1]), right[0], left[-1]
    if base in ("mv", "addmv"):
        return 1, left[0], 1, left[1]
    if len(left) == 3 and len(right) == 3:
        return left[0], left[1], right[2], left[2]
    if len(left) == 2 and len(right) == 3:  # grouped: rows of the left are dealt out to the right's matrices
        return 1, left[0], right[2], left[1]
    if len(left) == 3 and len(right) == 2:  # likewise: columns of the right to the left's
        return 1, left[1], right[1], left[2]
    if len(left) == 2 and len(right) == 2:
        return 1, left[0], right[1], left[1]
    return prod(left[:-2]) or 1, left[-2] if len(left) > 1 else 1, right[-1], left[-1]


def attention_shapes(op: Operator) -> tuple[Shape, Shape, Shape, bool, bool]:
    """Shapes (batch, heads, sequence, head dimension) of query, key and value, is_causal, is_backward.

    Operators that take (batch, sequence, heads, dimension) are turned.
    """
    base = base_name(op.name)
    backward = "backward" in base
    tensors = [arg.shape for arg in op.inputs if isinstance(arg, TensorMeta) and len(arg.shape) >= 3]
    skip = 1 if backward and not _with_share(base) else 0
    if len(tensors) < skip + 3:
        return (0, 0, 0, 0), (0, 0, 0, 0), (0, 0, 0, 0), False, backward
    query, key, value = (_four(shape) for shape in tensors[skip : skip + 3])
    if base.startswith(("_flash_attention", "_efficient_attention", "_cudnn_attention", "_triton_attention")):
        query, key, value = ((s[0], s[2], s[1], s[3]) for s in (query, key, value))
    at = CAUSAL.get(base, -1)
    if _with_share(base):
        at = len(op.inputs) - 2
    causal = bool(op.inputs[at]) if 0 <= at < len(op.inputs) else False
    return query, key, value, causal, backward


def _four(shape: Shape) -> Shape:
    return shape if len(shape) == 4 else (1,) * (4 - len(shape)) + shape


def counted_flops(op: Operator) -> float:
    """FLOPs of ``op`` in the convention of ``torch.utils.flop_counter``."""
    kind: Kind = kind_of(op)
    if kind == "matmul":
        batch, m, n, k = matmul_shape(op)
        return 2.0 * batch * m * n * k
    if kind == "attention":
        return _attention_flops(op)
    if kind == "conv":
        return _convolution_flops(op)
    return 0.0


def executed_flops(op: Operator) -> float:
    """FLOPs that the kernel computes: the counted ones, without the masked half of causal attention, and with
    the gradient of a weight once for each of its groups, which PyTorch counts as that of a whole one."""
    kind, total = kind_of(op), counted_flops(op)
    if kind == "conv":
        return _convolution_flops(op, by_group=True)
    if total and kind == "attention":
        query, key, _, causal, _ = attention_shapes(op)
        if causal and key[2]:
            # Row i sees the keys up to i: of a square half of the scores and half a diagonal.
            rows = min(query[2], key[2])
            total *= (rows * (rows + 1) / 2 + max(0, query[2] - key[2]) * key[2]) / (query[2] * key[2])
    return total


def _share_of_scores(op: Operator) -> float:
    """The share of the scores that a mask leaves, where the operator says it."""
    share = op.inputs[-1] if _with_share(base_name(op.name)) else 1.0
    return share if isinstance(share, float) else 1.0


def _attention_flops(op: Operator) -> float:
    query, key, value, _, backward = attention_shapes(op)
    batch, heads, rows, dimension = query
    columns, width = key[2], value[3]
    scores = 2.0 * batch * heads * rows * columns * _share_of_scores(op)
    if not backward:
        return scores * (dimension + width)
    # Scores again, then the gradients of value, probabilities, query and key.
    return scores * (dimension + width + width + dimension + dimension)


def _convolution(x: Shape, weight: Shape, out: Shape, transposed: bool) -> float:
    positions = prod((x if transposed else out)[2:])
    return 2.0 * x[0] * positions * prod(weight)


def _convolution_flops(op: Operator, *, by_group: bool = False) -> float:
    base = base_name(op.name)
    shapes = [arg.shape for arg in op.inputs if isinstance(arg, TensorMeta)]
    if "backward" not in base:
        transposed = bool(op.inputs[6]) if base.startswith("convolution") and len(op.inputs) > 6 else False
        return _convolution(shapes[0], shapes[1], op.outputs[0].shape, transposed)
    grad, x, weight = shapes[:3]
    transposed = bool(op.inputs[7]) if len(op.inputs) > 7 else False
    mask: Sequence[bool] = op.inputs[10] if len(op.inputs) > 10 else (True, True, True)
    flops = 0.0
    if mask[0]:  # the gradient of the input is the other convolution of the output's gradient
        flops += _convolution(grad, weight, x, not transposed)
    if mask[1]:  # the gradient of the weight: batch and channels trade places
        groups = op.inputs[9] if by_group and base == "convolution_backward" else 1
        flops += _weight_gradient(x, grad, weight, transposed) / groups
    return flops


def _weight_gradient(x: Shape, grad: Shape, weight: Shape, transposed: bool) -> float:
    left, right = (grad, x) if transposed else (x, grad)
    return _convolution(_swap(left), _swap(right), _swap(weight), False)


def _swap(shape: Shape) -> Shape:
    return (shape[1], shape[0], *shape[2:])


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
    if kind == "compiled":
        return float(sum(stored_bytes(tensor) for tensor in (*op.tensors(), *op.outputs)))
    base = base_name(op.name)
    tensors = op.tensors()
    written = float(sum(stored_bytes(tensor) for tensor in op.outputs))
    read = float(sum(stored_bytes(tensor) for tensor in tensors))
    if op.name.startswith("triton."):
        return read  # its outputs are among its arguments
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
