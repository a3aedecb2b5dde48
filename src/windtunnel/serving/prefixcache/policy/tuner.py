"""Marconi's alpha, found while the cache runs: the requests of a while are replayed with each, on the cache
as it was.

As the paper: nothing is tuned before the first eviction; then as many requests are kept as `TIMES` what came
before it, and replayed. Where the paper does so once, this goes on, with pauses that double.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

if TYPE_CHECKING:
    from windtunnel.serving.prefixcache.policy.tree import PrefixCache

ALPHAS = tuple(step / 10 for step in range(21))
TIMES = 5
LEAST, MOST = 32, 400
"""Requests that are replayed: fewer tell nothing, more take too long."""

Symbols = NDArray[np.int64]
Call = tuple[Symbols, float, int | None] | tuple[Symbols, tuple[int, ...], float, None]


@dataclass(frozen=True)
class CacheReplay:
    """``calls`` to a cache that was as ``start`` is; what each alpha of `ALPHAS` saves is found by `run`,
    which takes a second or more, and may do so in another process."""

    start: PrefixCache
    calls: tuple[Call, ...]

    def run(self) -> tuple[float, ...]:
        """FLOPs saved by each alpha."""
        return tuple(self._saved(alpha) for alpha in ALPHAS)

    def _saved(self, alpha: float) -> float:
        cache, saved = self.start.clone(), 0.0
        cache.alpha = alpha
        for call in self.calls:
            if len(call) == 3:
                saved += cache.shape.flops(0, cache.look(*call).depth * cache.unit)
            else:
                cache.admit(*call[:3])
        return saved


@dataclass
class Tuner:
    """What one cache has seen since its first eviction."""

    requests: int = 0
    target: int = 0
    pause: int = 0
    start: PrefixCache | None = None
    calls: list[Call] = field(default_factory=list)

    def on_lookup(self, prompt: Symbols, now: float, most: int | None) -> None:
        self.requests += 1
        if self.start is not None and self.requests <= self.target:
            self.calls.append((prompt.copy(), now, most))

    def on_admit(self, cache: PrefixCache, symbols: Symbols, copied: Sequence[int], now: float) -> None:
        if self.start is not None:
            if self.requests <= self.target:
                self.calls.append((symbols.copy(), tuple(copied), now, None))
        elif cache.evictions and self.requests >= self.pause:
            self.target = min(max(TIMES * self.requests, LEAST), MOST) if not self.target else self.target
            self.start, self.requests = cache.clone(), 0

    def due(self) -> CacheReplay | None:
        """Once: the window, when it is full."""
        if self.start is None or self.requests < self.target:
            return None
        replay = CacheReplay(self.start, tuple(self.calls))
        self.start, self.calls, self.requests = None, [], 0
        self.pause = max(2 * self.pause, 4 * self.target)
        return replay
