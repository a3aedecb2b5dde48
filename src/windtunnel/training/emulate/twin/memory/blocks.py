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

# These functions are called only from compiled code: without the wrappers for Python they compile in half the
# time. `simulate` caches the whole.
compiled = njit(no_cpython_wrapper=True, no_cfunc_wrapper=True)

_FIELDS = ("address", "size", "before", "after", "state", "row", "waits", "born")
BLOCK = np.dtype([(name, np.int64) for name in _FIELDS])
"""One block. ``before`` and ``after`` are its neighbours in the segment. ``row`` is 2 * stream + (1 when it
is of the large pool). ``waits`` counts the streams that a PENDING block waits for; ``born`` is the number of
look-ups of its pool when it became free (for its age in garbage collection)."""


class Heap(NamedTuple):
    """The allocator's state: ``blocks`` of dtype `BLOCK`; ``members[r, :filled[r]]``, the free blocks of row
    r, and in row r + rows/2 its unmapped ones; ``totals``, single numbers that are named above."""

    blocks: np.ndarray[Any, np.dtype[Any]]
    members: Int64
    filled: Int64
    totals: Int64


def new_heap(streams: int, blocks: int, limit: int) -> Heap:
    """An empty heap for ``streams`` streams, at most ``blocks`` blocks and ``limit`` bytes of memory."""
    spare = np.zeros(blocks, BLOCK)
    spare["after"] = np.arange(1, blocks + 1)  # spare blocks are chained
    # Not initialised: what is never used of it is never backed by memory.
    members = np.empty((4 * streams, blocks), np.int64)
    filled, totals = np.zeros(4 * streams, np.int64), np.zeros(TOTALS, np.int64)
    totals[LIMIT] = limit
    return Heap(spare, members, filled, totals)


@compiled
def new_block(heap: Heap, address: int, size: int, row: int, state: int) -> int:
    """Take a spare block; the caller has made sure that there is one."""
    block = heap.totals[SPARE]
    heap.totals[SPARE] = heap.blocks[block].after
    heap.totals[NODES] += 1
    heap.blocks[block].address = address
    heap.blocks[block].size = size
    heap.blocks[block].before = NONE
    heap.blocks[block].after = NONE
    heap.blocks[block].state = state
    heap.blocks[block].row = row
    heap.blocks[block].waits = 0
    return block


@compiled
def drop_block(heap: Heap, block: int) -> None:
    heap.blocks[block].after = heap.totals[SPARE]
    heap.totals[SPARE] = block
    heap.totals[NODES] -= 1


@compiled
def lower_bound(heap: Heap, row: int, size: int, address: int) -> int:
    """Where in its row the first member is that is not less than (size, address)."""
    by_size = 2 * row < heap.filled.size
    low, high = 0, heap.filled[row]
    while low < high:
        middle = (low + high) >> 1
        block = heap.members[row, middle]
        other = heap.blocks[block].size if by_size else size
        if other < size or (other == size and heap.blocks[block].address < address):
            low = middle + 1
        else:
            high = middle
    return low


@compiled
def home(heap: Heap, block: int) -> int:
    """The row whose set the block belongs to while it is FREE or UNMAPPED."""
    row = heap.blocks[block].row
    return row + (heap.filled.size // 2 if heap.blocks[block].state == UNMAPPED else 0)


@compiled
def insert(heap: Heap, block: int) -> None:
    row = home(heap, block)
    at = lower_bound(heap, row, heap.blocks[block].size, heap.blocks[block].address)
    members = heap.members[row]
    for index in range(heap.filled[row], at, -1):
        members[index] = members[index - 1]
    members[at] = block
    heap.filled[row] += 1
    heap.totals[CACHED] += 1
    heap.blocks[block].born = heap.totals[LOOKUPS + (heap.blocks[block].row & 1)]


@compiled
def remove(heap: Heap, block: int) -> None:
    row = home(heap, block)
    members = heap.members[row]
    heap.filled[row] -= 1
    heap.totals[CACHED] -= 1
    for index in range(
        lower_bound(heap, row, heap.blocks[block].size, heap.blocks[block].address), heap.filled[row]
    ):
        members[index] = members[index + 1]


@compiled
def absorb(heap: Heap, block: int, neighbour: int) -> None:
    """Merge a neighbour of the same state (FREE or UNMAPPED) into ``block``, which is not in a set."""
    if neighbour == NONE or heap.blocks[neighbour].state != heap.blocks[block].state:
        return
    remove(heap, neighbour)
    if heap.blocks[block].before == neighbour:
        heap.blocks[block].address = heap.blocks[neighbour].address
        heap.blocks[block].before = heap.blocks[neighbour].before
        if heap.blocks[block].before != NONE:
            heap.blocks[heap.blocks[block].before].after = block
    else:
        heap.blocks[block].after = heap.blocks[neighbour].after
        if heap.blocks[block].after != NONE:
            heap.blocks[heap.blocks[block].after].before = block
    heap.blocks[block].size += heap.blocks[neighbour].size
    drop_block(heap, neighbour)


@compiled
def settle(heap: Heap, block: int, state: int) -> None:
    """Make a block that is in no set FREE or UNMAPPED: merge it with its neighbours and file it."""
    heap.blocks[block].state = state
    absorb(heap, block, heap.blocks[block].before)
    absorb(heap, block, heap.blocks[block].after)
    insert(heap, block)


@compiled
def cut_front(heap: Heap, block: int, size: int, state: int) -> int:
    """Split the first ``size`` bytes off a block that is in no set; returns the new front block."""
    front = new_block(heap, heap.blocks[block].address, size, heap.blocks[block].row, state)
    heap.blocks[front].before = heap.blocks[block].before
    if heap.blocks[front].before != NONE:
        heap.blocks[heap.blocks[front].before].after = front
    heap.blocks[front].after = block
    heap.blocks[block].before = front
    heap.blocks[block].address += size
    heap.blocks[block].size -= size
    return front
