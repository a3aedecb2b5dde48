"""What kind of work an operator is: the first question that its cost depends on.

An operator's name is ``namespace.base.overload``. Views, metadata and bare allocations are free on the
device. The lists hold the names that reach a device under PyTorch 2.13; whatever is left is elementwise
when its output has the broadcast shape of its inputs, and "other" otherwise.
"""

from __future__ import annotations

from typing import Literal

from windtunnel.training.emulate.graph import Operator, TensorMeta

Kind = Literal[
    "view", "matmul", "attention", "conv", "norm", "softmax", "reduction", "embedding", "optimizer", "copy",
    "elementwise", "other",
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
    mm addmm bmm baddbmm _scaled_mm _scaled_grouped_mm _grouped_mm _int_mm mv addmv dot vdot addbmm linear
    _addmm_activation matmul addmm_ baddbmm_ mkldnn_linear
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
    bincount histc nansum equal
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

# Kinds that a compiler fuses into one kernel with their neighbours.
FUSABLE: frozenset[Kind] = frozenset({"norm", "softmax", "reduction", "elementwise", "copy", "view"})


def base_name(name: str) -> str:
    """``"aten.mm.default"`` -> ``"mm"``; a name without namespace or overload is its own base."""
    parts = name.replace("::", ".").split(".")
    return parts[1] if len(parts) > 1 else parts[0]


def kind_of(op: Operator) -> Kind:
    """The kind of ``op``."""
    base = base_name(op.name)
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
    found = op.tensors()
    if found:
        return found[0]
    return op.outputs[0] if op.outputs else None
