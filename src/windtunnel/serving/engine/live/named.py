"""Models by name: built at random, of a size that fits a test, a bench or a host with a few cores."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from windtunnel.base.errors import UserError
from windtunnel.serving.engine.live import families
from windtunnel.serving.engine.live.executor import Executor

VOCABULARY = 259
"""Of models built by name: all bytes, and three special tokens (`tokens.ByteTokens`)."""
_SMALL = {"hidden_size": 384, "intermediate_size": 1536, "num_hidden_layers": 8, "num_attention_heads": 6}
_BASE = {"hidden_size": 768, "intermediate_size": 3072, "num_hidden_layers": 11, "num_attention_heads": 12}
SIZES: dict[str, tuple[str, dict[str, Any]]] = {
    "tiny-attention": ("llama", {}),
    "tiny-hybrid": ("bamba", {}),
    "small-attention": ("qwen3", {**_SMALL, "head_dim": 64, "num_key_value_heads": 6}),
    "base-attention": ("qwen3", {**_BASE, "head_dim": 64, "num_key_value_heads": 12}),
}
"""``small`` has some 20 million parameters, ``base`` some 105."""


def load(source: str, device: str = "cpu", seed: int = 0) -> Executor:
    """As `families.load`, and of the names of `SIZES` too; tiny models of a family know all bytes."""
    family, fields = SIZES.get(source, (source.removeprefix("tiny-"), {}))
    if Path(source).exists():
        return families.load(source, device, seed)
    if source not in SIZES and (not source.startswith("tiny-") or family not in families.TINY):
        known = (*SIZES, *(f"tiny-{name}" for name in families.TINY))
        raise UserError(f"serve: {source} is no directory, no config.json, and none of {', '.join(known)}")
    model = families.build(families.tiny(family, vocab_size=VOCABULARY, **fields), seed, device)
    return Executor(model, families.check(model))
