"""Seconds of a collective by gloo on CPU tensors.

Gloo moves host memory over TCP, step by step: a ring for all_reduce, all_gather and reduce_scatter, a
binomial tree for broadcast and the like. The model is alpha-beta a step. Where the machine was calibrated
the measured times of two ranks are interpolated between sizes, and the model only scales them to other
numbers of ranks.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from typing import TYPE_CHECKING

from windtunnel.cluster.model import Placement
from windtunnel.training.emulate.twin.costs.parameters import GlooParameters

if TYPE_CHECKING:
    from windtunnel.training.emulate.twin.costs.profile import Profile


def gloo_seconds(
    kind: str, nbytes: float, placement: Placement, profile: Profile | None, params: GlooParameters
) -> float:
    """Seconds of one collective over ``nbytes`` (`collectives` says of what) by all ranks of ``placement``.

    Measured times count only for groups inside one host. Raises `ValueError` for a kind that there is not.
    """
    bandwidth, latency = params.loopback_bandwidth, params.step_seconds
    if placement.hosts > 1 and placement.inter is not None:
        bandwidth = placement.inter_bandwidth * placement.inter.efficiency
        latency += placement.latency
    model = _model(kind, nbytes, placement.ranks, latency, bandwidth, params)
    if profile is None or placement.hosts > 1 or placement.ranks < 2:
        return model
    worlds = sorted({world for k, world, _, _ in profile.collectives if k == kind})
    if not worlds:
        return model
    nearest = min(worlds, key=lambda world: abs(math.log(world / placement.ranks)))
    points = sorted((size, s) for k, world, size, s in profile.collectives if k == kind and world == nearest)
    # The bytes that pass one link decide, not the buffer: compare at equal bytes for each step.
    scaled = model / _model(kind, nbytes, nearest, latency, bandwidth, params)
    return _between(points, nbytes) * scaled


def _model(
    kind: str, nbytes: float, ranks: int, latency: float, bandwidth: float, params: GlooParameters
) -> float:
    if ranks < 2:
        return (
            params.call_seconds
            if kind == "barrier"
            else params.call_seconds + nbytes / params.reduce_bandwidth
        )
    depth = math.ceil(math.log2(ranks))
    piece = nbytes / ranks
    add = piece / params.reduce_bandwidth
    steps, each = {
        "all_reduce": (2 * (ranks - 1), piece / bandwidth + add / 2),
        "all_gather": (ranks - 1, piece / bandwidth),
        "reduce_scatter": (ranks - 1, piece / bandwidth + add),
        "all_to_all": (ranks - 1, piece / bandwidth),
        "broadcast": (depth, nbytes / bandwidth),
        "reduce": (depth, nbytes / bandwidth + nbytes / params.reduce_bandwidth),
        "gather": (ranks - 1, piece / bandwidth),
        "scatter": (ranks - 1, piece / bandwidth),
        "barrier": (2 * depth, 0.0),
        "send": (1, nbytes / bandwidth),
        "recv": (1, nbytes / bandwidth),
    }.get(kind, (0, 0.0))
    if not steps:
        raise ValueError(f"collective {kind!r} is unknown")
    return params.call_seconds + steps * (latency + each)


def _between(points: list[tuple[int, float]], nbytes: float) -> float:
    """Seconds at ``nbytes``, linear between measured sizes and beyond the last one; at least the smallest."""
    if len(points) == 1 or nbytes <= points[0][0]:
        return points[0][1]
    sizes = [size for size, _ in points]
    at = min(max(1, bisect_left(sizes, nbytes)), len(points) - 1)
    (low, fast), (high, slow) = points[at - 1], points[at]
    return max(points[0][1], fast + (slow - fast) * (nbytes - low) / (high - low))
