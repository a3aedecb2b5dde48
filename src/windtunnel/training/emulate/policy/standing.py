"""Which captured rank stands for each rank of the world, and for which ranks only by guess."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from windtunnel.training.emulate.policy.groups import Axes
from windtunnel.training.emulate.policy.observation import Known, Observation

Longs = NDArray[np.int64]


def stand_ins(observation: Observation, known: Known) -> tuple[Longs, Longs]:
    """For every rank the captured one that stands for it, and the ranks that play a part for which none was
    captured: there the nearest one stands in."""
    captured = np.array(sorted(observation.captured), np.int64)
    stands = _corners(observation, known)
    stands[captured] = captured
    unknown = np.flatnonzero(~np.isin(stands, captured))
    doubtful = unknown[:0]
    if len(unknown):
        stands[unknown], other_part = _nearest(observation.axes, observation.world_size, unknown, captured)
        doubtful = unknown[other_part]
    for rank, other in known.alike.items():
        stands[rank] = other
    return stands, doubtful


def _corners(observation: Observation, known: Known) -> Longs:
    """For every rank the one at the first corner of its cell, or itself."""
    if known.starts is None:
        return np.arange(observation.world_size)
    axes = observation.axes
    starts = [np.array(places) for places in known.starts]
    cell = np.zeros(observation.world_size, np.int64)
    for axis, places in zip(axes.axes, starts, strict=True):
        segment = np.searchsorted(places, axis.index, side="right") - 1
        cell = cell * len(places) + segment
    _, first, inverse = np.unique(cell, return_index=True, return_inverse=True)
    corners = []
    for rank in first.tolist():
        point = tuple(
            int(places[np.searchsorted(places, i, side="right") - 1])
            for places, i in zip(starts, axes.point(rank), strict=True)
        )
        corners.append(axes.rank(point))
    return np.array(corners, np.int64)[inverse]


def _nearest(
    axes: Axes, world_size: int, unknown: Longs, captured: Longs
) -> tuple[Longs, np.ndarray[Any, np.dtype[np.bool_]]]:
    """For each unknown rank the nearest captured one, and whether that one plays another part."""
    distance = np.zeros((len(unknown), len(captured)), np.int64)
    other_part = np.zeros(distance.shape, np.bool_)
    for axis in axes.axes:
        apart = np.abs(axis.index[unknown][:, None] - axis.index[captured][None, :])
        distance += apart * (world_size if axis.positional else 1)
        if axis.positional:
            other_part |= apart > 0
    nearest = np.argmin(distance, axis=1)
    return captured[nearest], other_part[np.arange(len(unknown)), nearest]
