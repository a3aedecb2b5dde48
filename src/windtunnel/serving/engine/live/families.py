"""Models: from a directory, from a configuration or by name, and the check that one works.

The check compares what the executor does with what the model itself generates.
"""

from __future__ import annotations

from collections.abc import Sequence as Ordered
from itertools import chain
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM, GenerationConfig

from windtunnel.base.errors import UserError, WindtunnelError
from windtunnel.serving.engine.live.executor import Executor

TOLERANCE, COARSE = 1e-4, 5e-2
"""Of the largest logit, in float32 and in coarser numbers."""
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
    decode together are those of the model's own ``generate``. Raises `UserError` where one differs."""
    config = model.config.get_text_config(decoder=True)
    some = torch.Generator().manual_seed(0)
    tokens = torch.randint(3, config.vocab_size, (33,), generator=some).tolist()
    prompts = [tokens[:length] for length in (33, 20, 7)]
    own, model.generation_config = model.generation_config, GenerationConfig()  # plainly, whatever that says
    alone = [_generated(model, prompt, 4) for prompt in prompts]
    model.generation_config = own
    wanted = torch.stack([logits for _, logits in alone])
    bound = (TOLERANCE if model.dtype == torch.float32 else COARSE) * wanted.abs().max().item()
    if not wanted.isfinite().all():
        name, words = config.model_type, "what it computes are not finite numbers"
        raise UserError(f"{name} cannot be served in {_dtype(model)}: {words}")

    executor = Executor(model)
    rows = [executor.new() for _ in prompts]
    pairs = [
        ("its prefill and that of its generate", executor.prefill(row, prompt), logits[0])
        for row, prompt, logits in zip(rows, prompts, wanted, strict=True)
    ]
    for step in range(3):
        together = executor.decode(rows, [said[step] for said, _ in alone])
        for pair in zip(together, wanted[:, step + 1], strict=True):
            pairs.append(("rows that decode together and each alone", *pair))
    executor.prefill(row := executor.new(), tokens[:17])
    behind = executor.restore(executor.snapshot(row))
    kept = executor.prefill(behind, tokens[17:])
    pairs.append(("tokens behind a kept state and all at once", kept, wanted[0, 0]))
    for compared, found, each in pairs:
        if not (gap := (found - each).abs().max().item()) <= bound:
            raise UserError(f"{config.model_type} cannot be served: {compared} differ by {gap:.1e}")
    for owner in executor.sequences | executor.snapshots:
        executor.free(owner)
    return executor


def _generated(model: Any, prompt: Ordered[int], count: int) -> tuple[list[int], Tensor]:
    """What the model itself writes behind a prompt: the likeliest tokens, and the logits of each, (count,
    vocabulary)."""
    ids = torch.tensor([prompt], device=model.device)
    written = model.generate(
        ids, attention_mask=torch.ones_like(ids), do_sample=False, max_new_tokens=count, output_logits=True,
        return_dict_in_generate=True,
    )  # fmt: skip
    return written.sequences[0, len(prompt) :].tolist(), torch.cat(written.logits)


def _dtype(model: Any) -> str:
    return str(model.dtype).removeprefix("torch.")


def _line(error: Exception) -> str:
    return next(iter(str(error).splitlines()), type(error).__name__)
