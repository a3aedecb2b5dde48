"""The blocks of the caching allocator as arrays: sorted sets of free blocks, splitting and merging.

A *block* is a range of device addresses. The blocks of one segment form a doubly linked list; splitting and
merging edit that list. Free blocks are also members of a set, one for each (stream, pool), sorted by size and
address, so that the best fit is a binary search. Blocks of expandable segments that are not backed by memory
are in a second group of sets, sorted by address alone.

All functions are compiled, and the state is a tuple of arrays (`Heap`) so that it can be handed around.
Model: ``c10/cuda/CUDACachingAllocator.cpp`` of PyTorch (``BlockPool``, ``Block``, ``try_merge_blocks``).
"""

# Compiled functions are opaque to the type checker.
# mypy: disable-error-code="untyped-decorator, no-any-return"

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
from numba import njit

Int64 = np.ndarray[Any, np.dtype[np.int64]]

FREE, USED, PENDING, UNMAPPED = 0, 1, 2, 3  # PENDING: freed by the host, still in use on another stream

# Places in `Heap.totals`. REFUSED: reserved bytes when the device first had too little.
RESERVED, ALLOCATED, NEXT_ADDRESS, LIMIT, SPARE, NODES, CACHED, LAUNCHES, FIRST, LAST, REFUSED, LOOKUPS = (
    range(12)
)
TOTALS = 14  # LOOKUPS has one entry for each of the two pools
NONE = -1


class Heap(NamedTuple):
    """The allocator's state; arrays over blocks unless said otherwise.

    ``row`` of a block is 2 * stream + (1 when it belongs to the large pool). ``members[r, :filled[r]]`` are
    the free blocks of row r, and those of row r + rows/2 its unmapped ones. ``waits`` counts the streams that
    a PENDING block waits for; ``born`` is the number of look-ups of its pool when it became free (for its age
    in garbage collection). ``totals`` are single numbers, named above.
    """

    address: Int64
    size: Int64
    before: Int64
    after: Int64
    state: Int64
    row: Int64
    waits: Int64
    born: Int64
    members: np.ndarray[Any, np.dtype[np.int32]]
    filled: Int64
    totals: Int64


def new_heap(streams: int, nodes: int, limit: int) -> Heap:
    """An empty heap for ``streams`` streams, ``nodes`` blocks at most and ``limit`` bytes of memory."""
    # Uninitialised on purpose: pages of these arrays that are never used are never backed by memory.
    address, size, before, state, row, waits, born = (np.empty(nodes, np.int64) for _ in range(7))
    after = np.arange(1, nodes + 1)  # spare blocks are chained through it
    members = np.empty((4 * streams, nodes), np.int32)
    filled, totals = np.zeros(4 * streams, np.int64), np.zeros(TOTALS, np.int64)
    totals[LIMIT] = limit
    return Heap(address, size, before, after, state, row, waits, born, members, filled, totals)


@njit(cache=True)
def new_block(heap: Heap, address: int, size: int, row: int, state: int) -> int:
    """Take a spare block; the caller has made sure that there is one."""
    block = heap.totals[SPARE]
    heap.totals[SPARE] = heap.after[block]
    heap.totals[NODES] += 1
    heap.address[block] = address
    heap.size[block] = size
    heap.before[block] = NONE
    heap.after[block] = NONE
    heap.state[block] = state
    heap.row[block] = row
    heap.waits[block] = 0
    return block


@njit(cache=True)
def drop_block(heap: Heap, block: int) -> None:
    heap.after[block] = heap.totals[SPARE]
    heap.totals[SPARE] = block
    heap.totals[NODES] -= 1


@njit(cache=True)
def lower_bound(heap: Heap, row: int, size: int, address: int) -> int:
    """Where in its row the first member is that is not less than (size, address)."""
    by_size = 2 * row < heap.filled.size
    low, high = 0, heap.filled[row]
    while low < high:
        middle = (low + high) >> 1
        block = heap.members[row, middle]
        other = heap.size[block] if by_size else size
        if other < size or (other == size and heap.address[block] < address):
            low = middle + 1
        else:
            high = middle
    return low


@njit(cache=True)
def home(heap: Heap, block: int) -> int:
    """The row whose set the block belongs to while it is FREE or UNMAPPED."""
    row = heap.row[block]
    return row + (heap.filled.size // 2 if heap.state[block] == UNMAPPED else 0)


@njit(cache=True)
def insert(heap: Heap, block: int) -> None:
    row = home(heap, block)
    at = lower_bound(heap, row, heap.size[block], heap.address[block])
    members = heap.members[row]
    for index in range(heap.filled[row], at, -1):
        members[index] = members[index - 1]
    members[at] = block
    heap.filled[row] += 1
    heap.totals[CACHED] += 1
    heap.born[block] = heap.totals[LOOKUPS + (heap.row[block] & 1)]


@njit(cache=True)
def remove(heap: Heap, block: int) -> None:
    row = home(heap, block)
    members = heap.members[row]
    heap.filled[row] -= 1
    heap.totals[CACHED] -= 1
    for index in range(lower_bound(heap, row, heap.size[block], heap.address[block]), heap.filled[row]):
        members[index] = members[index + 1]


@njit(cache=True)
def absorb(heap: Heap, block: int, neighbour: int) -> None:
    """Merge a neighbour of the same state (FREE or UNMAPPED) into ``block``, which is not in a set."""
    if neighbour == NONE or heap.state[neighbour] != heap.state[block]:
        return
    remove(heap, neighbour)
    if heap.before[block] == neighbour:
        heap.address[block] = heap.address[neighbour]
        heap.before[block] = heap.before[neighbour]
        if heap.before[block] != NONE:
            heap.after[heap.before[block]] = block
    else:
        heap.after[block] = heap.after[neighbour]
        if heap.after[block] != NONE:
            heap.before[heap.after[block]] = block
    heap.size[block] += heap.size[neighbour]
    drop_block(heap, neighbour)


@njit(cache=True)
def settle(heap: Heap, block: int, state: int) -> None:
    """Make a block that is in no set FREE or UNMAPPED: merge it with its neighbours and file it."""
    heap.state[block] = state
    absorb(heap, block, heap.before[block])
    absorb(heap, block, heap.after[block])
    insert(heap, block)


@njit(cache=True)
def cut_front(heap: Heap, block: int, size: int, state: int) -> int:
    """Split the first ``size`` bytes off a block that is in no set; returns the new front block."""
    front = new_block(heap, heap.address[block], size, heap.row[block], state)
    heap.before[front] = heap.before[block]
    if heap.before[front] != NONE:
        heap.after[heap.before[front]] = front
    heap.after[front] = block
    heap.before[block] = front
    heap.address[block] += size
    heap.size[block] -= size
    return front
