"""Ways around links and nodes that failed, on wavelengths that no path which still stands uses there."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from windtunnel.base.compiled import jit
from windtunnel.network.torus.policy.assign import Occupied
from windtunnel.network.torus.policy.shape import Ints, Links

Flags = NDArray[np.bool_]
SLACK = 2
"""Hops that a way around may be longer than the shortest: fewer wavelengths, at the price of more links."""


@jit
def search(
    ends: Links, usable: Flags, source: int, destination: int, limit: int, far: Links, came: Links,
    queue: Links,
) -> None:  # fmt: skip
    """Breadth first from ``source`` over ``usable`` links, until ``destination`` (-1: to the end) or
    ``limit`` hops: hops of every node into ``far`` (-1: not reached), the link that it was reached by into
    ``came``."""
    degree = len(ends) // len(far)
    far[:] = -1
    far[source] = 0
    queue[0] = source
    first, last = 0, 1
    while first < last:
        node = queue[first]
        first += 1
        if far[node] >= limit or (destination >= 0 and far[destination] >= 0):
            break
        for link in range(node * degree, (node + 1) * degree):
            there = ends[link]
            if usable[link] and far[there] < 0:
                far[there] = far[node] + 1
                came[there] = link
                queue[last] = there
                last += 1


@jit
def shortest(ends: Links, alive: Flags, nodes: int, sources: Links, destinations: Links) -> Links:
    """Hops of the shortest way of each pair over ``alive`` links, -1 for none. Pairs come by source."""
    far, came, queue = np.empty((3, nodes), np.int32)
    hops = np.empty(len(sources), np.int32)
    for pair in range(len(sources)):
        if pair == 0 or sources[pair] != sources[pair - 1]:
            search(ends, alive, sources[pair], -1, nodes, far, came, queue)
        hops[pair] = far[destinations[pair]]
    return hops


@jit
def around(
    ends: Links, alive: Flags, nodes: int, occupied: Occupied, sources: Links, destinations: Links,
    order: Ints, limits: Links, ways: Links, hops: Ints, wavelengths: Links,
) -> bool:  # fmt: skip
    """Give each pair in ``order`` the lowest wavelength on which a way of at most ``limits[pair]`` hops is
    free, and the shortest such way: ``ways[pair, : hops[pair]]``. False where ``occupied`` has too few."""
    far, came, queue = np.empty((3, nodes), np.int32)
    degree = len(ends) // nodes
    free = np.empty(len(ends), np.bool_)
    bit_one = np.uint64(1)
    for pair in order:
        source, destination = sources[pair], destinations[pair]
        wavelengths[pair] = -1
        for wavelength in range(occupied.shape[1] * 64):
            word, bit = wavelength // 64, bit_one << np.uint64(wavelength % 64)
            open_ = False  # a way needs a free link at both ends: most wavelengths have none
            for link in range(source * degree, (source + 1) * degree):
                open_ |= alive[link] and (occupied[link, word] & bit) == 0
            if not open_:
                continue
            for link in range(len(ends)):
                free[link] = alive[link] and (occupied[link, word] & bit) == 0
            search(ends, free, source, destination, limits[pair], far, came, queue)
            if far[destination] < 0:
                continue
            node = destination
            for place in range(far[destination] - 1, -1, -1):
                link = came[node]
                ways[pair, place] = link
                occupied[link, word] |= bit
                node = link // degree
            hops[pair] = far[destination]
            wavelengths[pair] = wavelength
            break
        if wavelengths[pair] < 0:
            return False
    return True


def slots_bound(
    ends: Links, alive: Flags, nodes: int, load: Ints, count: int, sources: Links, destinations: Links
) -> int:
    """Backup wavelengths that any rerouting needs while old paths stay: what a node has to send (or receive)
    anew is more than the wavelengths that are free on the links which it has left."""
    tails = np.arange(len(ends)) // (len(ends) // nodes)
    most = 0.0
    for side, mine in ((tails, sources), (ends, destinations)):
        at = side[alive]
        links = np.bincount(at, minlength=nodes)
        free = np.bincount(at, weights=(count - load)[alive], minlength=nodes)
        short = np.bincount(mine, minlength=nodes) - free
        most = max(most, float(np.ceil(short[links > 0] / links[links > 0]).max(initial=0.0)))
    return int(most)
