"""How much device memory a rank needs, when, and for what.

The rank's allocations and frees go through the emulated caching allocator (`simulate`). *Allocated* bytes are
those of the blocks in use, as ``torch.cuda.memory_allocated()`` counts them (rounded to what the allocator
hands out); *reserved* bytes are those that the allocator holds, as ``torch.cuda.memory_reserved()``.
A device is out of memory when the reserved bytes would exceed the capacity, however little is allocated.

What a block was asked for is said in words. Memory that modules ask for in forward is named by the module's
path, what their backward asks for likewise; parameters, gradients and optimizer state by the parameter. What
is left, such as a loss or a model's set-up, is named by the line of the user's script.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise

import numpy as np

from windtunnel.training.emulate.graph import Category, Phase, Slice
from windtunnel.training.emulate.policy.groups import call_site
from windtunnel.training.emulate.twin.memory.allocator import Trajectory, simulate
from windtunnel.training.emulate.twin.memory.blocks import REFUSED, Int64
from windtunnel.training.emulate.twin.memory.config import AllocatorConfig

LAUNCH_QUEUE = 1024
"""Kernel launches that a CUDA context holds before the host blocks."""

CURVE_POINTS = 2000

LARGE_BYTES = 1 << 20
"""From here on the line that asks outside modules is written down (`native/device.cpp`)."""

OF_PARAMETER = {
    Category.PARAMETER: "parameter {}", Category.GRADIENT: "gradient of {}",
    Category.OPTIMIZER: "optimizer state of {}",
}  # fmt: skip
OF_MODULE = {Phase.BACKWARD: "backward of {}", Phase.RECOMPUTE: "recomputation of {}"}
OUTSIDE = {
    Category.PARAMETER: "parameters", Category.GRADIENT: "gradients",
    Category.OPTIMIZER: "optimizer state", Category.ACTIVATION: "activations outside modules",
    Category.COMMUNICATION: "communication buffers", Category.TEMPORARY: "temporaries outside modules",
}  # fmt: skip
"""What is told of blocks that no module asked for, all of a category together."""


@dataclass(frozen=True, slots=True)
class ScopeBytes:
    """Live blocks that were allocated within one module path, or outside modules for one purpose."""

    scope: str
    """a module path, or a purpose outside modules"""
    bytes: int
    """bytes of its live blocks"""
    blocks: int = 0
    """how many blocks these are"""


@dataclass(frozen=True, slots=True)
class Peak:
    """The greatest need within a range of events, as after ``torch.cuda.reset_peak_memory_stats()`` at its
    start. ``event`` is where allocated bytes are greatest (the first such); ``by_category`` and ``held``
    (largest first) say what is allocated there. The reserved bytes may be greatest at another event."""

    allocated_bytes: int
    reserved_bytes: int
    event: int
    by_category: dict[Category, int]
    held: tuple[ScopeBytes, ...]


@dataclass(frozen=True, slots=True)
class OutOfMemory:
    """The first allocation that the device refused, after everything cached had been given back: what it was
    for, and what was held then. ``reserved_bytes - allocated_bytes`` is what fragmentation kept."""

    scope: str
    """what the memory is for: a module path, `backward of layers.3.mlp`, `optimizer state of
    layers.0.wq.weight`, or a line of the script, `train.py:88 in main`"""
    requested_bytes: int
    """that are asked for"""
    reserved_bytes: int
    """that the allocator holds already"""
    by_category: dict[Category, int]
    """of these, as `by_category` of the ranks"""
    held: tuple[ScopeBytes, ...]
    """`{scope, bytes, blocks}`: what holds most of them, in how many blocks"""
    allocated_bytes: int = 0
    """that tensors hold then"""
    event: int = -1
    """its place among the events of the run"""


@dataclass(frozen=True, slots=True)
class MemoryCurve:
    """Bytes over time at chosen events (ascending): int64 of shape (points,), ``by_category`` (points, 6)."""

    event: Int64
    allocated: Int64
    reserved: Int64
    by_category: Int64


@dataclass(frozen=True, slots=True)
class MemoryProfile:
    """Memory of one rank in its ``steady`` steps, and in the ``whole`` run, with set-up and first step;
    ``steps``: peak allocated and reserved bytes of each steady step; ``returns``: how often they give cached
    memory back to the device, for want of it. When ``oom`` is set, everything after it is what the rank would
    need of a larger device."""

    steady: Peak
    whole: Peak
    capacity_bytes: float
    oom: OutOfMemory | None
    curve: MemoryCurve
    steps: tuple[tuple[int, int], ...] = ()
    returns: int = 0

    @property
    def headroom_bytes(self) -> float:
        """What the capacity leaves at the highest reserved bytes of the run; negative if it does not fit."""
        return self.capacity_bytes - self.whole.reserved_bytes

    @property
    def fits(self) -> bool:
        return self.oom is None

    @property
    def fragmentation(self) -> float:
        """Share of the peak reserved bytes (steady step) that was never allocated at one time."""
        peak = self.steady
        return 1 - peak.allocated_bytes / peak.reserved_bytes if peak.reserved_bytes else 0.0


def emulate_memory(
    slice: Slice, config: AllocatorConfig, capacity: float, lag: int = LAUNCH_QUEUE
) -> MemoryProfile:
    """Device memory of one rank over everything that it did.

    ``capacity`` is the bytes that the allocator may reserve: the device's memory less what it never sees
    (``reserve`` of the options); infinite is accepted. ``lag`` is the number of kernel launches after which
    work on another stream is surely finished (see `allocator`). Raises ValueError when the slice frees or
    allocates a block twice, or when its step ranges are not within its events.
    """
    events = slice.events
    begin, end = slice.steady
    if not 0 <= begin < end <= len(events):
        raise ValueError(
            f"rank {slice.rank}: the steady step {slice.steady} is not within {len(events)} events"
        )
    path = simulate(events, config, capacity, lag)
    category = np.array(
        [slice.block_category.get(int(block), Category.TEMPORARY) for block in path.ids], np.int64
    )
    return MemoryProfile(
        steady=_peak(slice, path, category, begin, end),
        whole=_peak(slice, path, category, 0, len(events)),
        capacity_bytes=float(capacity),
        oom=_out_of_memory(slice, path, category),
        curve=_curve(path, category),
        steps=tuple(_peaks(path, *step) for step in slice.steps[-slice.period :]),
        returns=int((np.diff(path.reserved[max(begin - 1, 0) : end]) < 0).sum()),
    )


def _peaks(path: Trajectory, begin: int, end: int) -> tuple[int, int]:
    # What is held already when the range begins counts too: the state after the event before it.
    first = max(begin - 1, 0)
    return int(path.allocated[first:end].max()), int(path.reserved[first:end].max())


def _peak(slice: Slice, path: Trajectory, category: Int64, begin: int, end: int) -> Peak:
    first = max(begin - 1, 0)
    event = first + int(path.allocated[first:end].argmax())
    by_category, scopes = _allocated_by(slice, path, category, event)
    return Peak(
        allocated_bytes=int(path.allocated[event]), reserved_bytes=_peaks(path, begin, end)[1],
        event=event, by_category=by_category, held=scopes,
    )  # fmt: skip


def _allocated_by(
    slice: Slice, path: Trajectory, category: Int64, event: int
) -> tuple[dict[Category, int], tuple[ScopeBytes, ...]]:
    """The blocks that are allocated after ``event``, by category, and by what asked for them."""
    live = (path.born >= 0) & (path.born <= event) & (path.died > event) & (path.size > 0)
    weights = np.bincount(category[live], path.size[live], len(Category)).astype(np.int64)
    # Blocks of a module path are one entry, those that none asked for one for each category.
    scope = slice.events["scope"][path.born[live]].astype(np.int64)
    key = np.where(scope > 0, scope, -1 - category[live])
    keys, place, blocks = np.unique(key, return_inverse=True, return_counts=True)
    scope_bytes = np.bincount(place, path.size[live], len(keys)).astype(np.int64)
    return {kind: int(weights[kind]) for kind in Category}, tuple(
        ScopeBytes(_words(slice, int(keys[row])), int(scope_bytes[row]), int(blocks[row]))
        for row in np.argsort(-scope_bytes, kind="stable")
    )


def _words(slice: Slice, key: int) -> str:
    return scope(slice, key) if key >= 0 else OUTSIDE[Category(-1 - key)]


def _out_of_memory(slice: Slice, path: Trajectory, category: Int64) -> OutOfMemory | None:
    event = path.out_of_memory
    if event < 0:
        return None
    requested = int(path.size[path.born == event][0])
    by_category, scopes = _allocated_by(slice, path, category, event - 1)
    return OutOfMemory(
        event=event,
        requested_bytes=int(slice.events["value"][event]),
        scope=purpose(slice, event),
        allocated_bytes=int(path.allocated[event]) - requested,
        reserved_bytes=int(path.heap.totals[REFUSED]),
        by_category=by_category,
        held=scopes,
    )


def _curve(path: Trajectory, category: Int64) -> MemoryCurve:
    """Bytes over time at no more than `CURVE_POINTS` events: of each stretch of events, those at which
    allocated and reserved bytes are greatest, so that no peak is lost; and the first and the last event."""
    count = len(path.allocated)
    if count <= CURVE_POINTS:
        chosen = np.arange(count)
    else:
        edges = np.linspace(0, count, CURVE_POINTS // 2, dtype=np.int64)
        tops = [
            low + int(values[low:high].argmax())
            for low, high in pairwise(edges.tolist())
            for values in (path.allocated, path.reserved)
        ]
        chosen = np.unique(np.array([0, *tops, count - 1]))
    by_category = np.zeros((len(chosen), len(Category)), np.int64)
    for kind in Category:
        mine = (category == kind) & (path.born >= 0)
        change = np.zeros(count + 1, np.int64)
        np.add.at(change, path.born[mine], path.size[mine])
        np.add.at(change, path.died[mine], -path.size[mine])
        by_category[:, kind] = change.cumsum()[chosen]
    return MemoryCurve(chosen, path.allocated[chosen], path.reserved[chosen], by_category)


def purpose(slice: Slice, event: int) -> str:
    """What the allocation at ``event`` is for, such as ``backward of layers.3.mlp``. Never nothing."""
    row = slice.events[event]
    block, phase = int(row["ref"]), Phase(int(row["phase"]))
    category = Category(slice.block_category.get(block, Category.TEMPORARY))
    name = slice.block_name.get(block)
    if name is not None and category in OF_PARAMETER:
        return OF_PARAMETER[category].format(name)
    path = scope(slice, int(row["scope"]))
    if path:
        return OF_MODULE.get(phase, "{}").format(path)
    if phase == Phase.OPTIMIZER:
        return "the optimizer's step"
    if phase == Phase.BACKWARD:
        return "backward"
    site = call_site(slice, event) if int(row["value"]) >= LARGE_BYTES else ""
    if site:
        return site
    return "set-up" if event < slice.steps[0][1] else "the step, outside modules"


def scope(slice: Slice, index: int) -> str:
    """The module path with that number, or nothing."""
    return slice.scopes[index] if 0 <= index < len(slice.scopes) else ""
