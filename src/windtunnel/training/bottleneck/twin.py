"""The simulator of the NetAI paper, by its own rules, on its own data or on those of an emulated job.

Gradients arrive in the order of backward. What has arrived is sent as one bucket once 5 ms or 64 MiB have
come together, looked at when a gradient arrives; the rest is sent at the end. One all-reduce runs at a time,
as a flat ring of all workers of which each has the whole link: 2 S (N - 1) / N bytes over its bandwidth, and
N - 1 additions of S / N bytes on the device. There is no latency. Compression divides the bytes that travel.

The scaling factor is the time of an iteration alone over that time and what is left of the last all-reduce
when backward ends.

Source: Zhang et al. (NetAI 2020), section 3.1, and the published simulator and logs, which ``netai20.json``
has (their repository, Apache-2.0). The authors slept for what they simulated; here it is added up.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from importlib.resources import files
from typing import Any

import numpy as np

TIMEOUT, BUFFER = 5e-3, 64 << 20
"""Seconds and bytes after which a bucket is sent."""
WORKERS = (16, 32, 64)
BANDWIDTHS = tuple(rate * 1e9 / 8 for rate in (1, 10, 25, 40, 100))
"""Of the paper's tables, bytes/s."""
RATIOS = (1, 2, 5, 10, 50, 100)


@dataclass(frozen=True)
class Workload:
    """``batch``: seconds of an iteration on one device. ``gradients``: seconds of backward since the one
    before, and bytes, of each gradient in its order."""

    name: str
    batch: float
    gradients: tuple[tuple[float, int], ...]


@cache
def published() -> dict[str, Workload]:
    """The paper's three models on a V100 with 32 images in float32, by name."""
    models = _data()["models"]
    return {
        name: Workload(
            name, model["batch_seconds"], tuple((wait * 1e-6, size) for wait, size in model["gradients"])
        )
        for name, model in models.items()
    }


def buckets(gradients: Sequence[tuple[float, int]]) -> Iterator[tuple[float, int]]:
    """When each is sent, in seconds since backward began, and its bytes."""
    now, since, size = 0.0, 0.0, 0
    for wait, nbytes in gradients:
        now, since, size = now + wait, since + wait, size + nbytes
        if since >= TIMEOUT or size >= BUFFER:
            yield now, size
            since, size = 0.0, 0
    if size:
        yield now, size


def netai20(workload: Workload, workers: int, bandwidth: float, compression: float = 1.0) -> float:
    """The scaling factor, 0 to 1. ``bandwidth``: bytes/s of each worker's link."""
    free = 0.0  # when the link is
    share = (workers - 1) / workers
    for ready, size in buckets(workload.gradients):
        sent = 2 * size * share / bandwidth / compression
        free = max(free, ready) + sent + (workers - 1) * _addition(size / workers)
    backward = sum(wait for wait, _ in workload.gradients)
    return workload.batch / (workload.batch + max(0.0, free - backward))


def _addition(nbytes: float) -> float:
    """Seconds in which the device adds two vectors of so many bytes, between those that were measured."""
    sizes, seconds = np.array(_data()["additions"]).T
    return float(np.interp(nbytes, sizes, seconds))


@cache
def _data() -> dict[str, Any]:
    return json.loads((files(__package__) / "netai20.json").read_text())  # type: ignore[no-any-return]
