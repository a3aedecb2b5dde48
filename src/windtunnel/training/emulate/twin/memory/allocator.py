"""PyTorch's caching allocator for CUDA devices, and the events of one rank run through it.

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

`simulate` first turns the structured events into plain columns with dense numbers (streams, blocks, event
records), so that the compiled loop only indexes arrays.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from windtunnel.base.compiled import jit
from windtunnel.training.emulate.graph import EventKind
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
    UNLIMITED,
    UNMAPPED,
    USED,
    AllocatorRules,
    Heap,
    Int64,
    collect_garbage,
    compiled,
    cut_front,
    give_back_all,
    give_back_oversize,
    insert,
    lower_bound,
    new_heap,
    new_segment,
    remove,
    settle,
)
from windtunnel.training.emulate.twin.memory.config import AllocatorConfig

# Compiled functions are opaque to the type checker.
# mypy: disable-error-code="untyped-decorator, no-any-return"


MIN_BLOCK = 512
SMALL_REQUEST = 1 << 20


class PendingUses(NamedTuple):
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
def take_cached(heap: Heap, rules: AllocatorRules, row: int, size: int) -> int:
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
def finish(heap: Heap, waiting: PendingUses, stream: int, event: int, launch: int) -> None:
    """Other streams' uses are over: those on ``stream`` (-1: any) of blocks that were freed before ``event``
    and when at most ``launch`` kernels had been launched. A block without further uses becomes free."""
    last = heap.totals[FIRST]
    for index in range(heap.totals[FIRST], heap.totals[LAST]):
        block = waiting.block[index]
        same = stream == -1 or waiting.stream[index] == stream
        if same and waiting.event[index] < event and waiting.launch[index] <= launch:
            heap.blocks[block].waits -= 1
            if heap.blocks[block].waits == 0:
                settle(heap, block, FREE)
        else:
            waiting.block[last] = block
            waiting.stream[last] = waiting.stream[index]
            waiting.launch[last] = waiting.launch[index]
            waiting.event[last] = waiting.event[index]
            last += 1
    heap.totals[LAST] = last


@compiled
def allocate(
    heap: Heap, rules: AllocatorRules, waiting: PendingUses, stream: int, size: int
) -> tuple[int, bool]:
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
def release(heap: Heap, waiting: PendingUses, block: int, event: int, streams: Int64) -> None:
    """The host frees a USED block, which other ``streams`` use."""
    heap.totals[ALLOCATED] -= heap.blocks[block].size
    if streams.size == 0:
        settle(heap, block, FREE)
        return
    heap.blocks[block].state = PENDING
    heap.blocks[block].waits = streams.size
    for stream in streams:
        last = heap.totals[LAST]
        waiting.block[last] = block
        waiting.stream[last] = stream
        waiting.launch[last] = heap.totals[LAUNCHES]
        waiting.event[last] = event
        heap.totals[LAST] += 1


@compiled
def has_room(heap: Heap) -> bool:
    """Whether there are spare blocks for whatever the next event does: giving pages back cuts every cached
    block into three at most."""
    return heap.totals[NODES] + 2 * heap.totals[CACHED] + 8 <= heap.blocks.size


# Compiled functions are opaque to the type checker.
# mypy: disable-error-code="untyped-decorator, no-any-return"


ALLOC, FREED, STREAM_USE = int(EventKind.ALLOC), int(EventKind.FREE), int(EventKind.RECORD_STREAM)
RECORD, SYNC = int(EventKind.RECORD), int(EventKind.SYNC)
OP, COLLECTIVE = int(EventKind.OP), int(EventKind.COLLECTIVE)

DONE, NO_ROOM, BROKEN = 0, 1, 2
HANDLES = 1 << 40  # keeps the numbers of work handles apart from those of event records


@dataclass(frozen=True, slots=True)
class Trajectory:
    """What the allocator did. Over events: bytes ``allocated`` and ``reserved`` after each. Over allocated
    blocks (``ids`` as in the events, ascending): ``size`` in bytes, and the events ``born`` and ``died`` (the
    number of events for a block that is never freed). ``out_of_memory`` is the first event that did not fit,
    -1 for none. ``heap`` is the allocator's state at the end."""

    allocated: Int64
    reserved: Int64
    ids: Int64
    size: Int64
    born: Int64
    died: Int64
    out_of_memory: int
    heap: Heap


