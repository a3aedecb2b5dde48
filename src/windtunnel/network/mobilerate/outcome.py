"""What came of a sender on a mobile link, emulated or measured, and the link itself."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from windtunnel.traces.bandwidth import MTU


@dataclass(frozen=True)
class MobileWorld:
    """``delay``: seconds of a round trip when nothing waits; ``packets``: that the link's queue holds."""

    delay: float = 0.04
    packets: int = 500


@dataclass(frozen=True)
class MobileResult:
    """``rate``: bytes/s that passed, ``capacity``: that could have. ``mean``, ``p95``: seconds that packets
    spent in the link's queue, nan where none has passed. ``dropped``: packets that found it full."""

    rate: float
    capacity: float
    mean: float
    p95: float
    dropped: int

    @property
    def use(self) -> float:
        """The part of the capacity that was used."""
        return self.rate / self.capacity if self.capacity else 0.0

    def plain(self) -> dict[str, Any]:
        """As values of JSON, None for what is not known."""
        return {
            "rate_bytes_per_s": self.rate, "capacity_bytes_per_s": self.capacity, "use": self.use,
            "queue_mean_s": None if np.isnan(self.mean) else self.mean,
            "queue_p95_s": None if np.isnan(self.p95) else self.p95, "dropped": self.dropped,
        }  # fmt: skip


def outcome(
    waits: NDArray[np.float64] | Sequence[float],
    sent: float,
    opportunities: int,
    seconds: float,
    dropped: int,
) -> MobileResult:
    """From how long packets waited, the bytes that passed, and the opportunities that there were."""
    wait_seconds = np.asarray(waits, np.float64)
    mean, p95 = (
        (float(wait_seconds.mean()), float(np.quantile(wait_seconds, 0.95)))
        if len(wait_seconds)
        else (np.nan, np.nan)
    )
    return MobileResult(sent / seconds, opportunities * MTU / seconds, mean, p95, dropped)
