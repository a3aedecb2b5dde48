"""Memory of a slice: figures worked out by hand from the allocator's constants, and what is told."""

import numpy as np
import pytest

from windtunnel.training.emulate.graph import EVENT, Category, EventKind, Slice
from windtunnel.training.emulate.twin.memory.config import AllocatorConfig
from windtunnel.training.emulate.twin.memory.profile import emulate_memory

MIB = 1 << 20
EXPANDABLE = AllocatorConfig(expandable_segments=True)


def alloc(block, size, scope=0, stream=0):
    return (EventKind.ALLOC, 0, stream, scope, block, size)


def free(block):
    return (EventKind.FREE, 0, 0, 0, block, 0)


def event(kind, ref=0, stream=0):
    return (kind, 0, stream, 0, ref, 0)


def make(rows, steps=None, categories=None):
    events = np.array(rows, EVENT)
    return Slice(
        rank=0, world_size=1, device="h100-sxm", operators=[], collectives=[], groups=[], world_groups=[],
        events=events, steps=steps or [(0, len(rows))], scopes=["", "layers.0", "layers.1"],
        block_category=categories or {},
    )  # fmt: skip


def whole(rows, config=AllocatorConfig(), capacity=float("inf"), **more):  # noqa: B008
    peak = emulate_memory(make(rows), config, capacity, **more).whole
    return peak.allocated_bytes, peak.reserved_bytes


@pytest.mark.parametrize(
    ("size", "allocated", "reserved"),
    [
        (0, 0, 0),
        (1, 512, 2 * MIB),
        (513, 1024, 2 * MIB),
        (MIB, MIB, 2 * MIB),
        (MIB + 1, MIB + 512, 20 * MIB),
        (10 * MIB - 512, 10 * MIB - 512, 20 * MIB),
        (10 * MIB, 10 * MIB, 10 * MIB),
        # The rest of a segment is split off only above 1 MiB: else the block is the segment.
        (11 * MIB, 12 * MIB, 12 * MIB),
        (11 * MIB - 512, 11 * MIB - 512, 12 * MIB),
        (1000 * MIB + 1, 1002 * MIB - MIB + 1 - 1 - MIB + 512, 1002 * MIB),
    ],
)
def test_one_allocation(size, allocated, reserved):
    assert whole([alloc(1, size)]) == (allocated, reserved)


