"""What the caching allocator asks of the device and gives back: whole segments, or pages of a growing range.

Without expandable segments the device hands out segments, and takes them back only whole. With them, each
(stream, pool) has one range of addresses that is backed by memory page by page (2 MiB in the small pool,
20 MiB in the large one), at the lowest addresses that are not backed.

Model: ``c10/cuda/CUDACachingAllocator.cpp`` of PyTorch 2.13; functions name their originals. Where the device
puts segments cannot be known: addresses ascend in the order of asking, which matters only for the choice
between free blocks of exactly the same size.
"""

# Compiled functions are opaque to the type checker.
# mypy: disable-error-code="untyped-decorator, no-any-return"

from __future__ import annotations

from typing import NamedTuple

from windtunnel.training.emulate.twin.memory.blocks import (
    FREE,
    LIMIT,
    LOOKUPS,
    NEXT_ADDRESS,
    NONE,
    RESERVED,
    UNMAPPED,
    Heap,
    Int64,
    compiled,
    cut_front,
    drop_block,
    insert,
    lower_bound,
    new_block,
    remove,
    settle,
)

SMALL_SEGMENT = 2 << 20
LARGE_REQUEST = 10 << 20
LARGE_ROUND = 2 << 20
UNLIMITED = 1 << 62
RANGE_BITS = 46  # address space of one expandable segment: more than any device, so that a row needs one only


class Rules(NamedTuple):
    """`AllocatorConfig` as numbers, the capacity (bytes) and the lag (kernel launches)."""

    expandable: bool
    max_split: int
    non_split_rounding: int
    large_segment: int
    collect_above: int  # bytes; 0 is never
    lag: int
    divisions: Int64


@compiled
def page_size(row: int, rules: Rules) -> int:
    return rules.large_segment if row & 1 else SMALL_SEGMENT


@compiled
def new_segment(heap: Heap, rules: Rules, row: int, size: int) -> int:
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
def extend_range(heap: Heap, rules: Rules, row: int, size: int) -> int:
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
def back_pages(heap: Heap, rules: Rules, block: int, size: int) -> bool:
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
            heap,
            heap.blocks[block].address + backed,
            heap.blocks[block].size - backed,
            heap.blocks[block].row,
            UNMAPPED,
        )
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
def give_back(heap: Heap, rules: Rules, block: int) -> None:
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
def give_back_all(heap: Heap, rules: Rules) -> None:
    """Return everything that is cached and can be returned (``release_cached_blocks``)."""
    for row in range(heap.filled.size // 2):
        for block in heap.members[row, : heap.filled[row]].copy():
            give_back(heap, rules, block)


@compiled
def give_back_oversize(heap: Heap, rules: Rules, row: int, size: int) -> bool:
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
def collect_garbage(heap: Heap, rules: Rules) -> None:
    """Above the threshold, return large segments that were not reused for longer than the average one is
    (``garbage_collect_cached_blocks``); the age of a block is in look-ups of its pool."""
    excess = heap.totals[RESERVED] - rules.collect_above
    if excess <= 0:
        return
    now = heap.totals[LOOKUPS + 1]
    age, found = 0, 0
    for row in range(1, heap.filled.size // 2, 2):
        for block in heap.members[row, : heap.filled[row]]:
            if heap.blocks[block].before == NONE and heap.blocks[block].after == NONE:
                age += now - heap.blocks[block].born
                found += 1
    progress = True
    while excess > 0 and progress and found > 0:
        oldest = age / found
        progress = False
        for row in range(1, heap.filled.size // 2, 2):
            for block in heap.members[row, : heap.filled[row]].copy():
                alone = heap.blocks[block].before == NONE and heap.blocks[block].after == NONE
                if alone and now - heap.blocks[block].born >= oldest:
                    progress = True
                    excess -= heap.blocks[block].size
                    age -= now - heap.blocks[block].born
                    found -= 1
                    give_back(heap, rules, block)