# Numba's cache notices changes of this file alone: touch it after changing what is called from here.
@jit
def _run(
    heap: Heap, rules: AllocatorRules, waiting: PendingUses, kind: np.ndarray[Any, np.dtype[np.uint8]],
    stream: Int64, ref: Int64, value: Int64, records: tuple[Int64, Int64], first_use: Int64,
    use_stream: Int64, place: Int64, life: tuple[Int64, Int64, Int64], curve: tuple[Int64, Int64],
) -> tuple[int, int, int]:  # fmt: skip
    """Status, the event at which it stopped, and the first event that was out of memory."""
    record_stream, record_event = records
    size, born, died = life
    out_of_memory = -1
    for event in range(kind.size):
        what, block = kind[event], ref[event]
        if what == ALLOC:
            if born[block] != NONE:
                return BROKEN, event, out_of_memory
            born[block] = event
            if value[event] > 0:  # an empty tensor has no storage
                if not has_room(heap):
                    return NO_ROOM, event, out_of_memory
                rounded = round_size(value[event], rules.divisions)
                place[block], failed = allocate(heap, rules, waiting, stream[event], rounded)
                size[block] = heap.blocks[place[block]].size
                if failed:
                    out_of_memory = event
        elif what == FREED:
            if born[block] == NONE or died[block] != kind.size:
                return BROKEN, event, out_of_memory
            died[block] = event
            if place[block] != NONE:
                streams = use_stream[first_use[block] : first_use[block + 1]]
                release(heap, waiting, place[block], event, streams)
        elif what in (RECORD, COLLECTIVE):
            record_stream[block] = stream[event]
            record_event[block] = event
        elif what == SYNC:
            if block == -1:
                finish(heap, waiting, -1, UNLIMITED, UNLIMITED)
            elif block == -2:
                finish(heap, waiting, stream[event], UNLIMITED, UNLIMITED)
            elif block >= 0 and record_event[block] != NONE:
                finish(heap, waiting, record_stream[block], record_event[block], UNLIMITED)
        if what in (OP, COLLECTIVE):
            heap.totals[LAUNCHES] += 1
        curve[0][event] = heap.totals[ALLOCATED]
        curve[1][event] = heap.totals[RESERVED]
    return DONE, kind.size, out_of_memory


def _dense(values: Int64) -> tuple[Int64, Int64]:
    """Distinct values, ascending, and for each value its place among them."""
    distinct, places = np.unique(values, return_inverse=True)
    return distinct, places.astype(np.int64)


def simulate(
    events: np.ndarray[Any, np.dtype[Any]], config: AllocatorConfig, capacity: float, lag: int
) -> Trajectory:
    """Emulate the allocator over ``events`` (dtype `graph.EVENT`) on a device with ``capacity`` bytes.

    Raises ValueError when a block is allocated twice, or freed when it is not allocated.
    """
    kind = np.ascontiguousarray(events["kind"])
    ref = events["ref"].astype(np.int64)
    streams, stream = _dense(events["stream"].astype(np.int64))
    of_block = (kind == ALLOC) | (kind == FREED) | (kind == STREAM_USE)
    # A collective is a point that the host can wait for, like an event record; its number is its handle.
    of_handle = (kind == COLLECTIVE) | ((kind == SYNC) & (ref == -3))
    ref[of_handle] = HANDLES + events["value"][of_handle]
    of_record = of_handle | (kind == RECORD) | ((kind == SYNC) & (ref >= 0))
    ids, ref[of_block] = _dense(ref[of_block])
    record_ids, ref[of_record] = _dense(ref[of_record])
    limit = UNLIMITED if math.isinf(capacity) else int(capacity)
    rules = AllocatorRules(
        config.expandable_segments, config.max_split_size, config.max_non_split_rounding,
        config.large_segment_size, int(config.collects * config.garbage_collection_threshold * limit), lag,
        np.array(config.roundup_power2_divisions, np.int64),
    )  # fmt: skip
    # Of each block the other streams that use it.
    home = np.full(len(ids), NONE, np.int64)
    home[ref[kind == ALLOC]] = stream[kind == ALLOC]
    uses = np.unique(np.stack([ref, stream], axis=1)[kind == STREAM_USE], axis=0)
    uses = uses[home[uses[:, 0]] != uses[:, 1]]
    first_use, use_stream = np.searchsorted(uses[:, 0], np.arange(len(ids) + 1)), uses[:, 1].copy()
    nodes = 4096
    while True:
        heap = new_heap(len(streams), nodes, limit)
        waiting = PendingUses(*(np.empty(len(uses), np.int64) for _ in range(4)))
        place, born = (np.full(len(ids), NONE, np.int64) for _ in range(2))
        size, died = np.zeros(len(ids), np.int64), np.full(len(ids), len(events), np.int64)
        records = (np.zeros(len(record_ids), np.int64), np.full(len(record_ids), NONE, np.int64))
        curve = (np.zeros(len(events), np.int64), np.zeros(len(events), np.int64))
        value = events["value"].astype(np.int64)
        status, event, out_of_memory = _run(
            heap, rules, waiting, kind, stream, ref, value, records, first_use, use_stream, place,
            (size, born, died), curve,
        )  # fmt: skip
        if status != NO_ROOM:
            break
        nodes *= 4
    if status == BROKEN:
        block = int(events["ref"][event])
        action = "allocated twice" if kind[event] == ALLOC else "freed while it is not allocated"
        raise ValueError(f"event {event}: block {block} is {action}")
    return Trajectory(*curve, ids, size, born, died, out_of_memory, heap)
