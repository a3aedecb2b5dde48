"""Attention of ``flash_attn`` and ``transformer_engine``: one kernel on the given layout.

Signatures are those of flash-attn 2.8 (``flash_attn_interface.py``) and of FlashAttention 3
(``hopper/flash_attn_interface.py``), whose kernel is costed as cuDNN's, at which its paper finds it. With
several sequences in a row (``cu_seqlens``) the kernel computes the scores within each: their offsets are read
where the host knows them, else the sequences are taken to be equally long.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Sequence
from itertools import pairwise
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
import torch.nn.attention.flex_attention as module

from windtunnel.training.emulate.graph import NoteKind
from windtunnel.training.emulate.live.fused.kernel import (
    TE,
    Attention,
    FP8GlobalStateManager,
    begin,
    launch,
    note,
    stands_in,
    values_of,
)
from windtunnel.training.emulate.live.names import refuse
from windtunnel.training.emulate.live.native_library import unrecorded
from windtunnel.training.emulate.live.observe import Observer
from windtunnel.training.emulate.live.patches import replaces

EVERYTHING = (-1, -1)
PLAIN = inspect.Parameter.POSITIONAL_OR_KEYWORD
OPTIONS = {
    "dropout_p": 0.0, "softmax_scale": None, "causal": False, "window_size": EVERYTHING, "softcap": 0.0,
    "alibi_slopes": None, "deterministic": False, "return_attn_probs": False,
}  # fmt: skip
HOPPER_OPTIONS = {
    "softmax_scale": None, "causal": False, "qv": None, "q_descale": None, "k_descale": None,
    "v_descale": None, "window_size": EVERYTHING, "attention_chunk": 0, "softcap": 0.0, "num_splits": 1,
    "pack_gqa": None, "deterministic": False, "sm_margin": 0, "return_attn_probs": False,
}  # fmt: skip
OFFSETS = "cu_seqlens_q cu_seqlens_k max_seqlen_q max_seqlen_k"


def share_of(
    lengths: Iterable[tuple[int, int]], rows: int, columns: int, causal: bool, window: Sequence[int]
) -> tuple[bool, float]:
    """Whether of the scores the half above the diagonal is left out, and otherwise the share of ``rows`` ×
    ``columns`` that the mask leaves. ``lengths``: queries and keys of each sequence; ``window``: how far a
    query sees to the left and right, -1 for all."""
    pairs = 0
    left, right = window[0], 0 if causal else window[1]
    sliding = left >= 0 or (right >= 0 and not causal)
    for queries, keys in lengths:
        row = np.arange(keys - queries, keys)  # the last query stands at the last key
        begin = np.maximum(0, row - left) if sliding and left >= 0 else 0
        end = np.minimum(keys, row + right + 1) if sliding and right >= 0 else keys
        pairs += int(np.maximum(0, end - begin + np.zeros_like(row)).sum())
    return causal and not sliding, pairs / max(1, rows * columns)


def lengths_of(offsets: Any, total: int) -> list[int]:
    """The lengths of sequences in a row, from their ``offsets``, one more than there are sequences."""
    offset_values = values_of(offsets)
    if offset_values is not None:
        return [end - begin for begin, end in pairwise(offset_values)]
    count = max(1, offsets.numel() - 1)
    note("the lengths of sequences in a row are not known: attention takes them to be equally long")
    return [total // count] * count


def _unpack(tensors: Sequence[torch.Tensor]) -> Sequence[torch.Tensor]:
    """Query, key and value of three tensors, of two (keys with values) or of one."""
    return (*tensors[:-1], *tensors[-1].unbind(-3)) if len(tensors) < 3 else tensors


def batched(tensors: Sequence[torch.Tensor]) -> Sequence[torch.Tensor]:
    """From (batch, sequence, heads, dimension)."""
    return [tensor.transpose(1, 2) for tensor in _unpack(tensors)]


def _in_a_row(tensors: Sequence[torch.Tensor]) -> Sequence[torch.Tensor]:
    return [tensor.transpose(0, 1).unsqueeze(0) for tensor in _unpack(tensors)]


def _flash(name: str, tensors: str, offsets: str = "", hopper: bool = False) -> Callable[..., Any]:
    """The function ``name`` of flash-attn, or of FlashAttention 3: its tensors and the ends of sequences in a
    row."""
    words = [*tensors.split(), *offsets.split()]
    options: dict[str, Any] = dict(HOPPER_OPTIONS if hopper else OPTIONS)
    if hopper and offsets:
        options = {"seqused_q": None, "seqused_k": None} | options
    elif name == "flash_attn_varlen_func":
        options["block_table"] = None
    parameters = [inspect.Parameter(word, PLAIN) for word in words]
    parameters += [inspect.Parameter(word, PLAIN, default=value) for word, value in options.items()]
    signature = inspect.Signature(parameters)
    package = FLASH_3 if hopper else "flash_attn"
    kernel = f"{package}.cudnn_attention" if hopper else "flash_attn.flash_attention"

    def call(*args: Any, **kwargs: Any) -> Any:
        bound = signature.bind(*args, **kwargs)
        bound.apply_defaults()
        bound_arguments = bound.arguments
        stands_in(package, name)
        operands = [bound_arguments[word] for word in tensors.split()]
        rows, columns = (t.shape[0 if offsets else 1] for t in (operands[0], operands[-1]))
        lengths = [(rows, columns)]
        if offsets:
            ends = [bound_arguments[word] for word in offsets.split() if word.startswith("cu_")]
            sides = [lengths_of(end, n) for end, n in zip(dict.fromkeys(ends), (rows, columns), strict=False)]
            lengths = list(zip(sides[0], sides[-1], strict=True))
        half, share = share_of(
            lengths, rows, columns, bound_arguments["causal"], bound_arguments["window_size"]
        )
        views = _in_a_row if offsets else batched
        out, lse = Attention.apply(kernel, half, share, views, *operands)
        out, lse = (out[0].transpose(0, 1), lse[0]) if offsets else (out.transpose(1, 2), lse)
        if not bound_arguments["return_attn_probs"]:
            return out
        return (out, lse) if hopper else (out, lse, None)

    call.__name__, call.__signature__ = name, signature  # type: ignore[attr-defined]
    return call


FLASH_3 = "flash_attn_interface"
FLASH: dict[str, Any] = {
    f"flash_attn_{name}func": _flash(f"flash_attn_{name}func", tensors, offsets)
    for name, tensors, offsets in (
        ("", "q k v", ""), ("kvpacked_", "q kv", ""), ("qkvpacked_", "qkv", ""),
        ("varlen_", "q k v", OFFSETS), ("varlen_kvpacked_", "q kv", OFFSETS),
        ("varlen_qkvpacked_", "qkv", "cu_seqlens max_seqlen"),
    )
}  # fmt: skip
HOPPER: dict[str, Any] = {
    name: _flash(name, tensors, offsets, hopper=True)
    for name, tensors, offsets in (
        ("flash_attn_func", "q k v", ""), ("flash_attn_varlen_func", "q k v", OFFSETS)
    )
}  # fmt: skip
for _package, _functions in (("flash_attn", FLASH), (FLASH_3, HOPPER)):
    _functions["flash_attn_with_kvcache"] = refuse(
        f"{_package}.flash_attn_with_kvcache",
        "how much of its cache is filled is not known; use the others",
    )


def unpad_input(hidden_states: Any, attention_mask: Any, unused_mask: Any = None) -> Any:
    """Rows that a mask (batch, sequence) leaves, in a row (``flash_attn/bert_padding.py``)."""
    every = attention_mask if unused_mask is None else attention_mask + unused_mask
    lengths, used = every.sum(-1, dtype=torch.int32), attention_mask.sum(-1, dtype=torch.int32)
    indices = torch.nonzero(every.flatten(), as_tuple=False).flatten()
    offsets = torch.nn.functional.pad(lengths.cumsum(0, dtype=torch.int32), (1, 0))
    return hidden_states.flatten(0, 1)[indices], indices, offsets, int(lengths.max().item()), used


def pad_input(hidden_states: Any, indices: Any, batch: int, seqlen: int) -> Any:
    """The opposite."""
    out = hidden_states.new_zeros(batch * seqlen, *hidden_states.shape[1:])
    out[indices] = hidden_states
    return out.unflatten(0, (batch, seqlen))


# -- Transformer Engine, and rotary embeddings


def _sequence_first(tensors: Any) -> Any:
    return [tensor.permute(1, 2, 0, 3) for tensor in tensors]


class DotProductAttention(torch.nn.Module):
    """``transformer_engine.pytorch``'s: cuDNN's kernel from Hopper on, else FlashAttention's, as
    ``dot_product_attention/utils.py`` prefers them. Layouts ``sbhd``, ``bshd``, and ``thd`` in a row."""

    def __init__(
        self, num_attention_heads: int, kv_channels: Any, num_gqa_groups: int | None = None,
        attention_dropout: float = 0.0, qkv_format: str = "sbhd", attn_mask_type: str = "causal",
        window_size: Any = None, cp_group: Any = None, **options: Any,
    ) -> None:  # fmt: skip
        super().__init__()
        self.qkv_format, self.attn_mask_type, self.window_size = qkv_format, attn_mask_type, window_size
        self.set_context_parallel_group(cp_group)

    def set_context_parallel_group(self, cp_group: Any, *others: Any) -> None:
        if cp_group is not None and dist.get_world_size(cp_group) > 1:
            refuse(f"{TE}'s context parallelism", "its ring is not known; use torch's context_parallel")()

    def forward(
        self, query_layer: Any, key_layer: Any, value_layer: Any, attention_mask: Any = None,
        qkv_format: str | None = None, cu_seqlens_q: Any = None, cu_seqlens_kv: Any = None,
        attn_mask_type: str | None = None, window_size: Any = None, **options: Any,
    ) -> Any:  # fmt: skip
        stands_in(TE, "DotProductAttention")
        mask = attn_mask_type or self.attn_mask_type
        recipe = FP8GlobalStateManager.recipe
        for unknown, words in (
            (query_layer.dtype == torch.float32, "attention in float32"),
            (mask == "arbitrary", "arbitrary mask"),
            (options.get("core_attention_bias") is not None, "core_attention_bias"),
            (options.get("inference_params") is not None, "inference_params"),
            (recipe is not None and recipe.fp8_dpa, "attention in float8 (fp8_dpa)"),
        ):  # fmt: skip
            if unknown:
                refuse(f"{TE}'s {words}", "what its kernels do is not known; leave it out")()
        form = qkv_format or self.qkv_format
        operands = [t.unsqueeze(0) if form == "thd" else t for t in (query_layer, key_layer, value_layer)]
        rows, columns = (tensor.shape[0 if form == "sbhd" else 1] for tensor in operands[:2])
        lengths = [(rows, columns)]
        if form == "thd":
            lengths = list(
                zip(lengths_of(cu_seqlens_q, rows), lengths_of(cu_seqlens_kv, columns), strict=True)
            )
        half, share = share_of(
            lengths, rows, columns, "causal" in mask, window_size or self.window_size or EVERYTHING
        )
        kernel = f"{TE}.{'cudnn' if torch.cuda.get_device_capability() >= (9, 0) else 'flash'}_attention"
        views = _sequence_first if form == "sbhd" else batched
        out, _ = Attention.apply(kernel, half, share, views, *operands)
        out = (out.permute(2, 0, 1, 3) if form == "sbhd" else out.transpose(1, 2)).flatten(-2)
        return out.squeeze(0) if form == "thd" else out


class _Rotary(torch.autograd.Function):
    """``x`` turned by ``tables`` of angles, or of their cosines and sines."""

    @staticmethod
    def forward(ctx: Any, kernel: str, x: Any, *tables: Any) -> Any:
        begin()
        ctx.kernel = kernel
        ctx.save_for_backward(*tables)
        out = torch.empty_like(x)
        launch(kernel, (x, *tables), (out,))
        return out

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        tables = ctx.saved_tensors
        gradient = torch.empty_like(gradients[0])
        launch(f"{ctx.kernel}_backward", (gradients[0], *tables), (gradient,))
        return None, gradient, *(None for _ in tables)


def apply_rotary_pos_emb(t: Any, freqs: Any, tensor_format: str = "sbhd", **options: Any) -> Any:
    """Transformer Engine's, of ``t`` (sequence, batch, heads, dimension)."""
    stands_in(TE, "apply_rotary_pos_emb")
    return _Rotary.apply(f"{TE}.rotary", t, freqs)


