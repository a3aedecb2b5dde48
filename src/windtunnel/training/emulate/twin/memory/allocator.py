"""PyTorch's caching allocator for CUDA devices: how a request is served and what becomes of a freed block.

The rules of the native allocator (``c10/cuda/CUDACachingAllocator.cpp``, PyTorch 2.13):

- A request is rounded to 512 bytes. Up to 1 MiB it is served from the small pool, whose segments are of
  2 MiB; above from the large pool: 20 MiB segments for less than 10 MiB, else the request rounded to 2 MiB.
- Best fit within (stream, pool). A block is split if the rest is worth keeping. A freed block merges with its
  free neighbours. Segments are kept, never given back, until the device refuses to give another one.
- A block that was used on other streams (``record_stream``) is reusable only when these have got past the
  point of its freeing. The allocator asks the device; here there is no clock, so the answer is what is
  certain: the stream is past that point when the host has since waited for it (for the device, the stream, or
  an event or collective issued on it later), or when ``lag`` more kernels were launched, because the launch
  queue of a CUDA context holds about 1,024 and the host blocks when it is full.
"""

# Compiled functions are opaque to the type checker.
# mypy: disable-error-code="untyped-decorator, no-any-return"

from __future__ import annotations

from typing import NamedTuple

from windtunnel.training.emulate.twin.memory.blocks import (
    ALLOCATED,
    CACHED,
    FIRST,
    FREE,
    LAST,
    LAUNCHES,
    LIMIT,
    LOOKUPS,
    NODES,
    NONE,
    PENDING,
    REFUSED,
    RESERVED,
    UNMAPPED,
    USED,
    Heap,
    Int64,
    compiled,
    cut_front,
    insert,
    lower_bound,
    remove,
    settle,
)
from windtunnel.training.emulate.twin.memory.segments import (
    UNLIMITED,
    Rules,
    collect_garbage,
    give_back_all,
    give_back_oversize,
    new_segment,
)

MIN_BLOCK = 512
SMALL_REQUEST = 1 << 20


class Waiting(NamedTuple):
    """Uses of PENDING blocks on other streams, in the order of freeing; a queue from FIRST to LAST."""

    block: Int64
    stream: Int64
    launch: Int64  # how many kernels were launched when the block was freed
    event: Int64  # index of the event that freed it; -1 once the stream is known to be past it


@compiled
def round_size(size: int, divisions: Int64) -> int:
    """Bytes that a request takes, before a segment is chosen (``round_size`` in the original)."""
    if size < MIN_BLOCK:
        return MIN_BLOCK
    log, rest = 0, size
    while rest > 1:
        rest >>= 1
        log += 1
    parts = divisions[min(max(log - 20, 0), divisions.size - 1)]
    unit = MIN_BLOCK
    if parts > 1 and size > MIN_BLOCK * parts:
        unit = (1 << log) // parts
    return (size + unit - 1) // unit * unit


@compiled
def reach(heap: Heap, block: int) -> int:
    after = heap.blocks[block].after
    return heap.blocks[block].size + (
        heap.blocks[after].size if after != NONE and heap.blocks[after].state == UNMAPPED else 0
    )


@compiled
def take_cached(heap: Heap, rules: Rules, row: int, size: int) -> int:
    """Best fit among the free blocks of the row, or NONE (``get_free_block``)."""
    if rules.collect_above > 0:
        heap.totals[LOOKUPS + (row & 1)] += 1
    at = lower_bound(heap, row, size, -1)
    if at == heap.filled[row]:
        return NONE
    block = heap.members[row, at]
    if rules.expandable:
        # What counts is how far a block could grow: the last one of a range fits almost anything, so a
        # block in the middle is preferred even where it is larger today.
        while at + 1 < heap.filled[row]:
            following = heap.members[row, at + 1]
            if reach(heap, following) >= reach(heap, block):
                break
            block = following
            at += 1
    if size < rules.max_split <= heap.blocks[block].size:
        return NONE
    if size >= rules.max_split and heap.blocks[block].size >= size + rules.non_split_rounding:
        return NONE
    remove(heap, block)
    return block


