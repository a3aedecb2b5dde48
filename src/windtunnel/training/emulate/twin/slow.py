"""What is slower than it should be: ``--slow host=3:1.3``, ``rank=17:1.5``, ``link=host3:4``.

``host=H:F``: the devices and the host threads of host H take F times as long.
``rank=R:F``: the device of rank R takes F times as long.
``link=hostH:F``, or ``nic=H:F``: the NICs of host H have 1/F of their bandwidth, so that every collective or
message which leaves or enters that host takes F times as long.
"""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from windtunnel.base.errors import UserError
from windtunnel.cluster.model import Cluster

Floats = NDArray[np.float64]

_FORM = re.compile(r"(host|rank|link|nic)=(?:host)?(\d+):([0-9.eE+-]+)")
_ACCEPTED = "accepted are host=3:1.3, rank=17:1.5, link=host3:4 or nic=3:4"


@dataclass(frozen=True)
class Slow:
    """``what`` number ``index`` is ``factor`` times slower."""

    what: Literal["host", "rank", "link"]
    index: int
    factor: float


def parse_slow(text: str, cluster: Cluster) -> list[Slow]:
    """Read the value of ``--slow``: one or more forms, separated by commas.

    Raises `UserError` for another form, a host or rank that the cluster has not, or a factor that is not a
    finite number greater than zero.
    """
    found = []
    for part in filter(None, (part.strip() for part in text.split(","))):
        match = _FORM.fullmatch(part)
        if not match or (match[1] == "rank" and "=host" in part):
            raise UserError(f"--slow: {part!r} is not understood; {_ACCEPTED}")
        what, index = match[1].replace("nic", "link"), int(match[2])
        last = (cluster.world_size if what == "rank" else cluster.hosts) - 1
        if index > last:
            kind = "rank" if what == "rank" else "host"
            raise UserError(f"--slow: {part!r} names {kind} {index}, cluster {cluster.name} has 0 to {last}")
        try:
            factor = float(match[3])
        except ValueError:
            factor = math.nan
        if not (0 < factor < math.inf):
            raise UserError(f"--slow: {match[3]!r} in {part!r} is no factor; accepted is a number above 0")
        found.append(Slow(what, index, factor))  # type: ignore[arg-type]
    return found


@dataclass(frozen=True)
class Slowness:
    """Factors on time: ``compute[rank]`` of the device, ``host[rank]`` of the host thread, ``link[host]``."""

    compute: Floats
    host: Floats
    link: Floats


def slowness(slow: Sequence[Slow], cluster: Cluster, world_size: int) -> Slowness:
    """The factors of a world that fills the first ``world_size`` devices; several on one thing multiply."""
    host_of = np.arange(world_size) // cluster.devices_per_host
    compute, host = np.ones(world_size), np.ones(world_size)
    link = np.ones(max(cluster.hosts, int(host_of.max(initial=0)) + 1))
    for one in slow:
        if one.what == "link":
            link[one.index] *= one.factor
            continue
        ranks = np.arange(world_size) == one.index if one.what == "rank" else host_of == one.index
        compute[ranks] *= one.factor
        if one.what == "host":
            host[ranks] *= one.factor
    return Slowness(compute, host, link)
