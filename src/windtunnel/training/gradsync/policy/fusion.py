"""Which neighbouring gradients to synchronise as one, so that fixed costs are shared and overlap is kept.

Each group costs ``encode.fixed + encode.rate * numel`` on the device that also runs backward, then
``send.fixed + send.rate * numel`` on the network. When y groups end at gradient i, the device is done at

    device(i, y) = forward + backward of all up to i + y * encode.fixed + encode.rate * elements up to i

wherever the cuts are, since the cost of encoding is affine. So only the end of the network's work needs to be
minimised over the last cut, which makes the optimum a dynamic programme of O(n^2 y):

    network(i, y) = min over j < i of  max(network(j, y-1), device(i, y)) + send(j, i)

The problem is Cupcake's (MLSys '23); this exact algorithm for it is our own, held against all partitions in
the tests.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from windtunnel.base.compiled import jit

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]
FIRST = 2**18
"""Elements of DDP's first bucket: 1 MiB of float32."""


class Affine(NamedTuple):
    """``fixed`` seconds a group and ``rate`` seconds an element."""

    fixed: float
    rate: float


def best_cuts(
    backward: Sequence[float], numels: Sequence[int], encode: Affine, send: Affine, forward: float = 0.0
) -> tuple[float, list[int]]:
    """Seconds until the device and the network are done, and where the groups end: positions, ascending, the
    last is ``len(numels)``."""
    computed = forward + np.concatenate([[0.0], np.cumsum(np.asarray(backward, float))])
    elements = np.concatenate([[0.0], np.cumsum(np.asarray(numels, float))])
    seconds, most, last = _programme(computed, elements, *encode, *send)
    cuts = []
    at, groups = len(numels), int(most)
    while at > 0:
        cuts.append(at)
        at = int(last[groups, at])
        groups -= 1
    return float(seconds), cuts[::-1]


@jit
def _programme(
    computed: Floats, elements: Floats, encode: float, encode_rate: float, send: float, send_rate: float
) -> tuple[float, int, Ints]:
    """``last[y, i]``: the last cut before i of the best way to make y groups of the first i."""
    n = len(computed) - 1
    last = np.zeros((n + 1, n + 1), np.int64)
    before = np.full(n + 1, np.inf)
    before[0] = 0.0
    best, best_groups = np.inf, 1
    for groups in range(1, n + 1):
        # what so many groups take at least grows with them: no better end is possible from here on
        first = computed[1] + encode + encode_rate * elements[1]
        sent = first + groups * send + send_rate * elements[n]
        if max(sent, computed[n] + groups * encode + encode_rate * elements[n]) >= best:
            break
        now = np.full(n + 1, np.inf)
        for i in range(groups, n + 1):
            device = computed[i] + groups * encode + encode_rate * elements[i]
            for j in range(i - 1, groups - 2, -1):
                end = max(before[j], device) + send + send_rate * (elements[i] - elements[j])
                if end < now[i]:
                    now[i] = end
                    last[groups, i] = j
                if before[j] <= device:  # an earlier cut begins no sooner and has more to send
                    break
        device = computed[n] + groups * encode + encode_rate * elements[n]
        if max(now[n], device) < best:
            best, best_groups = max(now[n], device), groups
        before = now
    return best, best_groups, last


def even_cuts(numels: Sequence[int], most: float) -> list[int]:
    """As DDP fills its buckets: each ends with the gradient by which it has ``most`` elements, the first, so
    that sending begins early, with `FIRST`."""
    cuts: list[int] = []
    filled = 0.0
    for i, numel in enumerate(numels):
        filled += numel
        if filled >= (most if cuts else min(FIRST, most)):
            cuts.append(i + 1)
            filled = 0.0
    return cuts if len(numels) in (0, *cuts[-1:]) else [*cuts, len(numels)]
