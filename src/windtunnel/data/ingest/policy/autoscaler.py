"""The autoscaler's memory from one period to the next: the same live and in the twin."""

from __future__ import annotations

from collections.abc import Callable

from windtunnel.data.ingest.policy import (
    Decision,
    LoadHistory,
    Observation,
    PoolLoad,
    PoolSize,
    ScalingBounds,
)


class Autoscaler:
    """``target``: how many workers there should be. ``up`` and ``down``: when that changed last, in seconds
    of the caller's clock. ``log`` gets each decision of a period."""

    def __init__(
        self, settings: ScalingBounds, target: int, now: float, decide: Callable[[Observation], Decision],
        log: Callable[[float, PoolLoad, PoolSize], None] = lambda now, load, scale: None,
    ) -> None:  # fmt: skip
        self.settings, self.target, self.memory = settings, target, LoadHistory()
        self.up = self.down = now
        self._decide, self._log = decide, log

    def period(
        self, now: float, seconds: float, *, consumed: int, stalled: float, buffered: float, produced: int,
        busy: float, ready: int,
    ) -> None:  # fmt: skip
        """A period is over, in which this was seen, as of `PoolLoad`."""
        load = PoolLoad(
            self.settings, seconds, consumed, stalled, buffered, produced, busy, self.target, ready,
            now - self.up, now - self.down, self.memory,
        )  # fmt: skip
        scale = self._decide(load)
        assert isinstance(scale, PoolSize)
        self._log(now, load, scale)
        self.memory = scale.memory
        if scale.workers > self.target:
            self.up = now
        elif scale.workers < self.target:
            self.down = now
        self.target = scale.workers