@pytest.mark.parametrize(
    ("size", "reserved"), [(1, 2 * MIB), (MIB + 1, 20 * MIB), (21 * MIB, 40 * MIB), (40 * MIB, 40 * MIB)]
)
def test_expandable_segments_grow_by_pages(size, reserved):
    assert whole([alloc(1, size)], EXPANDABLE) == (-(-size // 512) * 512, reserved)


def test_small_blocks_share_a_segment_and_streams_do_not():
    assert whole([alloc(1, MIB), alloc(2, MIB)]) == (2 * MIB, 2 * MIB)
    assert whole([alloc(1, MIB), alloc(2, MIB, stream=1)]) == (2 * MIB, 4 * MIB)
    # A free block of one stream does not serve another.
    assert whole([alloc(1, 30 * MIB), free(1), alloc(2, 30 * MIB, stream=1)]) == (30 * MIB, 60 * MIB)


def test_freed_neighbours_merge():
    rows = [alloc(1, 5 * MIB), alloc(2, 5 * MIB), alloc(3, 5 * MIB), alloc(4, 4 * MIB)]
    assert whole([*rows, free(1), free(2), alloc(5, 9 * MIB)])[1] == 20 * MIB
    # 1 and 3 are not neighbours: nine do not fit in either.
    assert whole([*rows, free(1), free(3), alloc(5, 9 * MIB)])[1] == 40 * MIB


def test_expandable_segments_avoid_slivers():
    """Blocks that grow a little each time leave unusable segments behind, unless the range can grow."""
    rows = []
    for step, size in enumerate([100, 110, 120, 130]):
        rows += [alloc(step, size * MIB), free(step)]
    assert whole(rows) == (130 * MIB, (100 + 110 + 120 + 130) * MIB)
    assert whole(rows, EXPANDABLE) == (130 * MIB, 140 * MIB)


def test_max_split_size_keeps_large_blocks_whole():
    rows = [alloc(1, 200 * MIB), free(1), alloc(2, 30 * MIB)]
    assert whole(rows)[1] == 200 * MIB
    config = AllocatorConfig.parse("max_split_size_mb:100")
    assert whole(rows, config)[1] == 230 * MIB
    # Within 20 MiB an oversize block serves a smaller oversize request, as it is.
    assert whole([alloc(1, 200 * MIB), free(1), alloc(2, 190 * MIB)], config) == (200 * MIB, 200 * MIB)
    assert whole([alloc(1, 200 * MIB), free(1), alloc(2, 180 * MIB)], config)[1] == 380 * MIB


def test_cached_segments_are_given_back_before_it_fails():
    rows = [alloc(1, 60 * MIB), free(1), alloc(2, 80 * MIB)]
    profile = emulate_memory(make(rows), AllocatorConfig(), 100 * MIB)
    assert profile.fits and profile.whole.reserved_bytes == 80 * MIB
    assert profile.headroom_bytes == 20 * MIB


def test_how_often_a_step_gives_memory_back():
    """60 and 30 MiB are cached when 80 are asked for."""
    rows = [alloc(1, 60 * MIB), alloc(2, 30 * MIB), free(1), free(2), alloc(3, 80 * MIB), free(3)]
    for steps, capacity, returns in (
        ([(0, 4), (4, 6)], 100, 1), ([(0, 4), (4, 6)], 200, 0), ([(0, 5), (5, 6)], 100, 0),
    ):  # fmt: skip
        assert emulate_memory(make(rows, steps), AllocatorConfig(), capacity * MIB).returns == returns


@pytest.mark.parametrize("config", [AllocatorConfig(), EXPANDABLE])
def test_the_last_byte_of_the_capacity_counts(config):
    slice = make([alloc(1, 40 * MIB)])
    assert emulate_memory(slice, config, 40 * MIB).fits
    assert not emulate_memory(slice, config, 40 * MIB - 1).fits


def test_out_of_memory_through_fragmentation_alone():
    """The free 30 MiB lie in two segments that are in use; pages of an expandable range can be given back."""
    rows = [alloc(1, 40 * MIB), alloc(2, 40 * MIB), free(1), free(2)]
    rows += [alloc(3, 20 * MIB), alloc(4, 30 * MIB), alloc(5, 30 * MIB, scope=2)]
    profile = emulate_memory(make(rows), AllocatorConfig(), 85 * MIB)
    assert profile.oom is not None
    assert (profile.oom.event, profile.oom.requested_bytes, profile.oom.scope) == (6, 30 * MIB, "layers.1")
    assert (profile.oom.allocated_bytes, profile.oom.reserved_bytes) == (50 * MIB, 80 * MIB)
    assert not profile.fits
    # What it would have needed is still told.
    assert (profile.whole.allocated_bytes, profile.whole.reserved_bytes) == (80 * MIB, 110 * MIB)
    assert profile.headroom_bytes == -25 * MIB
    assert emulate_memory(make(rows), EXPANDABLE, 85 * MIB).fits


def test_a_block_used_on_another_stream_waits():
    rows = [alloc(1, 30 * MIB), event(EventKind.RECORD_STREAM, 1, 7), free(1)]
    again = alloc(2, 30 * MIB)
    assert whole([*rows, again]) == (30 * MIB, 60 * MIB)
    assert whole([*rows, event(EventKind.SYNC, -1), again])[1] == 30 * MIB
    assert whole([*rows, event(EventKind.SYNC, -2, 7), again])[1] == 30 * MIB
    assert whole([*rows, event(EventKind.SYNC, -2, 0), again])[1] == 60 * MIB
    # An event that was recorded before the block was freed says nothing about it.
    late = [*rows, event(EventKind.RECORD, 3, 7), event(EventKind.SYNC, 3), again]
    early = [event(EventKind.RECORD, 3, 7), *rows, event(EventKind.SYNC, 3), again]
    assert (whole(late)[1], whole(early)[1]) == (30 * MIB, 60 * MIB)
    # So does a collective that ran there and that the host waited for; here with work handle 9.
    work = (EventKind.COLLECTIVE, 0, 7, 0, 0, 9)
    waits = [(EventKind.SYNC, 0, 0, 0, -3, 9), again]
    assert (whole([*rows, work, *waits])[1], whole([work, *rows, *waits])[1]) == (30 * MIB, 60 * MIB)
    launches = [event(EventKind.OP)] * 5
    assert whole([*rows, *launches, again], lag=5)[1] == 30 * MIB
    assert whole([*rows, *launches, again], lag=6)[1] == 60 * MIB
    # A device that is full waits for the streams instead of failing.
    assert emulate_memory(make([*rows, again]), AllocatorConfig(), 40 * MIB).fits


def test_use_on_the_own_stream_costs_nothing():
    rows = [alloc(1, 30 * MIB), event(EventKind.RECORD_STREAM, 1, 0), free(1), alloc(2, 30 * MIB)]
    assert whole(rows)[1] == 30 * MIB


def test_steady_step_counts_what_it_starts_with():
    rows = [alloc(1, 40 * MIB), alloc(2, 90 * MIB), free(2), alloc(3, 30 * MIB), free(3)]
    profile = emulate_memory(make(rows, [(0, 3), (3, 5)]), AllocatorConfig(), 1e12)
    assert (profile.whole.allocated_bytes, profile.whole.event) == (130 * MIB, 1)
    assert (profile.steady.allocated_bytes, profile.steady.event) == (70 * MIB, 3)
    assert profile.steady.reserved_bytes == 130 * MIB
    # A step that only frees has its peak at its start, like a counter that was reset there.
    profile = emulate_memory(make(rows, [(0, 2), (2, 5)]), AllocatorConfig(), 1e12)
    assert (profile.steady.allocated_bytes, profile.steady.event) == (130 * MIB, 1)


def test_what_is_held_at_the_peak():
    rows = [
        alloc(1, 100 * MIB, 1), alloc(2, 10 * MIB, 2), free(2), alloc(3, 30 * MIB, 2), alloc(4, 40 * MIB, 2),
        alloc(5, 50 * MIB, 1), free(5), free(3),
    ]  # fmt: skip
    categories = {1: Category.PARAMETER, 3: Category.ACTIVATION, 4: Category.ACTIVATION, 2: Category.GRADIENT}
    peak = emulate_memory(make(rows, categories=categories), AllocatorConfig(), 1e12).steady
    assert peak.event == 5 and peak.allocated_bytes == 220 * MIB
    assert {kind: held for kind, held in peak.by_category.items() if held} == {
        Category.PARAMETER: 100 * MIB,
        Category.ACTIVATION: 70 * MIB,
        Category.TEMPORARY: 50 * MIB,
    }
    assert [(s.scope, s.bytes, s.blocks) for s in peak.held] == [
        ("layers.0", 150 * MIB, 2),
        ("layers.1", 70 * MIB, 2),
    ]


def test_curve_keeps_the_peaks_and_adds_up():
    draw = np.random.default_rng(3)
    rows, alive = [], []
    for name in range(6000):
        rows.append(alloc(name, int(2 ** draw.uniform(9, 24))))
        alive.append(name)
        while len(alive) > 40 + 30 * np.sin(name / 300):
            rows.append(free(alive.pop(int(draw.integers(len(alive))))))
    rows += [free(name) for name in alive]
    categories = {name: name % 5 for name in range(0, 6000, 2)}
    profile = emulate_memory(make(rows, categories=categories), AllocatorConfig(), 1e12)
    curve = profile.curve
    assert len(curve.event) <= 2000
    assert curve.event[0] == 0 and curve.event[-1] == len(rows) - 1
    assert (np.diff(curve.event) > 0).all()
    assert curve.allocated.max() == profile.whole.allocated_bytes
    assert curve.reserved.max() == profile.whole.reserved_bytes
    assert np.array_equal(curve.by_category.sum(axis=1), curve.allocated)
    assert curve.allocated[-1] == 0
    at_peak = curve.by_category[curve.event == profile.whole.event][0]
    assert dict(zip(Category, at_peak.tolist(), strict=True)) == profile.whole.by_category
    assert 0 < profile.fragmentation < 1


def test_steps_outside_the_events_are_refused():
    with pytest.raises(ValueError, match="steady step"):
        emulate_memory(make([alloc(1, 5)], [(0, 2)]), AllocatorConfig(), 1e9)
