"""Bytes and FLOPs by hand, from configs as Transformers writes them."""

from __future__ import annotations

from typing import Any

import pytest

from windtunnel.base.errors import UserError
from windtunnel.serving.prefixcache.policy.shapes import ModelShape, layers, paper_hybrid, shape

LLAMA = {
    "model_type": "llama", "hidden_size": 64, "num_hidden_layers": 3, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 16, "intermediate_size": 96,
}  # fmt: skip
MAMBA2: dict[str, Any] = {
    "hidden_size": 64, "mamba_n_heads": 8, "mamba_d_head": 16, "mamba_d_state": 32, "mamba_d_conv": 4,
    "mamba_n_groups": 1, "num_attention_heads": 4, "num_key_value_heads": 4, "intermediate_size": 96,
}  # fmt: skip
STATE2 = 8 * 16 * 32 * 4 + (128 + 2 * 32) * 4 * 2
DELTA = {
    "model_type": "qwen3_next", "hidden_size": 64, "layer_types": ["linear_attention", "full_attention"],
    "linear_num_key_heads": 2, "linear_key_head_dim": 8, "linear_num_value_heads": 4,
    "linear_value_head_dim": 16, "linear_conv_kernel_dim": 4, "num_attention_heads": 4,
    "num_key_value_heads": 1, "head_dim": 32, "num_experts": 8, "num_experts_per_tok": 2,
    "moe_intermediate_size": 24, "shared_expert_intermediate_size": 40, "intermediate_size": 96,
}  # fmt: skip


@pytest.mark.parametrize(
    ("config", "kv", "state"),
    [
        (LLAMA, 3 * 2 * 2 * 16 * 2, 0),
        ({**MAMBA2, "model_type": "bamba", "num_hidden_layers": 4, "attn_layer_indices": [1]},
         2 * 64 * 2, 3 * STATE2),
        ({**MAMBA2, "model_type": "falcon_h1", "num_hidden_layers": 2}, 2 * 2 * 64 * 2, 2 * STATE2),
        ({**MAMBA2, "model_type": "nemotron_h", "layers_block_type": ["mamba", "mlp", "attention", "mlp"]},
         2 * 64 * 2, STATE2),
        (DELTA, 2 * 32 * 2, 4 * 16 * 8 * 4 + (2 * 16 + 64) * 4 * 2),
        ({"model_type": "jamba", "hidden_size": 64, "num_hidden_layers": 4, "attn_layer_period": 4,
          "attn_layer_offset": 2, "mamba_expand": 2, "mamba_d_state": 16, "mamba_d_conv": 4,
          "num_attention_heads": 4, "num_key_value_heads": 2, "intermediate_size": 96, "num_experts": 4,
          "num_experts_per_tok": 2, "expert_layer_period": 2, "expert_layer_offset": 1},
         2 * 2 * 16 * 2, 3 * (128 * 16 * 4 + 128 * 4 * 2)),
        ({"model_type": "lfm2", "hidden_size": 64, "layer_types": ["conv", "full_attention"],
          "conv_L_cache": 3, "num_attention_heads": 4, "intermediate_size": 96}, 2 * 64 * 2, 64 * 3 * 2),
    ],
    ids=lambda config: config.get("model_type") if isinstance(config, dict) else "",
)  # fmt: skip
def test_bytes_of_a_token_and_of_a_checkpoint(config: dict[str, Any], kv: int, state: int) -> None:
    model = shape(config)
    assert (model.kv, model.state) == (kv, state)
    assert shape({"model_type": "vision", "text_config": config}) == model
    assert shape(config, width=4, state_width=2).kv == 2 * kv


def test_flops_of_dense_and_expert_layers() -> None:
    attention, perceptron = layers(LLAMA)[:2]
    assert attention.token == 2 * (64 * 64 + 2 * 64 * 32 + 64 * 64) and attention.pair == 4 * 64
    assert perceptron.token == 2 * 3 * 64 * 96
    experts = [layer.token for layer in layers(DELTA) if not (layer.kv or layer.state)]
    assert experts == [6 * 64 * 24 * 2 + 2 * 64 * 8, 6 * 64 * 40] * 2, (
        "the active ones, a router, a shared one"
    )


def test_pairs_are_causal_and_within_the_window() -> None:
    for window in (0, 5, 100):
        model = ModelShape(0, 0, 0.0, ((window, 2.0),))
        by_hand = [2.0 * min(place + 1, window or 1000) for place in range(20)]
        assert model.flops(0, 20) == sum(by_hand)
        assert model.flops(7, 20) == sum(by_hand[7:])
    windowed = layers({**LLAMA, "sliding_window": 8})
    assert {layer.window for layer in windowed if layer.pair} == {8}


def test_the_papers_hybrid() -> None:
    """Marconi's formulas; what Transformers would hold is 102 MB a checkpoint and 65.5 KB a token."""
    hybrid = paper_hybrid()
    width, state, long = 4096, 128, 1000
    assert hybrid.kv == 4 * 4 * width
    assert hybrid.state == 24 * (2 * width * state + 2 * (2 * width + 2 * state) * 4)
    attention = 4 * (8 * long * width**2 + 4 * long**2 * width)
    recurrent = 24 * (12 * long * width**2 + 16 * long * width * state + 10 * long * width)
    assert hybrid.flops(0, long) == attention + recurrent + 28 * 16 * long * width**2
    assert paper_hybrid(expand=2, state_width=4).state == 102_285_312


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"hidden_size": None}, "'llama': field hidden_size: is None; accepted is a whole number"),
        ({"hidden_size": "64"}, "field hidden_size: is '64'"),
        ({"kv_lora_rank": 512}, "field kv_lora_rank: attention with latent keys is not counted here"),
        ({"layer_types": ["full_attention", "odd"]}, "layers of kind 'odd' are not counted here"),
    ],
)
def test_what_is_not_known_is_refused_by_name(change: dict[str, Any], words: str) -> None:
    with pytest.raises(UserError, match=words):
        shape({**LLAMA, **change})
