"""``torch.compile`` and flex attention: declared approximations.

Compiling for a device that is not there is not possible, so a compiled function runs eagerly while its
operators carry the number of their region. The cost model fuses neighbouring elementwise operators of a
region as the compiler would; memory is that of eager mode, an upper bound.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch

from windtunnel.training.emulate.graph import NoteKind
from windtunnel.training.emulate.live.observe import Observer


def install(observer: Observer) -> None:
    """Replace ``torch.compile`` and flex attention. Call once, before the script runs."""
    note = (
        "torch.compile runs eagerly; neighbouring elementwise operators of a compiled region are costed as "
        "one kernel"
    )
    native = observer.native

    def mark(function: Callable[..., Any]) -> Callable[..., Any]:
        observer.regions += 1
        region = observer.regions

        @functools.wraps(function)
        def inside(*args: Any, **kwargs: Any) -> Any:
            native.wt_region(region)
            try:
                return function(*args, **kwargs)
            finally:
                native.wt_region(0)

        return inside

    def compile(model: Any = None, **options: Any) -> Any:
        if model is None:
            return lambda given: compile(given, **options)
        observer.note(note, NoteKind.APPROXIMATION)
        if isinstance(model, torch.nn.Module):
            model.forward = mark(model.forward)
            return model
        return mark(model)

    def compile_module(self: torch.nn.Module, *args: Any, **options: Any) -> None:
        observer.note(note, NoteKind.APPROXIMATION)
        self.forward = mark(self.forward)  # type: ignore[method-assign]

    torch.compile = compile  # type: ignore[assignment]
    torch.nn.Module.compile = compile_module  # type: ignore[method-assign]
    _replace_flex_attention(observer)


def _replace_flex_attention(observer: Observer) -> None:
    try:
        import torch.nn.attention.flex_attention as module
    except ImportError:
        return
    flex: Any = module

    def flex_attention(
        query: Any, key: Any, value: Any, score_mod: Any = None, block_mask: Any = None, scale: Any = None,
        enable_gqa: bool = False, return_lse: bool = False, kernel_options: Any = None, **extra: Any,
    ) -> Any:  # fmt: skip
        observer.note(
            "flex_attention is costed as flash attention; a block mask counts as causal",
            NoteKind.APPROXIMATION,
        )
        if enable_gqa:
            repeat = query.shape[1] // key.shape[1]
            key, value = key.repeat_interleave(repeat, 1), value.repeat_interleave(repeat, 1)
        causal = block_mask is not None
        out, lse, *_ = torch.ops.aten._scaled_dot_product_flash_attention(
            query, key, value, 0.0, causal, False, scale=scale
        )
        return (out, lse) if return_lse else out

    def create_block_mask(
        mask_mod: Any, B: Any, H: Any, Q_LEN: int, KV_LEN: int, device: Any = "cuda", BLOCK_SIZE: Any = 128,
        **extra: Any,
    ) -> Any:  # fmt: skip
        size = BLOCK_SIZE if isinstance(BLOCK_SIZE, int) else BLOCK_SIZE[0]
        rows, columns = -(-Q_LEN // size), -(-KV_LEN // size)
        counts = torch.empty(B or 1, H or 1, rows, dtype=torch.int32, device=device)
        indices = torch.empty(B or 1, H or 1, rows, columns, dtype=torch.int32, device=device)
        return flex.BlockMask.from_kv_blocks(counts, indices, BLOCK_SIZE=size, mask_mod=mask_mod,
                                             seq_lengths=(Q_LEN, KV_LEN), compute_q_blocks=False)  # fmt: skip

    flex.flex_attention = flex_attention
    flex.create_block_mask = create_block_mask
