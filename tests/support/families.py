"""A tiny configuration of each family of models that the engine is known to serve.

A configuration is random weights in a real shape: small enough for a test, with every kind of layer that the
family has.
"""

from __future__ import annotations

from collections.abc import Iterable
from collections.abc import Sequence as Ordered
from typing import Any

from torch import Tensor
from transformers import AutoConfig

from windtunnel.serving.engine.live.executor import Executor, Snapshot
from windtunnel.serving.engine.live.segments import Sequence

SMALL: dict[str, Any] = {
    "vocab_size": 199, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2,
    "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 4096, "pad_token_id": 0,
    "bos_token_id": 1, "eos_token_id": 2, "initializer_range": 0.2,
}  # fmt: skip
_HEAD = {"head_dim": 16}
_SLIDING = {**_HEAD, "sliding_window": 8, "layer_types": ["sliding_attention", "full_attention"]}
_LOCAL = {"num_local_experts": 4, "num_experts_per_tok": 2}
_MOE = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32}
_MAMBA = {
    "mamba_d_state": 8, "mamba_d_conv": 4, "mamba_expand": 2, "mamba_n_heads": 8, "mamba_d_head": 16,
    "mamba_n_groups": 1, "mamba_chunk_size": 8,
}  # fmt: skip
_LINEAR = {"layer_types": ["linear_attention", "full_attention"]}
_DELTA = {
    "linear_num_key_heads": 2, "linear_num_value_heads": 4, "linear_key_head_dim": 16,
    "linear_value_head_dim": 16, "linear_conv_kernel_dim": 4, **_LINEAR, **_HEAD,
}  # fmt: skip

# By model type: what differs from SMALL (None: the family has no such field).
TINY: dict[str, dict[str, Any]] = {
    "llama": {},
    "qwen3": _HEAD,
    "mistral": {"sliding_window": 8},
    "gemma2": {**_SLIDING, "attn_logit_softcapping": 2.0},
    "gemma3_text": _SLIDING,
    "gpt_neox": {},
    "opt": {"ffn_dim": 96, "word_embed_proj_dim": 64},
    "gpt_oss": {**_SLIDING, **_LOCAL},
    "mixtral": _LOCAL,
    "qwen3_moe": {**_HEAD, **_MOE},
    "bamba": {"attn_layer_indices": [1], **_MAMBA},
    "falcon_h1": {"mamba_d_ssm": 128, **_HEAD, **_MAMBA},
    "granitemoehybrid": {**_LINEAR, **_LOCAL, "shared_intermediate_size": 32, **_MAMBA},
    "zamba2": {
        "layers_block_type": ["linear_attention", "hybrid", "hybrid"], "num_hidden_layers": 3,
        "mamba_d_state": 8, "mamba_headdim": 16, "n_mamba_heads": 8, "mamba_ngroups": 1, "chunk_size": 8,
        "num_mem_blocks": 1, "attention_head_dim": 32, "attention_hidden_size": 128, "use_mem_rope": True,
        "adapter_rank": 4, "num_key_value_heads": 4, "initializer_range": 0.1,
    },
    "nemotron_h": {
        "hybrid_override_pattern": "M*-", **_HEAD, "ssm_state_size": 8, "mamba_num_heads": 8,
        "mamba_head_dim": 16, "n_groups": 1, "chunk_size": 8,
    },
    "qwen3_next": {**_DELTA, **_MOE, "shared_expert_intermediate_size": 32},
    "qwen3_5_text": _DELTA,
    "lfm2": {"layer_types": ["conv", "full_attention"], "conv_L_cache": 3, "block_ff_dim": 96},
    "olmo_hybrid": {**_DELTA, "linear_num_key_heads": 4},
    "mamba2": {"num_heads": 8, **_HEAD, "state_size": 8, "n_groups": 1, "chunk_size": 8},
}  # fmt: skip


def tiny(family: str, **other: Any) -> Any:
    """A tiny configuration of a family of `TINY`; ``other`` fields replace its own."""
    return AutoConfig.for_model(family, **{**SMALL, **TINY[family], **other})


class Recorded(Executor):
    """An executor that remembers ``known``: the tokens that sequences and snapshots have read."""

    def __init__(self, model: Any) -> None:
        self.known: dict[Sequence | Snapshot, list[int]] = {}
        super().__init__(model)

    def _pass(self, rows: Ordered[Sequence], tokens: Ordered[Ordered[int]], reading: bool) -> Tensor:
        logits = super()._pass(rows, tokens, reading)
        for row, more in zip(rows, tokens, strict=True):
            self.known[row] = [*self.known.get(row, ()), *more]
        return logits

    def fork(self, sequence: Sequence, count: int) -> list[Sequence]:
        forked = super().fork(sequence, count)
        self.known |= dict.fromkeys(forked, self.known[sequence])
        return forked

    def snapshot(self, sequence: Sequence) -> Snapshot:
        kept = super().snapshot(sequence)
        self.known[kept] = self.known[sequence]
        return kept

    def restore(self, snapshot: Snapshot, depth: int | None = None) -> Sequence:
        sequence = super().restore(snapshot, depth)
        self.known[sequence] = self.known[snapshot][:depth]
        return sequence


def read(
    served: Executor, sequence: Sequence, tokens: Ordered[int], depths: Iterable[int] = ()
) -> tuple[Tensor, dict[int, Snapshot]]:
    """The logits behind ``tokens``, and a snapshot at each of ``depths``, from the sequence's beginning."""
    kept, first, last = {}, sequence.depth, sequence.depth + len(tokens)
    for stop in sorted({*depths, last}):
        logits = served.prefill(sequence, tokens[sequence.depth - first : stop - first])
        if stop in depths:
            kept[stop] = served.snapshot(sequence)
    return logits, kept
