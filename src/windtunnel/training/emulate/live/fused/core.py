"""``transformer_engine.pytorch.DotProductAttention``, and rotary embeddings as single kernels."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist

from windtunnel.training.emulate.live.fused.attention import EVERYTHING, batched, lengths_of, share_of
from windtunnel.training.emulate.live.fused.kernel import Attention, begin, launch, stands_in
from windtunnel.training.emulate.live.fused.layers import TE, TransformerEngineBaseModule
from windtunnel.training.emulate.live.names import refuse


def _sequence_first(tensors: Any) -> Any:
    return [tensor.permute(1, 2, 0, 3) for tensor in tensors]


class DotProductAttention(TransformerEngineBaseModule):
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
        if query_layer.dtype == torch.float32:
            refuse(f"{TE}'s attention in float32", "no kernel of it is fused; use bfloat16")()
        form = qkv_format or self.qkv_format
        given = [t.unsqueeze(0) if form == "thd" else t for t in (query_layer, key_layer, value_layer)]
        rows, columns = (tensor.shape[0 if form == "sbhd" else 1] for tensor in given[:2])
        lengths = [(rows, columns)]
        if form == "thd":
            lengths = list(
                zip(lengths_of(cu_seqlens_q, rows), lengths_of(cu_seqlens_kv, columns), strict=True)
            )
        causal = "causal" in (attn_mask_type or self.attn_mask_type)
        half, share = share_of(lengths, rows, columns, causal, window_size or self.window_size or EVERYTHING)
        kernel = f"{TE}.{'cudnn' if torch.cuda.get_device_capability() >= (9, 0) else 'flash'}_attention"
        views = _sequence_first if form == "sbhd" else batched
        out, _ = Attention.apply(kernel, half, share, views, *given)
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
        found = torch.empty_like(gradients[0])
        launch(f"{ctx.kernel}_backward", (gradients[0], *tables), (found,))
        return None, found, *(None for _ in tables)


def apply_rotary_pos_emb(t: Any, freqs: Any, tensor_format: str = "sbhd", **options: Any) -> Any:
    """Transformer Engine's, of ``t`` (sequence, batch, heads, dimension)."""
    stands_in(TE, "apply_rotary_pos_emb")
    return _Rotary.apply(f"{TE}.rotary", t, freqs)


def apply_rotary_emb(x: Any, cos: Any, sin: Any, interleaved: bool = False, **options: Any) -> Any:
    """``flash_attn.layers.rotary``'s, of ``x`` (batch, sequence, heads, dimension)."""
    stands_in("flash_attn", "apply_rotary_emb")
    return _Rotary.apply("flash_attn.rotary", x, cos, sin)
