"""``flash_attn`` and ``xformers.ops``: their attention functions, each one kernel on the given layout.

Signatures are those of flash-attn 2.8 (``flash_attn_interface.py``) and xformers 0.0.33 (``ops/fmha``). With
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

from windtunnel.training.emulate.live.fused.kernel import Attention, note, stands_in, values_of
from windtunnel.training.emulate.live.names import refuse

EVERYTHING = (-1, -1)
PLAIN = inspect.Parameter.POSITIONAL_OR_KEYWORD
OPTIONS = {
    "dropout_p": 0.0, "softmax_scale": None, "causal": False, "window_size": EVERYTHING, "softcap": 0.0,
    "alibi_slopes": None, "deterministic": False, "return_attn_probs": False,
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
    known = values_of(offsets)
    if known is not None:
        return [end - begin for begin, end in pairwise(known)]
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


def _flash(name: str, tensors: str, offsets: str = "") -> Callable[..., Any]:
    """The function ``name`` of flash-attn: its tensors and what it is told of sequences in a row."""
    words = [*tensors.split(), *offsets.split()]
    parameters = [inspect.Parameter(word, PLAIN) for word in words]
    parameters += [inspect.Parameter(word, PLAIN, default=value) for word, value in OPTIONS.items()]
    if name == "flash_attn_varlen_func":
        parameters.append(inspect.Parameter("block_table", PLAIN, default=None))
    signature = inspect.Signature(parameters)

    def call(*args: Any, **kwargs: Any) -> Any:
        bound = signature.bind(*args, **kwargs)
        bound.apply_defaults()
        given = bound.arguments
        stands_in("flash_attn", name)
        found = [given[word] for word in tensors.split()]
        rows, columns = (t.shape[0 if offsets else 1] for t in (found[0], found[-1]))
        lengths = [(rows, columns)]
        if offsets:
            ends = [given[word] for word in offsets.split() if word.startswith("cu_")]
            sides = [lengths_of(end, n) for end, n in zip(dict.fromkeys(ends), (rows, columns), strict=False)]
            lengths = list(zip(sides[0], sides[-1], strict=True))
        half, share = share_of(lengths, rows, columns, given["causal"], given["window_size"])
        views = _in_a_row if offsets else batched
        out, lse = Attention.apply("flash_attn.flash_attention", half, share, views, *found)
        out, lse = (out[0].transpose(0, 1), lse[0]) if offsets else (out.transpose(1, 2), lse)
        return (out, lse, None) if given["return_attn_probs"] else out

    call.__name__, call.__signature__ = name, signature  # type: ignore[attr-defined]
    return call


FLASH = {
    "flash_attn_func": _flash("flash_attn_func", "q k v"),
    "flash_attn_kvpacked_func": _flash("flash_attn_kvpacked_func", "q kv"),
    "flash_attn_qkvpacked_func": _flash("flash_attn_qkvpacked_func", "qkv"),
    "flash_attn_varlen_func": _flash("flash_attn_varlen_func", "q k v", OFFSETS),
    "flash_attn_varlen_kvpacked_func": _flash("flash_attn_varlen_kvpacked_func", "q kv", OFFSETS),
    "flash_attn_varlen_qkvpacked_func": _flash(
        "flash_attn_varlen_qkvpacked_func", "qkv", "cu_seqlens max_seqlen"
    ),
    "flash_attn_with_kvcache": refuse(
        "flash_attn.flash_attn_with_kvcache", "how much of its cache is filled is not known; use the others"
    ),
}


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


# -- xformers


class AttentionBias:
    """A mask of xformers that is not made of values."""

    causal = False


class LowerTriangularMask(AttentionBias):
    causal = True


def memory_efficient_attention(
    query: Any, key: Any, value: Any, attn_bias: Any = None, p: float = 0.0, scale: Any = None, *,
    op: Any = None, output_dtype: Any = None,
) -> Any:  # fmt: skip
    """Tensors (batch, sequence, heads, dimension), without heads, or with groups before them. What it
    dispatches to: FlashAttention for half precision without a mask of values, else CUTLASS's kernel."""
    stands_in("xformers", "memory_efficient_attention")
    shape = (*query.shape[:-1], value.shape[-1])
    given = [query, key, value]
    if query.ndim == 3:
        given = [tensor.unsqueeze(2) for tensor in given]
    elif query.ndim == 5:
        given = [(t if t.stride(3) else t[:, :, :, :1]).flatten(2, 3) for t in given]  # one for a whole group
    bias = attn_bias if isinstance(attn_bias, AttentionBias) else AttentionBias()
    rows, columns = query.shape[1], key.shape[1]
    half, share = share_of([(rows, columns)], rows, columns, bias.causal, EVERYTHING)
    flash = query.dtype.itemsize == 2 and not isinstance(attn_bias, torch.Tensor)
    kernel = f"xformers.{'flash' if flash else 'efficient'}_attention"
    out, _ = Attention.apply(kernel, half, share, batched, *given)
    return out.transpose(1, 2).reshape(shape)
