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


def test_how_often_a_step_gives_memory_back():
    """60 and 30 MiB are cached when 80 are asked for."""
    rows = [alloc(1, 60 * MIB), alloc(2, 30 * MIB), free(1), free(2), alloc(3, 80 * MIB), free(3)]
    for steps, capacity, returns in (
        ([(0, 4), (4, 6)], 100, 1), ([(0, 4), (4, 6)], 200, 0), ([(0, 5), (5, 6)], 100, 0),
    ):  # fmt: skip
        assert emulate_memory(make(rows, steps), AllocatorConfig(), capacity * MIB).returns == returns


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
