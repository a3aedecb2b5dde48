"""Rules of a prefix cache as data: where states are checkpointed, how pages are cut, what is evicted first.

An attention layer's KV can be used up to any token; the state of a recurrent layer (Mamba, gated delta nets)
only at the very token where it was copied. So a cache of hybrid models decides at which depths to copy it
(``points``):

- ``branch``: where this prompt leaves what the cache knows. What several requests share (a system prompt, a
  document) ends there; the first two pay, from the third on it is used (Marconi, MLSys '25: speculative
  insertion).
- ``boundary``: the last multiple of ``block`` before the prompt's end (vLLM's align).
- ``prompt``: the prompt's end. - ``end``: after the last decoded token: the next turn goes on there.
- ``last``: the last multiple of ``block`` of all that was decoded. - ``every``: each multiple of ``block``.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

Point = Literal["branch", "boundary", "prompt", "end", "last", "every"]
Order = Literal["lru", "flops", "seglen", "density"]


@dataclass(frozen=True, slots=True)
class CacheRules:
    """``points``: where states are copied; a model without states needs none. ``block``: tokens of a page;
    ``paged``: what is kept is whole pages, each evicted by itself. ``grid``: depths are rounded down to its
    multiples, where the kernels tell states only there. ``touch``: whether a hit renews all that it used or
    only the deepest part. ``order``: what goes first: ``lru``, the one used longest ago; ``flops``, the
    lowest recency + alpha · FLOPs saved a byte (Marconi); ``seglen``, the lowest weighted recency and length
    of replay; ``density``, the fewest FLOPs saved a byte times hits to be expected a second, as counted
    meanwhile (LHD). ``alpha``: of ``flops``; ``tuned``: whether it is found by replay meanwhile. ``empty``:
    nothing is kept."""

    points: tuple[Point, ...] = ("branch", "boundary", "end")
    block: int = 16
    paged: bool = False
    grid: int = 1
    touch: Literal["deepest", "path"] = "deepest"
    order: Order = "density"
    alpha: float = 0.0
    tuned: bool = False
    empty: bool = False


def block_lru(block: int, state: Literal["every", "last"] = "last") -> CacheRules:
    """As vLLM: pages of ``block`` tokens, the least recently used one goes; the state at ``every`` page, or
    only at the ``last`` one of a prompt and of what was decoded (its align mode). Pages of hybrid models are
    as large as a state: 528 tokens for Qwen3.5-4B, 1648 for a 27B, 2048 for a small Nemotron-H."""
    points: tuple[Point, ...] = ("every",) if state == "every" else ("boundary", "last")
    return CacheRules(points, block, paged=True, touch="path", order="lru")


RULES: Mapping[str, CacheRules] = {
    "density": CacheRules(),
    "three": CacheRules(order="flops", tuned=True),
    "three-lru": CacheRules(order="lru"),
    "marconi": CacheRules(("branch", "end"), order="flops", tuned=True),
    "radix": CacheRules(("branch", "end"), touch="path", order="lru"),
    "ends": CacheRules(("prompt", "end"), touch="path", order="lru"),
    "seglen": CacheRules(order="seglen"),
    **{f"block{size}": block_lru(size) for size in (16, 528, 1648, 2048)},
    **{f"every{size}": block_lru(size, "every") for size in (32, 528)},
    "none": CacheRules((), order="lru", empty=True),
}
"""``density``: ours, three points and counted densities; ``three``: with Marconi's order. ``marconi``: the
paper's two points. ``radix``: as SGLang's hybrid cache, for a model without states its radix cache. ``ends``:
a state at the end of each prompt and answer."""