@compiled
def finish(heap: Heap, waiting: Waiting, stream: int, event: int, launch: int) -> None:
    """Other streams' uses are over: those on ``stream`` (-1: any) of blocks that were freed before ``event``
    and when at most ``launch`` kernels had been launched. A block without further uses becomes free."""
    kept = heap.totals[FIRST]
    for index in range(heap.totals[FIRST], heap.totals[LAST]):
        block = waiting.block[index]
        same = stream == -1 or waiting.stream[index] == stream
        if same and waiting.event[index] < event and waiting.launch[index] <= launch:
            heap.blocks[block].waits -= 1
            if heap.blocks[block].waits == 0:
                settle(heap, block, FREE)
        else:
            waiting.block[kept] = block
            waiting.stream[kept] = waiting.stream[index]
            waiting.launch[kept] = waiting.launch[index]
            waiting.event[kept] = waiting.event[index]
            kept += 1
    heap.totals[LAST] = kept


@compiled
def allocate(heap: Heap, rules: Rules, waiting: Waiting, stream: int, size: int) -> tuple[int, bool]:
    """A USED block for ``size`` rounded bytes, and whether the device had too little for it. When it had, the
    device has no limit from then on, so that what the program would have needed is still found out."""
    while heap.totals[FIRST] < heap.totals[LAST]:
        oldest = heap.totals[FIRST]
        if waiting.launch[oldest] > heap.totals[LAUNCHES] - rules.lag:
            break
        heap.totals[FIRST] += 1
        heap.blocks[waiting.block[oldest]].waits -= 1
        if heap.blocks[waiting.block[oldest]].waits == 0:
            settle(heap, waiting.block[oldest], FREE)
    row = 2 * stream + (1 if size > SMALL_REQUEST else 0)
    out_of_memory = False
    block = take_cached(heap, rules, row, size)
    if block == NONE:
        if rules.collect_above > 0:
            collect_garbage(heap, rules)
        block = new_segment(heap, rules, row, size)
        if block == NONE and give_back_oversize(heap, rules, row, size):
            block = new_segment(heap, rules, row, size)
        if block == NONE:
            finish(heap, waiting, -1, UNLIMITED, UNLIMITED)
            give_back_all(heap, rules)
            block = new_segment(heap, rules, row, size)
        if block == NONE:
            out_of_memory = True
            heap.totals[REFUSED] = heap.totals[RESERVED]
            heap.totals[LIMIT] = UNLIMITED
            block = new_segment(heap, rules, row, size)
    rest = heap.blocks[block].size - size
    if rules.expandable or row & 1 == 0:
        split = rest >= MIN_BLOCK
    else:
        split = size < rules.max_split and rest > SMALL_REQUEST
    if split:
        front = cut_front(heap, block, size, USED)
        heap.blocks[block].state = FREE
        insert(heap, block)
        block = front
    heap.blocks[block].state = USED
    heap.totals[ALLOCATED] += heap.blocks[block].size
    return block, out_of_memory


@compiled
def release(
    heap: Heap, waiting: Waiting, block: int, event: int, uses: Int64, link: Int64, head: int
) -> None:
    """The host frees a USED block. ``head`` starts the chain (through ``link``) of its other streams."""
    heap.totals[ALLOCATED] -= heap.blocks[block].size
    if head == NONE:
        settle(heap, block, FREE)
        return
    heap.blocks[block].state = PENDING
    while head != NONE:
        last = heap.totals[LAST]
        waiting.block[last] = block
        waiting.stream[last] = uses[head]
        waiting.launch[last] = heap.totals[LAUNCHES]
        waiting.event[last] = event
        heap.totals[LAST] += 1
        heap.blocks[block].waits += 1
        head = link[head]


@compiled
def has_room(heap: Heap) -> bool:
    """Whether there are spare blocks for whatever the next event does: giving pages back cuts every cached
    block into three at most."""
    return heap.totals[NODES] + 2 * heap.totals[CACHED] + 8 <= heap.blocks.size
