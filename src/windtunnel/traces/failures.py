"""Traces of failures: when which hosts are lost, and when hosts come.

Hosts are numbered 0 .. hosts-1 and keep their number when they are replaced. Failures that have one
cause are one change: a rack takes all of its hosts at once. Times are seconds from the start of the job.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np


@dataclass(frozen=True)
class Change:
    """What happens at ``time``.

    ``lost``: hosts that fail together. ``software``: only their processes end, the hosts and what lies
    in their memory stay. ``joined``: hosts that come of their own accord (spot capacity); where a host
    that was lost is replaced, the one who reads the trace says when. ``cause``: in words.
    """

    time: float
    lost: tuple[int, ...] = ()
    joined: tuple[int, ...] = ()
    software: bool = False
    cause: str = ""


def poisson(
    hosts: int,
    mtbf: float,
    horizon: float,
    random: np.random.Generator,
    *,
    software: float = 0.0,
    domain_size: int = 1,
    domain_share: float = 0.0,
) -> tuple[Change, ...]:
    """Independent failures of a job of ``hosts``, on average one every ``mtbf`` seconds, until
    ``horizon``.

    ``software``: the part of them that leaves the host alive. ``domain_share``: the part of the others
    that takes a whole domain of ``domain_size`` consecutive hosts (a rack, a switch).
    """
    count = int(random.poisson(horizon / mtbf))
    times = np.sort(random.uniform(0.0, horizon, count))
    kinds = random.uniform(0.0, 1.0, (count, 2))
    victims = random.integers(0, hosts, count)
    changes = []
    for time, (kind, wide), victim in zip(times.tolist(), kinds.tolist(), victims.tolist(), strict=True):
        if kind < software:
            changes.append(Change(time, (victim,), software=True, cause="software"))
        elif wide < domain_share:
            first = victim - victim % domain_size
            lost = tuple(range(first, min(first + domain_size, hosts)))
            changes.append(Change(time, lost, cause="domain"))
        else:
            changes.append(Change(time, (victim,), cause="host"))
    return tuple(changes)


def regular(hosts: int, every: float, removals: int, order: Sequence[int] = ()) -> tuple[Change, ...]:
    """One host lost every ``every`` seconds, ``removals`` of them, none replaced (Oobleck, section 7.2).

    ``order``: which hosts, else the last ones first.
    """
    victims = order or [hosts - 1 - index for index in range(removals)]
    return tuple(Change(every * (index + 1), (victims[index],), cause="host") for index in range(removals))
