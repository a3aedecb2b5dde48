"""Run the events of one rank through the emulated allocator.

The structured events are first turned into plain columns with dense numbers (streams, blocks, event records),
so that the compiled loop only indexes arrays.
"""

# Compiled functions are opaque to the type checker.
# mypy: disable-error-code="untyped-decorator, no-any-return"

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import numpy as np
from numba import njit

from windtunnel.training.emulate.graph import EventKind
from windtunnel.training.emulate.twin.memory.allocator import (
    Waiting,
    allocate,
    finish,
    has_room,
    release,
    round_size,
)
from windtunnel.training.emulate.twin.memory.blocks import (
    ALLOCATED,
    LAUNCHES,
    NONE,
    RESERVED,
    Heap,
    Int64,
    new_heap,
)
from windtunnel.training.emulate.twin.memory.config import AllocatorConfig
from windtunnel.training.emulate.twin.memory.segments import UNLIMITED, Rules

ALLOC, FREE, STREAM_USE = int(EventKind.ALLOC), int(EventKind.FREE), int(EventKind.RECORD_STREAM)
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
@njit(cache=True)
def _run(
    heap: Heap,
    rules: Rules,
    waiting: Waiting,
    kind: np.ndarray[Any, np.dtype[np.uint8]],
    stream: Int64,
    ref: Int64,
    value: Int64,
    records: tuple[Int64, Int64],
    uses: tuple[Int64, Int64],
    heads: Int64,
    place: Int64,
    life: tuple[Int64, Int64, Int64],
    curve: tuple[Int64, Int64],
) -> tuple[int, int, int]:
    """Status, the event at which it stopped, and the first event that was out of memory."""
    record_stream, record_event = records
    use_stream, use_link = uses
    size, born, died = life
    out_of_memory, used = -1, 0
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
        elif what == FREE:
            if born[block] == NONE or died[block] != kind.size:
                return BROKEN, event, out_of_memory
            died[block] = event
            if place[block] != NONE:
                release(heap, waiting, place[block], event, use_stream, use_link, heads[block])
        elif what == STREAM_USE:
            if born[block] != NONE and place[block] != NONE and died[block] == kind.size:
                fresh = stream[event] != heap.blocks[place[block]].row >> 1
                known = heads[block]
                while known != NONE:
                    fresh = fresh and use_stream[known] != stream[event]
                    known = use_link[known]
                if fresh:
                    use_stream[used] = stream[event]
                    use_link[used] = heads[block]
                    heads[block] = used
                    used += 1
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
    of_block = (kind == ALLOC) | (kind == FREE) | (kind == STREAM_USE)
    # A collective is a point that the host can wait for, like an event record; its number is its handle.
    of_handle = (kind == COLLECTIVE) | ((kind == SYNC) & (ref == -3))
    ref[of_handle] = HANDLES + events["value"][of_handle]
    of_record = of_handle | (kind == RECORD) | ((kind == SYNC) & (ref >= 0))
    ids, ref[of_block] = _dense(ref[of_block])
    record_ids, ref[of_record] = _dense(ref[of_record])
    limit = UNLIMITED if math.isinf(capacity) else int(capacity)
    rules = Rules(
        config.expandable_segments,
        config.max_split_size,
        config.max_non_split_rounding,
        config.large_segment_size,
        int(config.garbage_collection_threshold * limit),
        lag,
        np.array(config.roundup_power2_divisions, np.int64),
    )
    use_count = int((kind == STREAM_USE).sum())
    nodes = 4096
    while True:
        heap = new_heap(len(streams), nodes, limit)
        waiting = Waiting(*(np.empty(use_count, np.int64) for _ in range(4)))
        heads, place, born = (np.full(len(ids), NONE, np.int64) for _ in range(3))
        size, died = np.zeros(len(ids), np.int64), np.full(len(ids), len(events), np.int64)
        records = (np.zeros(len(record_ids), np.int64), np.full(len(record_ids), NONE, np.int64))
        uses = (np.empty(use_count, np.int64), np.empty(use_count, np.int64))
        curve = (np.zeros(len(events), np.int64), np.zeros(len(events), np.int64))
        value = events["value"].astype(np.int64)
        status, event, out_of_memory = _run(
            heap,
            rules,
            waiting,
            kind,
            stream,
            ref,
            value,
            records,
            uses,
            heads,
            place,
            (size, born, died),
            curve,
        )
        if status != NO_ROOM:
            break
        nodes *= 4
    if status == BROKEN:
        block = int(events["ref"][event])
        action = "allocated twice" if kind[event] == ALLOC else "freed while it is not allocated"
        raise ValueError(f"event {event}: block {block} is {action}")
    return Trajectory(*curve, ids, size, born, died, out_of_memory, heap)
