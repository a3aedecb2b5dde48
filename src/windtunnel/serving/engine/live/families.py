"""Families of models that are known by name: tiny configurations of them, and the check that a family works.

A configuration is random weights in a real shape: small enough for a test, with every kind of layer that the
family has. The check compares what the executor does with the model's own plain forward pass.
"""

from __future__ import annotations

import inspect
from collections.abc import Sequence as Ordered
from itertools import chain
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM, DynamicCache

from windtunnel.base.errors import UserError
from windtunnel.serving.engine.live import adapter
from windtunnel.serving.engine.live.executor import Executor, Support

TOLERANCE = {torch.float32: 1e-4}  # of the largest logit; coarser numbers get COARSE
COARSE = 5e-2

_SMALL: dict[str, Any] = {
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

# By model type: what differs from _SMALL (None: the family has no such field).
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
    "jamba": {
        "attn_layer_period": 2, "attn_layer_offset": 1, "expert_layer_period": 2, "num_experts": 2,
        "num_experts_per_tok": 1, "mamba_d_state": 8, "mamba_dt_rank": 4,
    },
    "mamba2": {"num_heads": 8, **_HEAD, "state_size": 8, "n_groups": 1, "chunk_size": 8},
}  # fmt: skip

VOCABULARY = 259
"""Of models built by name: all bytes, and three special tokens (`tokens.ByteTokens`)."""
_QWEN = {"hidden_size": 384, "intermediate_size": 1536, "num_hidden_layers": 8, "num_attention_heads": 6}
_BASE = {"hidden_size": 768, "intermediate_size": 3072, "num_hidden_layers": 11, "num_attention_heads": 12}
SIZES: dict[str, tuple[str, dict[str, Any]]] = {
    "tiny-attention": ("llama", {}),
    "tiny-hybrid": ("bamba", {}),
    "small-attention": ("qwen3", {**_QWEN, "head_dim": 64, "num_key_value_heads": 6}),
    "base-attention": ("qwen3", {**_BASE, "head_dim": 64, "num_key_value_heads": 12}),
}
"""``small`` has some 20 million parameters, ``base`` some 105."""


def tiny(family: str, **other: Any) -> Any:
    """A tiny configuration of a family of `TINY`; ``other`` fields replace its own."""
    return AutoConfig.for_model(family, **{**_SMALL, **TINY[family], **other})


