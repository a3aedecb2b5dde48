"""The compiled allocator: equal to a plain one on random programs, and its heap is sound."""

from itertools import pairwise

import memory_reference
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from windtunnel.training.emulate.graph import EVENT, EventKind
from windtunnel.training.emulate.twin.memory.allocator import Trajectory, simulate
from windtunnel.training.emulate.twin.memory.blocks import FREE, NONE, PENDING, UNMAPPED, USED
from windtunnel.training.emulate.twin.memory.config import AllocatorConfig

MIB = 1 << 20
CONFIGS = [
    "",
    "expandable_segments:True",
    "max_split_size_mb:24",
    "max_split_size_mb:24,max_non_split_rounding_mb:40",
    "roundup_power2_divisions:4",
    "roundup_power2_divisions:[1:8,16:2,>:4],expandable_segments:True",
    "garbage_collection_threshold:0.5",
    "garbage_collection_threshold:0.5,per_process_memory_fraction:0.9",
    "large_segment_size_mb:30",
]

sizes = st.one_of(
    st.integers(1, 4096),
    st.integers(1, MIB),
    st.sampled_from([512, MIB, MIB + 1, 10 * MIB - 1, 10 * MIB, 20 * MIB, 24 * MIB]),
    st.integers(MIB, 30 * MIB),
)
action = st.one_of(
    st.tuples(st.just("alloc"), st.integers(0, 1), sizes),
    st.tuples(st.just("alloc"), st.integers(0, 1), sizes),
    st.tuples(st.just("free"), st.integers(0, 60), st.just(0)),
    st.tuples(st.just("use"), st.integers(0, 60), st.integers(0, 2)),
    st.tuples(st.just("launch"), st.integers(0, 2), st.just(0)),
    st.tuples(st.just("record"), st.integers(0, 2), st.just(0)),
    st.tuples(st.just("sync"), st.integers(-2, 3), st.integers(0, 2)),
)


def play(actions, config: AllocatorConfig, capacity: int, lag: int):
    """The actions as events, and what the plain allocator shows after each."""
    plain = memory_reference.Reference(config, capacity)
    rows, shown, alive = [], [], []
    used: dict[int, set[int]] = {}
    home: dict[int, int] = {}
    freed: list[tuple[int, int, int]] = []  # name, launches, event
    records: list[tuple[int, int]] = []
    launches, refused = 0, -1
    for what, first, second in actions:
        kind, stream, ref, value = EventKind.STEP, 0, 0, 0
        if what == "alloc":
            name = len(home)
            plain.passed(None, {n for n, at, _ in freed if at <= launches - lag})
            plain.alloc(name, first, second)
            alive.append(name)
            home[name], used[name] = first, set()
            kind, stream, ref, value = EventKind.ALLOC, first, name, second
            if plain.refused and refused < 0:
                refused = len(rows)
        elif what == "free" and alive:
            name = alive.pop(first % len(alive))
            freed.append((name, launches, len(rows)))
            plain.free(name, used[name])
            kind, ref = EventKind.FREE, name
        elif what == "use" and alive:
            name = alive[first % len(alive)]
            used[name] |= {second} - {home[name]}
            kind, stream, ref = EventKind.RECORD_STREAM, second, name
        elif what == "launch":
            launches += 1
            kind, stream = EventKind.OP, first
        elif what == "record":
            kind, stream, ref = EventKind.RECORD, first, len(records)
            records.append((first, len(rows)))
        elif what == "sync" and first < len(records):
            kind, stream, ref = EventKind.SYNC, second, first if first != -2 else -2
            everything = {n for n, _, _ in freed}
            if first >= 0:
                before = records[first][1]
                plain.passed(records[first][0], {n for n, _, at in freed if at < before})
            else:
                plain.passed(None if first == -1 else second, everything)
        rows.append((kind, 0, stream, 0, ref, value))
        shown.append((plain.allocated, plain.reserved))
    return np.array(rows, EVENT), np.array(shown, np.int64).reshape(-1, 2), refused