def apply_rotary_emb(x: Any, cos: Any, sin: Any, interleaved: bool = False, **options: Any) -> Any:
    """``flash_attn.layers.rotary``'s, of ``x`` (batch, sequence, heads, dimension)."""
    stands_in("flash_attn", "apply_rotary_emb")
    return _Rotary.apply("flash_attn.rotary", x, cos, sin)


ELEMENTS = 1 << 22
"""Of a mask that are looked at, at most."""
ROWS = 8  # of each block, the first and the last among them
PLACES = 4  # in the batch and among the heads, where a mask differs between them
CAUSAL = 0.5


def install_flex(observer: Observer) -> None:
    """Flex attention: one kernel, of the work that its mask leaves.

    Compiled, PyTorch's flex attention is one kernel that passes over blocks of the scores which the mask
    leaves empty; run eagerly it would build all scores. Here it is one operator with the kernel's tensors and
    the share of blocks that are not empty. That share is found by asking the mask itself (``mask_mod``) for
    some rows of some blocks, at places that do not change. A mask that asks for values which are not on the
    host (documents of random tokens) counts as causal. What a ``score_mod`` does to a score is part of the
    kernel.

    Replace ``flex_attention`` and ``create_block_mask``. Call once, before the script runs."""
    flex: Any = module

    @replaces(flex)
    def flex_attention(
        original: Any, query: Any, key: Any, value: Any, score_mod: Any = None, block_mask: Any = None,
        scale: Any = None, enable_gqa: bool = False, return_lse: bool = False, kernel_options: Any = None, *,
        return_aux: Any = None,
    ) -> Any:  # fmt: skip
        if not query.is_cuda:
            options = {} if return_aux is None else {"return_aux": return_aux}
            return original(
                query, key, value, score_mod, block_mask, scale, enable_gqa, return_lse, kernel_options,
                **options,
            )  # fmt: skip
        if query.shape[1] != key.shape[1] and not enable_gqa:
            raise ValueError(
                "Expect query and key/value to have the same number of heads but got "
                f"Hq={query.shape[1]} and Hkv={key.shape[1]}. Try setting enable_gqa=True for GQA."
            )
        share = _share_of(block_mask, observer)
        out, lse = Attention.apply("flex.flex_attention", False, share, tuple, query, key, value)
        if return_aux is not None:
            highest = torch.empty_like(lse) if return_aux.max_scores else None
            return out, flex.AuxOutput(lse=lse if return_aux.lse else None, max_scores=highest)
        return (out, lse) if return_lse else out

    @replaces(flex)
    def create_block_mask(
        original: Any, mask_mod: Any, B: Any, H: Any, Q_LEN: int, KV_LEN: int, device: Any = None,
        BLOCK_SIZE: Any = 128, *args: Any, **options: Any,
    ) -> Any:  # fmt: skip
        device = torch.device("cuda" if device is None else device)
        if device.type != "cuda":
            return original(mask_mod, B, H, Q_LEN, KV_LEN, device, BLOCK_SIZE, *args, **options)
        rows, columns = (BLOCK_SIZE, BLOCK_SIZE) if isinstance(BLOCK_SIZE, int) else BLOCK_SIZE
        shape = (B or 1, H or 1, -(-Q_LEN // rows))
        counts = torch.empty(shape, dtype=torch.int32, device=device)
        indices = torch.empty(*shape, -(-KV_LEN // columns), dtype=torch.int32, device=device)
        return flex.BlockMask.from_kv_blocks(
            counts, indices, BLOCK_SIZE=(rows, columns), mask_mod=mask_mod, seq_lengths=(Q_LEN, KV_LEN),
            compute_q_blocks=False,
        )  # fmt: skip


def _share_of(mask: Any, observer: Observer) -> float:
    """The share of ``mask``'s blocks that are not empty, and a sentence for the report."""
    if mask is None:
        text = "flex attention without a block mask is costed as attention to everything"
        observer.note(text, NoteKind.APPROXIMATION)
        return 1.0
    share = getattr(mask, "share_of_blocks", None)
    if share is None:
        with unrecorded(observer.native), torch.no_grad():
            share = blocks_left(mask.mask_mod, mask.shape, mask.BLOCK_SIZE)
        mask.share_of_blocks = share
    rows, columns = mask.BLOCK_SIZE
    basis = f"the blocks of {rows} × {columns} that its mask leaves: {100 * share:.1f} % of them"
    if share < 0:
        basis = "a causal mask: its own depends on values that are not there"
    observer.note(f"flex attention is costed by {basis}", NoteKind.APPROXIMATION)
    return float(share if share >= 0 else CAUSAL)


def blocks_left(mask_mod: Any, shape: tuple[int, ...], block: tuple[int, int]) -> float:
    """The share of blocks in which ``mask_mod`` leaves something; -1 where its values are not known.

    ``shape``: batch, heads, queries, keys. Exact where all rows of blocks fit into `ELEMENTS`, up to holes
    between the rows that are asked of a block.
    """
    from torch._dynamo._trace_wrapped_higher_order_op import TransformGetItemToIndex

    batch, heads, queries, keys = (int(size) for size in shape)
    batches, chosen = _spread(batch, PLACES), _spread(heads, PLACES)
    each = ROWS * keys * len(batches) * len(chosen)
    rows = [
        min(queries - 1, number * block[0] + step * (block[0] - 1) // (ROWS - 1))
        for number in _spread(-(-queries // block[0]), max(PLACES, ELEMENTS // each))
        for step in range(ROWS)
    ]
    places = [torch.tensor(each).cuda() for each in (batches, chosen, rows, list(range(keys)))]
    with TransformGetItemToIndex():
        flex: Any = module
        left = flex._vmap_for_bhqkv(mask_mod, prefix=())(*places)
    left = left.expand(len(batches), len(chosen), len(rows), keys)
    if not bool((left == left).all().item()):  # what is not known is not known to be itself
        return -1.0
    padded = torch.nn.functional.pad(left.cpu(), (0, -keys % block[1]))
    blocks = padded.unflatten(-1, (-1, block[1])).any(-1).unflatten(2, (-1, ROWS)).any(3)
    return float(blocks.double().mean())


def _spread(count: int, most: int) -> list[int]:
    """Up to ``most`` of ``count`` places, evenly spread."""
    samples = min(count, most)
    return [(2 * number + 1) * count // (2 * samples) for number in range(samples)]