def build(
    config: Any, seed: int = 0, device: str | torch.device = "cpu", dtype: torch.dtype = torch.float32
) -> Any:
    """A model of ``config`` with random weights: those that it has in float32, as ``dtype`` has them."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = AutoModelForCausalLM.from_config(config, dtype=torch.float32, attn_implementation="eager")
    for name, each in chain(model.named_parameters(), model.named_buffers()):
        if each.is_floating_point() and "inv_freq" not in name:  # positions are float32 in every model
            each.data = each.data.to(dtype)
    return model.to(device).eval()


def load(
    source: str | Path, device: str | torch.device = "cpu", seed: int = 0, dtype: torch.dtype | None = None
) -> Executor:
    """An executor over a checked model: of a directory with weights, of a ``config.json`` (random weights by
    ``seed``), of `SIZES`, or ``tiny-FAMILY``. Nothing is downloaded. ``dtype``: of its weights, by which
    caches and states go; that of its config by default. Raises `UserError` in a sentence."""
    path, name = Path(source), str(source)
    family, fields = SIZES.get(name, (name.removeprefix("tiny-"), {}))
    try:
        if path.is_dir():
            model = _from_directory(path, dtype).to(device).eval()
        elif path.is_file():
            config = AutoConfig.from_pretrained(path, local_files_only=True)
            model = build(config, seed, device, dtype or config.dtype or torch.float32)
        elif name in SIZES or (name.startswith("tiny-") and family in TINY):
            config = tiny(family, vocab_size=VOCABULARY, **fields)
            model = build(config, seed, device, dtype or torch.float32)
        else:
            known = (*SIZES, *(f"tiny-{one}" for one in TINY))
            raise UserError(f"serve: {name} is no directory, no config.json, and none of {', '.join(known)}")
    except (OSError, ValueError, RuntimeError, SafetensorError) as error:
        raise UserError(f"{name} cannot be loaded: {_line(error)}") from error
    what = f"{name} cannot be served in {str(model.dtype).removeprefix('torch.')}"
    try:
        served = Executor(model, check(model))
        finite = _tried(served)
    except (RuntimeError, ValueError, TypeError, KeyError, IndexError, AttributeError) as error:
        raise UserError(f"{what}: {type(error).__name__} in its own code, {_line(error)}") from error
    if not finite:
        raise UserError(f"{what}: what it computes are not finite numbers")
    return served


def _tried(served: Executor) -> bool:
    """Whether a token that is read and one that is decoded give numbers."""
    row = served.new()
    tensor = torch.stack([served.prefill(row, [0])[0], served.decode([row], [0])[0]])
    served.free(row)
    return bool(tensor.isfinite().all())


def _from_directory(path: Path, dtype: torch.dtype | None) -> Any:
    """The model whose weights lie there: all of them, where Transformers would make up what is missing."""
    model, found = AutoModelForCausalLM.from_pretrained(
        path, local_files_only=True, dtype=dtype or "auto", output_loading_info=True
    )
    if lacking := sorted(map(str, [*found["missing_keys"], *found["mismatched_keys"]])):
        raise UserError(f"{path} lacks {len(lacking)} weights of its model, {lacking[0]} first")
    return model


@torch.inference_mode()
def check(model: Any) -> Support:
    """What a model's family does right here: held against the plain forward pass and the plain steps of a
    tiny model of its type (of the model itself where no tiny configuration is known) are one prefill, tokens
    that go on from a kept state, and rows of different lengths that decode together. Raises `UserError` where
    the first or the last differs."""
    family = model.config.get_text_config(decoder=True).model_type
    device = next(model.parameters()).device
    subject = build(tiny(family), device=device) if family in TINY else model
    some = torch.Generator().manual_seed(0)
    tokens = torch.randint(
        3, subject.config.get_text_config(decoder=True).vocab_size, (36,), generator=some
    ).tolist()
    plain = subject(input_ids=torch.tensor([tokens], device=device)).logits[0]
    lengths = (33, 20, 7)
    stepped = [_steps(subject, tokens, length, 3) for length in lengths]
    bound = TOLERANCE.get(plain.dtype, COARSE) * plain.abs().max().item()

    executor = Executor(subject)
    rows = [executor.new() for _ in lengths]
    worst = 0.0
    for row, length in zip(rows, lengths, strict=True):
        worst = max(worst, _gap(executor.prefill(row, tokens[:length])[0], plain[length - 1]))
    if worst > bound:
        raise UserError(
            f"{family} cannot be served: its prefill differs by {worst:.1e} from its plain forward pass"
        )
    for step in range(3):
        tensor = executor.decode(rows, [tokens[length + step] for length in lengths])
        worst = max(worst, *(_gap(one, want[step]) for one, want in zip(tensor, stepped, strict=True)))
    if worst > bound:
        raise UserError(
            f"{family} cannot be served: rows that decode together differ by {worst:.1e} from each alone"
        )

    kept = executor.prefill(executor.new(), tokens[:17], keep=[17])[1][17]
    off = _gap(executor.prefill(executor.restore(kept, tokens), tokens[17:33])[0], plain[32])
    if off <= bound:
        return Support()
    return Support(
        False, f"prefix caching is off for {family}: behind a kept state logits differ by {off:.1e}"
    )


def _line(error: Exception) -> str:
    return next(iter(str(error).splitlines()), type(error).__name__)


def _gap(tensor: Tensor, other: Tensor) -> float:
    return (tensor - other).abs().max().item()


def _steps(model: Any, tokens: Ordered[int], length: int, count: int) -> list[Tensor]:
    """The logits after each of ``count`` tokens that follow the first ``length``, by the model's own
    cache."""
    cache, device = DynamicCache(config=model.config), next(model.parameters()).device
    takes = inspect.signature(type(model).forward).parameters
    ids = torch.tensor([list(tokens[: length + count])], device=device)
    at = torch.arange(length + count, device=device)[None]
    adapter.call(model, takes, ids[:, :length], at[:, :length], cache)
    return [
        adapter.call(model, takes, ids[:, t : t + 1], at[:, t : t + 1], cache)[0]
        for t in range(length, length + count)
    ]