def check_heap(path: Trajectory, expandable: bool) -> None:
    """The heap at the end: walk every segment from its first block."""
    heap, free_blocks, backed = path.heap, set(), 0
    rows = len(heap.filled) // 2
    spare, block = set(), int(heap.totals[4])
    while block < len(heap.blocks):
        spare.add(block)
        block = int(heap.blocks[block]["after"])
    known = [b for b in range(len(heap.blocks)) if b not in spare]
    assert len(known) == heap.totals[5]
    spans = []
    for head in (b for b in known if heap.blocks[b]["before"] == NONE):
        block, total = head, 0
        while block != NONE:
            following = int(heap.blocks[block]["after"])
            if heap.blocks[block]["state"] != UNMAPPED:
                total += int(heap.blocks[block]["size"])
                spans.append(
                    (
                        int(heap.blocks[block]["address"]),
                        int(heap.blocks[block]["address"] + heap.blocks[block]["size"]),
                    )
                )
            if heap.blocks[block]["state"] in (FREE, UNMAPPED):
                free_blocks.add(block)
            assert heap.blocks[block]["state"] in (FREE, USED, PENDING, UNMAPPED)
            assert heap.blocks[block]["size"] % 512 == 0 and heap.blocks[block]["size"] > 0
            if following != NONE:
                assert heap.blocks[following]["before"] == block
                assert (
                    heap.blocks[following]["address"]
                    == heap.blocks[block]["address"] + heap.blocks[block]["size"]
                )
                both = {int(heap.blocks[block]["state"]), int(heap.blocks[following]["state"])}
                assert both not in ({FREE}, {UNMAPPED})  # neighbours that could merge have merged
            block = following
        assert total % (2 * MIB) == 0
        backed += total
    spans.sort()
    assert all(end <= start for (_, end), (start, _) in pairwise(spans))
    assert backed == path.reserved[-1]
    filed = [int(b) for row in range(2 * rows) for b in heap.members[row, : heap.filled[row]]]
    assert len(filed) == len(set(filed)) and set(filed) == free_blocks
    for row in range(rows):
        keys = [
            (heap.blocks[b]["size"], heap.blocks[b]["address"]) for b in heap.members[row, : heap.filled[row]]
        ]
        assert keys == sorted(keys)
    assert expandable or not any(heap.blocks[b]["state"] == UNMAPPED for b in known)


@pytest.mark.parametrize("text", CONFIGS)
@settings(max_examples=60, deadline=None, derandomize=True)
@given(
    actions=st.lists(action, min_size=1, max_size=80),
    capacity=st.sampled_from([24 * MIB, 64 * MIB, 130 * MIB, 1 << 40]),
    lag=st.sampled_from([0, 3, 1024]),
)
def test_equal_to_the_plain_allocator(text, actions, capacity, lag):
    config = AllocatorConfig.parse(text)
    events, shown, refused = play(actions, config, capacity, lag)
    path = simulate(events, config, capacity, lag)
    assert np.array_equal(path.allocated, shown[:, 0])
    assert np.array_equal(path.reserved, shown[:, 1])
    assert path.out_of_memory == refused
    assert (path.reserved >= path.allocated).all()
    check_heap(path, config.expandable_segments)


@pytest.mark.parametrize("text", CONFIGS)
@pytest.mark.parametrize("seed", range(4))
def test_equal_when_the_device_is_full_of_cached_memory(text, seed):
    """What is alive would fit, so memory is given back again and again and nothing fails at first."""
    draw = np.random.default_rng(seed)
    actions, sizes = [], []
    for _ in range(300):
        size = int(2 ** draw.uniform(10, 25.3))
        while sizes and sum(sizes) + size > 90 * MIB:
            index = int(draw.integers(len(sizes)))
            actions.append(("free", index, 0))
            sizes.pop(index)
        actions.append(("alloc", int(draw.integers(3)), size))
        sizes.append(size)
    config = AllocatorConfig.parse(text)
    events, shown, refused = play(actions, config, 160 * MIB, 1024)
    path = simulate(events, config, 160 * MIB, 1024)
    assert np.array_equal(np.stack([path.allocated, path.reserved], 1), shown)
    assert path.out_of_memory == refused
    assert path.reserved.max() > 135 * MIB
    check_heap(path, config.expandable_segments)


def test_arrays_grow_when_blocks_do_not_fit():
    count = 6000  # more blocks than the heap starts with
    events = np.zeros(2 * count, EVENT)
    events["kind"] = np.repeat([int(EventKind.ALLOC), int(EventKind.FREE)], count)
    events["ref"] = np.tile(np.arange(count), 2)
    events["value"] = 700
    path = simulate(events, AllocatorConfig(), 1e12, 1024)
    assert path.allocated[count - 1] == count * 1024
    assert path.allocated[-1] == 0
    assert path.reserved[-1] == -(-count * 1024 // (2 * MIB)) * 2 * MIB


@pytest.mark.parametrize(
    ("rows", "message"),
    [
        ([(EventKind.ALLOC, 5), (EventKind.ALLOC, 5)], "event 1: block 5 is allocated twice"),
        ([(EventKind.ALLOC, 5), (EventKind.FREE, 6)], "event 1: block 6 is freed while it is not allocated"),
        ([(EventKind.ALLOC, 5), (EventKind.FREE, 5), (EventKind.FREE, 5)], "event 2: block 5 is freed while"),
    ],
)
def test_broken_slices_are_refused(rows, message):
    events = np.array([(kind, 0, 0, 0, ref, 100) for kind, ref in rows], EVENT)
    with pytest.raises(ValueError, match=message):
        simulate(events, AllocatorConfig(), 1e9, 0)
