"""The blocks of the caching allocator as arrays, and what it asks of the device and gives back.

A *block* is a range of device addresses. The blocks of one segment form a doubly linked list; splitting and
merging edit that list. Free blocks are also members of a set, one for each (stream, pool), sorted by size and
address, so that the best fit is a binary search. Blocks of expandable segments that are not backed by memory
are in a second group of sets, sorted by address alone.

Without expandable segments the device hands out segments, and takes them back only whole. With them, each
(stream, pool) has one range of addresses that is backed by memory page by page (2 MiB in the small pool,
20 MiB in the large one), at the lowest addresses that are not backed. Where the device puts segments cannot
be known: addresses ascend in the order of asking, which matters only for the choice between free blocks of
exactly the same size.

All functions are compiled, and the state is a tuple of arrays (`Heap`) so that it can be handed around.
Model: ``c10/cuda/CUDACachingAllocator.cpp`` of PyTorch 2.13 (``BlockPool``, ``Block``, ``try_merge_blocks``);
functions name their originals.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
from numba import njit

# Compiled functions are opaque to the type checker.
# mypy: disable-error-code="untyped-decorator, no-any-return"


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


# Compiled functions are opaque to the type checker.
# mypy: disable-error-code="untyped-decorator, no-any-return"


SMALL_SEGMENT = 2 << 20
LARGE_REQUEST = 10 << 20
LARGE_ROUND = 2 << 20
UNLIMITED = 1 << 62
RANGE_BITS = 46  # address space of one expandable segment: more than any device, so that a row needs one only


class AllocatorRules(NamedTuple):
    """`AllocatorConfig` as numbers, the capacity (bytes) and the lag (kernel launches)."""

    expandable: bool
    max_split: int
    non_split_rounding: int
    large_segment: int
    collect_above: int  # bytes; 0 is never
    lag: int
    divisions: Int64


@compiled
def page_size(row: int, rules: AllocatorRules) -> int:
    return rules.large_segment if row & 1 else SMALL_SEGMENT


@compiled
def new_segment(heap: Heap, rules: AllocatorRules, row: int, size: int) -> int:
    """Ask the device for memory that holds ``size`` bytes; NONE when it has not enough (``alloc_block``)."""
    if rules.expandable:
        return extend_range(heap, rules, row, size)
    if row & 1 == 0:
        segment = SMALL_SEGMENT
    elif size < LARGE_REQUEST:
        segment = rules.large_segment
    else:
        segment = (size + LARGE_ROUND - 1) // LARGE_ROUND * LARGE_ROUND
    if heap.totals[RESERVED] + segment > heap.totals[LIMIT]:
        return NONE
    heap.totals[RESERVED] += segment
    block = new_block(heap, heap.totals[NEXT_ADDRESS], segment, row, FREE)
    heap.totals[NEXT_ADDRESS] += segment
    return block


@compiled
def extend_range(heap: Heap, rules: AllocatorRules, row: int, size: int) -> int:
    """Back enough pages at the lowest address of the row's range where ``size`` bytes fit."""
    unmapped = row + heap.filled.size // 2
    if heap.filled[unmapped] == 0:
        page = page_size(row, rules)
        insert(
            heap, new_block(heap, row << RANGE_BITS, (1 << (RANGE_BITS - 1)) // page * page, row, UNMAPPED)
        )
    block = NONE
    for index in range(heap.filled[unmapped]):
        block = heap.members[unmapped, index]
        if heap.blocks[block].before != NONE and heap.blocks[heap.blocks[block].before].state == FREE:
            block = heap.blocks[block].before
        room, piece = 0, block
        while (
            room < size
            and piece != NONE
            and (heap.blocks[piece].state == FREE or heap.blocks[piece].state == UNMAPPED)
        ):
            room += heap.blocks[piece].size
            piece = heap.blocks[piece].after
        if room >= size:
            break
    if heap.blocks[block].state == UNMAPPED and not back_pages(
        heap, rules, block, min(size, heap.blocks[block].size)
    ):
        return NONE
    while heap.blocks[block].size < size:
        following = heap.blocks[block].after
        if not back_pages(
            heap, rules, following, min(size - heap.blocks[block].size, heap.blocks[following].size)
        ):
            return NONE
        block = following  # it has absorbed the block before it
    remove(heap, block)
    return block


@compiled
def back_pages(heap: Heap, rules: AllocatorRules, block: int, size: int) -> bool:
    """Back the first ``size`` bytes (whole pages) of an UNMAPPED block; False when the device is full."""
    page = page_size(heap.blocks[block].row, rules)
    backed = (size + page - 1) // page * page
    if heap.totals[RESERVED] + backed > heap.totals[LIMIT]:
        return False
    heap.totals[RESERVED] += backed
    remove(heap, block)
    if backed < heap.blocks[block].size:
        # The block itself becomes the mapped front part, because a caller holds on to it.
        rest = new_block(
            heap, heap.blocks[block].address + backed, heap.blocks[block].size - backed,
            heap.blocks[block].row, UNMAPPED,
        )  # fmt: skip
        heap.blocks[rest].before = block
        heap.blocks[rest].after = heap.blocks[block].after
        if heap.blocks[rest].after != NONE:
            heap.blocks[heap.blocks[rest].after].before = rest
        heap.blocks[block].after = rest
        heap.blocks[block].size = backed
        insert(heap, rest)
    settle(heap, block, FREE)
    return True


@compiled
def give_back(heap: Heap, rules: AllocatorRules, block: int) -> None:
    """Return a FREE block to the device: the whole segment, or the pages that lie within the block."""
    if not rules.expandable:
        if heap.blocks[block].before == NONE and heap.blocks[block].after == NONE:
            remove(heap, block)
            heap.totals[RESERVED] -= heap.blocks[block].size
            drop_block(heap, block)
        return
    page = page_size(heap.blocks[block].row, rules)
    start = heap.blocks[block].address - (heap.blocks[block].row << RANGE_BITS)
    first = (start + page - 1) // page * page
    end = (start + heap.blocks[block].size) // page * page
    if first >= end:
        return
    remove(heap, block)
    if first > start:
        insert(heap, cut_front(heap, block, first - start, FREE))
    if start + (first - start) + heap.blocks[block].size > end:
        pages = cut_front(heap, block, end - first, FREE)
        insert(heap, block)
        block = pages
    heap.totals[RESERVED] -= end - first
    settle(heap, block, UNMAPPED)


@compiled
def give_back_all(heap: Heap, rules: AllocatorRules) -> None:
    """Return everything that is cached and can be returned (``release_cached_blocks``)."""
    for row in range(heap.filled.size // 2):
        for block in heap.members[row, : heap.filled[row]].copy():
            give_back(heap, rules, block)


@compiled
def give_back_oversize(heap: Heap, rules: AllocatorRules, row: int, size: int) -> bool:
    """With a split limit: return oversize blocks, only as many as the request needs
    (``release_available_cached_blocks``)."""
    if rules.max_split == UNLIMITED or rules.expandable:
        return False
    need = max(size, rules.max_split)
    at = lower_bound(heap, row, need, -1)
    if at < heap.filled[row]:
        give_back(heap, rules, heap.members[row, at])
        return True
    returned = 0
    while returned < need and heap.filled[row] > 0:
        largest = heap.members[row, heap.filled[row] - 1]
        if heap.blocks[largest].size < rules.max_split:
            break
        returned += heap.blocks[largest].size
        give_back(heap, rules, largest)
    return returned >= need


@compiled
def collect_garbage(heap: Heap, rules: AllocatorRules) -> None:
    """Above the threshold, return large segments that were not reused for longer than the average one is
    (``garbage_collect_cached_blocks``); the age of a block is in look-ups of its pool."""
    excess = heap.totals[RESERVED] - rules.collect_above
    if excess <= 0:
        return
    now = heap.totals[LOOKUPS + 1]
    age, old = 0, 0
    for row in range(1, heap.filled.size // 2, 2):
        for block in heap.members[row, : heap.filled[row]]:
            if heap.blocks[block].before == NONE and heap.blocks[block].after == NONE:
                age += now - heap.blocks[block].born
                old += 1
    progress = True
    while excess > 0 and progress and old > 0:
        oldest = age / old
        progress = False
        for row in range(1, heap.filled.size // 2, 2):
            for block in heap.members[row, : heap.filled[row]].copy():
                alone = heap.blocks[block].before == NONE and heap.blocks[block].after == NONE
                if alone and now - heap.blocks[block].born >= oldest:
                    progress = True
                    excess -= heap.blocks[block].size
                    age -= now - heap.blocks[block].born
                    old -= 1
                    give_back(heap, rules, block)
