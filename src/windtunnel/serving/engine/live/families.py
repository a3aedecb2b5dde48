"""Families of models that are known by name: tiny configurations of them, and the check that a family works.

A configuration is random weights in a real shape: small enough for a test, with every kind of layer that the family
has. The check compares what the executor does with the model's own plain forward pass.
"""

from __future__ import annotations

from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM

from windtunnel.base.errors import UserError

_SMALL: dict[str, Any] = {
    "vocab_size": 199,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 4096,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "initializer_range": 0.2,
}
_MOE = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32}
_MAMBA = {
    "mamba_d_state": 8,
    "mamba_d_conv": 4,
    "mamba_expand": 2,
    "mamba_n_heads": 8,
    "mamba_d_head": 16,
    "mamba_n_groups": 1,
    "mamba_chunk_size": 8,
}
_DELTA = {
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 16,
    "linear_value_head_dim": 16,
    "linear_conv_kernel_dim": 4,
    "layer_types": ["linear_attention", "full_attention"],
    "head_dim": 16,
}

# By model type: what differs from _SMALL (None: the family has no such field).
TINY: dict[str, dict[str, Any]] = {
    "llama": {},
    "qwen3": {"head_dim": 16},
    "mistral": {"sliding_window": 8},
    "gemma2": {"head_dim": 16, "sliding_window": 8, "layer_types": ["sliding_attention", "full_attention"]},
    "gemma3_text": {"head_dim": 16, "sliding_window": 8, "layer_types": ["sliding_attention", "full_attention"]},
    "gpt_neox": {},
    "opt": {"ffn_dim": 96, "word_embed_proj_dim": 64},
    "gpt_oss": {
        "head_dim": 16,
        "sliding_window": 8,
        "num_local_experts": 4,
        "num_experts_per_tok": 2,
        "layer_types": ["sliding_attention", "full_attention"],
    },
    "mixtral": {"num_local_experts": 4, "num_experts_per_tok": 2},
    "qwen3_moe": {"head_dim": 16, **_MOE},
    "bamba": {"attn_layer_indices": [1], **_MAMBA},
    "falcon_h1": {"mamba_d_ssm": 128, "head_dim": 16, **_MAMBA},
    "granitemoehybrid": {
        "layer_types": ["linear_attention", "full_attention"],
        "num_local_experts": 4,
        "num_experts_per_tok": 2,
        "shared_intermediate_size": 32,
        **_MAMBA,
    },
    "zamba2": {
        "layers_block_type": ["linear_attention", "hybrid", "hybrid"],
        "num_hidden_layers": 3,
        "mamba_d_state": 8,
        "mamba_headdim": 16,
        "n_mamba_heads": 8,
        "mamba_ngroups": 1,
        "chunk_size": 8,
        "num_mem_blocks": 1,
        "attention_head_dim": 32,
        "attention_hidden_size": 128,
        "use_mem_rope": True,
        "adapter_rank": 4,
        "num_key_value_heads": 4,
    },
    "nemotron_h": {
        "hybrid_override_pattern": "M*-",
        "head_dim": 16,
        "ssm_state_size": 8,
        "mamba_num_heads": 8,
        "mamba_head_dim": 16,
        "n_groups": 1,
        "chunk_size": 8,
    },
    "qwen3_next": {**_DELTA, **_MOE, "shared_expert_intermediate_size": 32},
    "qwen3_5_text": _DELTA,
    "lfm2": {"layer_types": ["conv", "full_attention"], "conv_L_cache": 3, "block_ff_dim": 96},
    "olmo_hybrid": {**_DELTA, "linear_num_key_heads": 4},
    "jamba": {
        "attn_layer_period": 2,
        "attn_layer_offset": 1,
        "expert_layer_period": 2,
        "num_experts": 2,
        "num_experts_per_tok": 1,
        "mamba_d_state": 8,
        "mamba_dt_rank": 4,
    },
    "mamba2": {
        "num_heads": 8,
        "head_dim": 16,
        "state_size": 8,
        "n_groups": 1,
        "chunk_size": 8,
        "num_hidden_layers": 2,
    },
}


def tiny(family: str, **other: Any) -> Any:
    """A tiny configuration of a family; ``other`` fields replace its own."""
    if family not in TINY:
        raise UserError(f"no tiny configuration of {family!r} is known, but of {', '.join(sorted(TINY))}")
    return AutoConfig.for_model(family, **{**_SMALL, **TINY[family], **other})


def build(config: Any, seed: int = 0, device: str = "cpu") -> Any:
    """A model of ``config`` with random weights, float32."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = AutoModelForCausalLM.from_config(config, dtype=torch.float32, attn_implementation="eager")
    return model.to(device).eval()
