"""A torus in numbers: its directed links, the dimension-order routes of all ordered pairs, and lower bounds.

Nodes are numbered with the last dimension fastest. A directed link is ``node * 2n + 2 * dimension`` upwards
and one more downwards. A side of 2 has one neighbour, and so one fibre and only the link upwards.

Source of routes and bounds: Wang, Pan, Ng et al., all-to-all in all-optical hypersquare torus networks, CF'16
(doi 10.1145/2903150.2903173). Its bound for unequal sides is a mean over the dimensions; `lower_bound` takes
the dimension that is loaded most, which is never less.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from windtunnel.base.errors import UserError

Ints = NDArray[np.int64]
Links = NDArray[np.int32]
MOST_HOPS = 60_000_000
"""Links of all routes together that a plan may have, which is some 1 GB while it is made."""


@dataclass(frozen=True, eq=False)
class PairRoutes:
    """Ordered pairs and the directed links that each of them takes.

    ``sources``, ``destinations``: nodes; shape (pairs,). The links of pair i are ``links[starts[i] :
    starts[i + 1]]`` in the order of the way.
    """

    sources: Links
    destinations: Links
    starts: Ints
    links: Links

    @property
    def lengths(self) -> Ints:
        """Hops of each pair."""
        return np.diff(self.starts)

    def of(self, pair: int) -> Links:
        return self.links[self.starts[pair] : self.starts[pair + 1]]

    def pair_of_hop(self) -> Ints:
        """The pair that each of ``links`` belongs to."""
        return np.repeat(np.arange(len(self.sources)), self.lengths)


def check_sides(sides: Sequence[int], where: str = "`dims`") -> tuple[int, ...]:
    """``sides`` of a torus that can be planned.

    Raises:
        UserError: none at all, a side below 2, or more routes than fit in memory.
    """
    shape = "x".join(map(str, sides))
    if not sides:
        raise UserError(f"{where}: no side is given, accepted are sizes from 2 up, such as 3x3x3")
    if any(side < 2 for side in sides):
        raise UserError(
            f"{where}: {shape} has a side of {min(sides)}, which has no links: leave it out; accepted are "
            "sizes from 2 up (a side of 2 has one fibre and needs more wavelengths than a side of 3)"
        )
    nodes = math.prod(sides)
    hops = nodes * nodes * sum(side * side // 4 / side for side in sides)
    if hops > MOST_HOPS:
        raise UserError(
            f"{where}: {shape} has {nodes:,} nodes, whose routes are {hops:,.0f} links long together, "
            f"accepted are at most {MOST_HOPS:,}"
        )
    return tuple(sides)


def nodes_of(sides: Sequence[int]) -> int:
    return math.prod(sides)


def places(sides: Sequence[int]) -> Ints:
    """Coordinates of all nodes; shape (nodes, dimensions)."""
    return np.stack(np.unravel_index(np.arange(nodes_of(sides)), tuple(sides)), axis=1)


def heads(sides: Sequence[int]) -> Links:
    """The node at the end of each directed link, -1 for the second one of a side of 2."""
    where, ends = places(sides), []
    for axis, side in enumerate(sides):
        for step in (1, -1):
            there = where.copy()
            there[:, axis] = (there[:, axis] + step) % side
            end = np.ravel_multi_index(tuple(there.T), tuple(sides))
            ends.append(end if side > 2 or step > 0 else np.full_like(end, -1))
    return np.stack(ends, axis=1).reshape(-1).astype(np.int32)


def link_between(sides: Sequence[int], tail: int, head: int) -> int | None:
    """The directed link from one node to its neighbour; None where they are no neighbours."""
    ends, degree = heads(sides), 2 * len(sides)
    matches = np.flatnonzero(ends[tail * degree : (tail + 1) * degree] == head)
    return int(tail * degree + matches[0]) if len(matches) else None


def dimension_order(sides: Sequence[int]) -> PairRoutes:
    """The route of every ordered pair: one dimension after the other, each the shorter way round.

    Half of the way round an even side goes up or down by the parity of where the path enters the dimension
    and of the coordinates that differ between the paths of one link, so that both directions are loaded
    alike.
    """
    nodes, n = nodes_of(sides), len(sides)
    index = np.arange(nodes * (nodes - 1), dtype=np.int64)
    sources, others = np.divmod(index, max(1, nodes - 1))
    destinations = others + (others >= sources)
    where = places(sides).astype(np.int32)
    begin, end = where[sources].T.copy(), where[destinations].T.copy()
    upwards, hops = [], np.empty((n, len(index)), dtype=np.int64)
    for axis, side in enumerate(sides):
        up = (end[axis] - begin[axis]) % side
        parity = (begin[: axis + 1].sum(0) + end[axis + 1 :].sum(0)) % 2
        goes_up = (2 * up < side) | ((2 * up == side) & ((parity == 0) | (side == 2)))
        hops[axis] = np.where(goes_up, up, side - up)
        upwards.append(goes_up)
    starts = np.concatenate(([0], np.cumsum(hops.sum(0))))
    links = np.empty(int(starts[-1]), dtype=np.int32)
    at, offset = sources.astype(np.int64), starts[:-1].copy()
    stride = nodes
    for axis, side in enumerate(sides):
        stride //= side
        sign = np.where(upwards[axis], 1, -1)
        for step in range(int(hops[axis].max())):
            walking = np.flatnonzero(hops[axis] > step)
            here = (begin[axis, walking] + sign[walking] * step) % side
            node = at[walking] + (here - begin[axis, walking]) * stride
            links[offset[walking] + step] = node * (2 * n) + 2 * axis + (sign[walking] < 0)
        at += (end[axis] - begin[axis]).astype(np.int64) * stride
        offset += hops[axis]
    return PairRoutes(sources.astype(np.int32), destinations.astype(np.int32), starts, links)


def lower_bound(sides: Sequence[int]) -> int:
    """Wavelengths that an all-to-all needs whatever the routes: the links of some dimension have to carry all
    distances along it, floor(d^2 / 4) for each of N / d nodes, by 2 links a node (1 where d is 2)."""
    nodes = nodes_of(sides)
    return max(-(-nodes * (side * side // 4) // (side * (2 if side > 2 else 1))) for side in sides)


def paper_bound(sides: Sequence[int]) -> float:
    """The paper's bound for sides above 2, (N / 8n)(sum of d - sum over odd d of 1 / d)."""
    odd = sum(1 / side for side in sides if side % 2)
    return nodes_of(sides) / (8 * len(sides)) * (sum(sides) - odd)


def failure_bound(n: int, links: int) -> int:
    """The paper's bound of backup wavelengths when ``links`` of one node of 3^n fail (2n isolate it).

    For odd numbers the printed numerator has the other sign, 3^n + 2 * 3^(n - (h + 1) / 2): one link would be
    taken by 5 * 3^(n-1) paths where there are 3^(n-1)."""
    if not 1 <= links < 2 * n:
        raise UserError(f"{links} failed links of a node with {2 * n}: accepted are 1 to {2 * n - 1}")
    hit = 3**n - 3 ** (n - links // 2) if links % 2 == 0 else 3**n - 2 * 3 ** (n - (links + 1) // 2)
    return -(-hit // (2 * n - links))
