"""Models: from a directory, from a configuration or by name, and the check that one works.

The check compares what the executor does with the model's own plain forward pass.
"""

from __future__ import annotations

import inspect
from collections.abc import Sequence as Ordered
from itertools import chain
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM, DynamicCache, GenerationConfig

from windtunnel.base.errors import UserError, WindtunnelError
from windtunnel.serving.engine.live import adapter
from windtunnel.serving.engine.live.executor import Executor

TOLERANCE = {torch.float32: 1e-4}  # of the largest logit; coarser numbers get COARSE
COARSE = 5e-2

VOCABULARY = 259
"""Of models built by name: all bytes, and three special tokens (`tokens.ByteTokens`)."""
_MODEL: dict[str, Any] = {"vocab_size": VOCABULARY, "max_position_embeddings": 4096, "pad_token_id": 0,
                          "bos_token_id": 1, "eos_token_id": 2, "initializer_range": 0.2}  # fmt: skip
_TINY = {
    **_MODEL, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2,
}  # fmt: skip
_HYBRID = {
    "attn_layer_indices": [1], "mamba_d_state": 8, "mamba_d_conv": 4, "mamba_expand": 2, "mamba_n_heads": 8,
    "mamba_d_head": 16, "mamba_n_groups": 1, "mamba_chunk_size": 8,
}  # fmt: skip


def _qwen(size: int, layers: int) -> dict[str, Any]:
    heads = {"num_attention_heads": size // 64, "num_key_value_heads": size // 64, "head_dim": 64}
    sizes = {"hidden_size": size, "intermediate_size": 4 * size, "num_hidden_layers": layers}
    return {**_MODEL, **heads, **sizes}


SIZES: dict[str, tuple[str, dict[str, Any]]] = {
    "tiny-attention": ("llama", _TINY),
    "tiny-hybrid": ("bamba", {**_TINY, **_HYBRID}),
    "small-attention": ("qwen3", _qwen(384, 8)),
    "base-attention": ("qwen3", _qwen(768, 11)),
}
"""Models that are built at random: ``small`` has some 20 million parameters, ``base`` some 105."""


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
    ``seed``), or of `SIZES`. Nothing is downloaded. ``dtype``: of its weights, by which
    caches and states go; that of its config by default. Raises `UserError` in a sentence."""
    path, name = Path(source), str(source)
    try:
        if path.is_dir():
            model = _from_directory(path, dtype).to(device).eval()
        elif path.is_file():
            config = AutoConfig.from_pretrained(path, local_files_only=True)
            model = build(config, seed, device, dtype or config.dtype or torch.float32)
        elif name in SIZES:
            family, fields = SIZES[name]
            model = build(AutoConfig.for_model(family, **fields), seed, device, dtype or torch.float32)
        else:
            raise UserError(f"serve: {name} is no directory, no config.json, and none of {', '.join(SIZES)}")
    except WindtunnelError:
        raise
    except Exception as error:  # its code and its files are others'
        raise UserError(f"{name} cannot be loaded: {_line(error)}") from error
    try:
        return check(model)
    except WindtunnelError:
        raise
    except Exception as error:
        reason = f"{type(error).__name__} in its own code, {_line(error)}"
        raise UserError(f"{name} cannot be served in {_dtype(model)}: {reason}") from error


def _from_directory(path: Path, dtype: torch.dtype | None) -> Any:
    """The model whose weights lie there: all of them, where Transformers would make up what is missing."""
    model, loaded = AutoModelForCausalLM.from_pretrained(
        path, local_files_only=True, dtype=dtype or "auto", output_loading_info=True
    )
    if lacking := sorted(map(str, [*loaded["missing_keys"], *loaded["mismatched_keys"]])):
        raise UserError(f"{path} lacks {len(lacking)} weights of its model, {lacking[0]} first")
    if (path / "generation_config.json").is_file():  # Transformers leaves out one that is no JSON
        model.generation_config = GenerationConfig.from_pretrained(path, local_files_only=True)
    return model


@torch.inference_mode()
def check(model: Any) -> Executor:
    """An executor, whose prefill, tokens that go on from a kept state, and rows of different lengths that
    decode together are those of the model's plain forward pass and plain steps. Raises `UserError` where one
    differs."""
    config = model.config.get_text_config(decoder=True)
    device = next(model.parameters()).device
    some = torch.Generator().manual_seed(0)
    tokens = torch.randint(3, config.vocab_size, (36,), generator=some).tolist()
    plain = model(input_ids=torch.tensor([tokens], device=device)).logits[0]
    lengths = (33, 20, 7)
    stepped = [_steps(model, tokens, length, 3) for length in lengths]
    bound = TOLERANCE.get(plain.dtype, COARSE) * plain.abs().max().item()
    if not plain.isfinite().all():
        name, words = config.model_type, "what it computes are not finite numbers"
        raise UserError(f"{name} cannot be served in {_dtype(model)}: {words}")

    executor = Executor(model)
    rows = {executor.new(): length for length in lengths}
    pairs = [
        ("its prefill and its plain forward pass", executor.prefill(row, tokens[:length]), plain[length - 1])
        for row, length in rows.items()
    ]
    for step in range(3):
        logits = executor.decode([*rows], [tokens[length + step] for length in lengths])
        alone = (each[step] for each in stepped)
        for pair in zip(logits, alone, strict=True):
            pairs.append(("rows that decode together and each alone", *pair))
    executor.prefill(row := executor.new(), tokens[:17])
    behind = executor.restore(executor.snapshot(row))
    kept = executor.prefill(behind, tokens[17:33])
    pairs.append(("tokens behind a kept state and all at once", kept, plain[32]))
    for compared, found, wanted in pairs:
        if not (gap := (found - wanted).abs().max().item()) <= bound:
            raise UserError(f"{config.model_type} cannot be served: {compared} differ by {gap:.1e}")
    for owner in executor.sequences | executor.snapshots:
        executor.free(owner)
    return executor


def _dtype(model: Any) -> str:
    return str(model.dtype).removeprefix("torch.")


def _line(error: Exception) -> str:
    return next(iter(str(error).splitlines()), type(error).__name__)


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
