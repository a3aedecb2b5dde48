"""Wavelengths for the routes of an all-to-all, so that no two on one directed link are alike.

*Closed form* on k^n with k 2 or 3, where every hop is a single link: with x_j = p_j + q_j of a path from p to
q, its wavelength is (x_1 - x_2, x_2 - x_3, ..., x_(n-1) - x_n) mod k. On a link of dimension t all x_j but
x_t vary freely, x_t is fixed, and the kernel of the map is the span of (1, ..., 1), whose t-th entry is not
zero: so the map is one to one onto k^(n-1) wavelengths, which is the lower bound. (Ours; the paper's formula
for n = 2 is another such map.)

*Recursion* on 3^n, the paper's (CF'16): every wavelength of 3^(n-1) becomes three. The three layers use them
in turn, and of the paths that turn into dimension n the three that had one wavelength to one destination
use different ones. It shares nothing with the closed form, which is checked by it.

*GAR* on rings, the paper's greedy: nodes in order, each node's longest path first. Exactly the bound on every
odd ring tried (3 to 127). *First-fit*, longest paths of all first, is for every other shape.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from windtunnel.base.compiled import jit
from windtunnel.network.torus.policy.shape import Ints, Links, PairRoutes, lower_bound, nodes_of, places

Occupied = NDArray[np.uint64]
"""Wavelengths in use, a bit each; shape (links, words)."""


def closed_form(sides: Sequence[int], routes: PairRoutes) -> Links:
    """Wavelengths on a torus all of whose sides are 3, or all 2."""
    (side,) = set(sides)
    x = (places(sides)[routes.sources] + places(sides)[routes.destinations]).astype(np.int32)
    wavelengths = np.zeros(len(x), dtype=np.int32)
    for axis in range(len(sides) - 1):
        wavelengths = wavelengths * side + (x[:, axis] - x[:, axis + 1]) % side
    return wavelengths


def recursion(sides: Sequence[int], routes: PairRoutes) -> Links:
    """Wavelengths on 3^n by the paper's recursion."""
    table = np.zeros((3, 3), dtype=np.int32)  # of one dimension: a wavelength for all
    layer = np.arange(3)
    for n in range(2, len(sides) + 1):
        if n == 2:
            own = np.add.outer(layer, layer)  # p + q of a dimension
            table = (own[:, None, :, None] + own[None, :, None, :]).reshape(9, 9) % 3
            continue
        # which of the three sources of its wavelength a path comes from, at each destination
        turn = np.empty_like(table)
        np.put_along_axis(
            turn, np.argsort(table, axis=0, kind="stable"), np.arange(len(table))[:, None] % 3, 0
        )
        shift = (turn[:, None, :, None] + layer[None, :, None, None] + layer[None, None, None, :]) % 3
        table = (3 * table[:, None, :, None] + shift).reshape(3**n, 3**n)
    return table[routes.sources, routes.destinations].astype(np.int32)


def gar_order(nodes: int, routes: PairRoutes) -> Ints:
    """The pairs of a ring in the order of GAR: those that go up by node, those that go down from the last
    node, the longest of each node first."""
    down = routes.links[routes.starts[:-1]] % 2
    node = np.where(down == 1, nodes - 1 - routes.sources, routes.sources)
    return np.lexsort((-routes.lengths, node, down))


def longest_first(routes: PairRoutes) -> Ints:
    return np.argsort(-routes.lengths, kind="stable")


def first_fit(sides: Sequence[int], routes: PairRoutes, order: Ints) -> Links:
    """The lowest wavelength that is free on all links of its route, for each pair in ``order``."""
    words = -(-2 * lower_bound(sides) // 64)
    while True:
        occupied = np.zeros((nodes_of(sides) * 2 * len(sides), words), dtype=np.uint64)
        wavelengths = np.full(len(order), -1, dtype=np.int32)
        if fill(order, routes.starts, routes.links, occupied, wavelengths):
            return wavelengths
        words *= 2


@jit
def fill(order: Ints, starts: Ints, links: Links, occupied: Occupied, wavelengths: Links) -> bool:
    """Give each pair in ``order`` its wavelength; False where ``occupied`` has too few."""
    full = np.uint64(0xFFFFFFFFFFFFFFFF)
    for pair in order:
        free = False
        for word in range(occupied.shape[1]):
            used_bits = np.uint64(0)
            for hop in range(starts[pair], starts[pair + 1]):
                used_bits |= occupied[links[hop], word]
            if used_bits == full:
                continue
            bit = 0
            while (used_bits >> np.uint64(bit)) & np.uint64(1):
                bit += 1
            for hop in range(starts[pair], starts[pair + 1]):
                occupied[links[hop], word] |= np.uint64(1) << np.uint64(bit)
            wavelengths[pair] = word * 64 + bit
            free = True
            break
        if not free:
            return False
    return True


def occupancy(
    links: int, words: int, routes: PairRoutes, wavelengths: Links, keep: NDArray[np.bool_]
) -> Occupied:
    """What the pairs in ``keep`` use."""
    occupied = np.zeros((links, words), dtype=np.uint64)
    pair = routes.pair_of_hop()
    hop_used = keep[pair]
    colour = wavelengths[pair[hop_used]].astype(np.int64)
    bits = np.left_shift(np.uint64(1), (colour % 64).astype(np.uint64))
    np.bitwise_or.at(occupied, (routes.links[hop_used], colour // 64), bits)
    return occupied
