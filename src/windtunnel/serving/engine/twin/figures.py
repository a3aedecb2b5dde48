"""What users of the served requests would have seen, and what it cost."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import inf
from typing import Any

import numpy as np
from numpy.typing import NDArray

from windtunnel.cluster.model import Cluster
from windtunnel.serving.engine.model import Objective
from windtunnel.serving.engine.twin.world import Results

Floats = NDArray[np.float64]
PERCENTILES = (50, 90, 95, 99)


@dataclass(frozen=True)
class RequestTimes:
    """Seconds of the requests that were finished: until the first token, for each further one, and in all;
    ``attained``: of all requests, whether it got what it was promised (who was refused did not)."""

    ttft: Floats
    tpot: Floats
    total: Floats
    attained: NDArray[np.bool_]


def compute_times(parts: Sequence[Results], promised: Objective) -> RequestTimes:
    """Of replicas that served at the same time."""
    arrival, first, end, tokens = (
        np.concatenate([getattr(part, name) for part in parts])
        for name in ("arrival", "first", "end", "tokens")
    )
    ttft, total = first - arrival, end - arrival
    tpot = np.where(tokens > 1, (end - first) / np.maximum(tokens - 1, 1), 0.0)
    over = ~np.isnan(end)
    slack = 1 + 1e-9  # what is due exactly now is not late
    attained = over & (ttft <= promised.ttft * slack) & (tpot <= promised.tpot * slack)
    return RequestTimes(ttft[over], tpot[over], total[over], attained)


def summarise(
    parts: Sequence[Results], times: RequestTimes, prompts: int, kv: int, cluster: Cluster | None
) -> dict[str, Any]:
    """Figures as values of JSON, of replicas that served at the same time. ``prompts``: tokens of all
    prompts; ``kv``: tokens for which one replica has room; ``cluster``: None where it is not known."""
    count = len(times.attained)
    begin = min((float(part.arrival[0]) for part in parts if len(part.arrival)), default=0.0)
    seconds = max((part.over for part in parts), default=0.0) - begin
    kv_used = [tokens for part in parts for tokens in part.kv_used]
    tokens = sum(int(part.tokens.sum()) for part in parts)
    each = max(seconds, 1e-12)
    result: dict[str, Any] = {
        "origin": "emulated",
        "requests": count,
        "finished": len(times.total),
        "refused": sum(int(part.refused.sum()) for part in parts),
        "never": sum(len(part.never) for part in parts),
        "seconds": seconds,
        "attainment": float(times.attained.mean()) if count else 1.0,
        "goodput": float(times.attained.sum()) / each,
        "requests_per_second": len(times.total) / each,
        "tokens_per_second": tokens / each,
        "cached": sum(int(part.cached.sum()) for part in parts) / max(1, prompts),
        "kv_tokens": kv,
        "kv_mean": sum(kv_used) / max(1, len(kv_used)) / kv,
        "kv_peak": max(kv_used, default=0) / kv,
        "steps": sum(part.steps for part in parts),
        "planned": sum(part.planned for part in parts),
        "busy": sum(part.busy for part in parts) / max(1, len(parts)) / each,
    }
    for name in ("ttft", "tpot", "total"):
        values = getattr(times, name)
        percentiles = np.percentile(values, PERCENTILES) if len(values) else [None] * len(PERCENTILES)
        result[name] = {"mean": float(values.mean()) if len(values) else None}
        result[name] |= {
            f"p{percentile}": None if at is None else float(at)
            for percentile, at in zip(PERCENTILES, percentiles, strict=True)
        }
    if cluster is not None and cluster.price_per_device_hour is not None:
        cost = cluster.price_per_device_hour * cluster.devices_per_host * cluster.hosts * seconds / 3600
        result["cost"] = {
            "total": cost, "per_thousand_met": 1e3 * cost / max(1, int(times.attained.sum())),
            "per_million_tokens": 1e6 * cost / max(1, tokens),
        }  # fmt: skip
    return result


def describe_objective(objective: Objective) -> str:
    """In words."""
    parts = [f"{name} {due:g} s" for name in ("ttft", "tpot") if (due := getattr(objective, name)) < inf]
    return ", ".join(parts) or "nothing"
