"""A heap of numbered items that can be moved and taken out, for kernels: what happens next, in O(log n).

``heap`` holds items in heap order, ``keys`` a record for each item that there may be. They come by priority,
then by key, then by number, so the order of equals is always the same.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from windtunnel.base.compiled import jit, jit_inline

KEY = np.dtype([("key", "f8"), ("priority", "i8"), ("place", "i8"), ("item", "i8")])
"""Of an item: ``place`` is where in the heap it is, -1 for not in it; ``item`` its number."""

Records = NDArray[Any]
Longs = NDArray[np.int64]


@jit_inline
def _before(a: Any, b: Any) -> bool:
    return a.priority < b.priority or (  # type: ignore[no-any-return]
        a.priority == b.priority and (a.key < b.key or (a.key == b.key and a.item < b.item))
    )


@jit
def put(heap: Longs, keys: Records, count: int, item: int, key: float) -> int:
    """Put ``item`` into the heap, or move it to its new key (and priority); the number of items then."""
    own = keys[item]
    place = own.place
    if place < 0:
        place = count
        count += 1
    own.key = key
    while place > 0:
        above = heap[(place - 1) // 2]
        if not _before(own, keys[above]):
            break
        heap[place] = above
        keys[above].place = place
        place = (place - 1) // 2
    while 2 * place + 1 < count:
        side = 2 * place + 1
        below = heap[side]
        if side + 1 < count and _before(keys[heap[side + 1]], keys[below]):
            side += 1
            below = heap[side]
        if not _before(keys[below], own):
            break
        heap[place] = below
        keys[below].place = place
        place = side
    heap[place] = item
    own.place = place
    return count


@jit
def take(heap: Longs, keys: Records, count: int, item: int) -> int:
    """Take ``item`` out of the heap, if it is in it; the number of items then."""
    place = keys[item].place
    if place < 0:
        return count
    keys[item].place = -1
    last = heap[count - 1]
    if last != item:
        heap[place] = last
        keys[last].place = place
        put(heap, keys, count - 1, last, keys[last].key)
    return count - 1
