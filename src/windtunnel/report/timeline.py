"""What the report draws: spans on queues, memory over time, one figure for each rank.

Plain arrays that a capability fills in; times are seconds, memory is bytes.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]
Indices = NDArray[np.int32]

KINDS = ("compute", "communication", "idle", "launch", "host")
"""Kinds of spans that the report has a colour for."""


@dataclass(frozen=True)
class Track:
    """What one queue of one rank did: n spans that do not overlap, in order.

    ``queue`` is shown to the reader (``"host"``, ``"compute"``, ``"nccl dp"``). ``start`` and ``end`` are
    seconds, ``name`` and ``kind`` index the timeline's tables; all of shape [n].
    """

    rank: int
    queue: str
    start: Floats
    end: Floats
    name: Indices
    kind: Indices

    def __len__(self) -> int:
        return len(self.start)


@dataclass(frozen=True)
class Flows:
    """Arrows from a span to another (a send to its receive): for each of m arrows the track and the span's
    place in it, at both ends; all of shape [m]."""

    from_track: Indices
    from_span: Indices
    to_track: Indices
    to_span: Indices

    def __len__(self) -> int:
        return len(self.from_track)


@dataclass(frozen=True)
class Timeline:
    """The tracks of the ranks that were chosen, those of one rank next to each other."""

    tracks: list[Track]
    names: list[str]
    kinds: list[str] = field(default_factory=lambda: list(KINDS))
    flows: Flows | None = None

    def ranks(self) -> list[int]:
        """The ranks shown, in the order of their first tracks."""
        return list(dict.fromkeys(track.rank for track in self.tracks))


@dataclass(frozen=True)
class MemoryCurve:
    """Memory of a rank class over a step; all arrays of shape [n], bytes but for ``time``.

    ``time`` ascends: seconds, or the share of the step's events that have passed (0 to 1), as ``axis`` says.
    ``by_category`` adds up to ``allocated``. ``capacity``: what the device can give.
    """

    label: str
    time: Floats
    allocated: Floats
    reserved: Floats
    by_category: dict[str, Floats]
    capacity: float
    axis: Literal["seconds", "fraction"] = "fraction"


@dataclass(frozen=True)
class HeatMap:
    """One figure for each rank: ``value`` of shape [hosts, devices per host], NaN where there is no rank.

    ``unit`` is ``"s"``, ``"bytes"``, ``"share"`` or a word that is printed after the number.
    """

    title: str
    value: Floats
    unit: str
