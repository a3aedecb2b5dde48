"""The loops that Inductor makes of an operator, and which of them share a kernel, on plain data.

An operator becomes one part or several, each *pointwise* (a value for each point), a *row* reduction (over
the innermost dimension, whose result the same kernel can go on with), a *full* reduction (to one number) or a
*column* reduction (over other dimensions). The last two are done in two stages, the first over pieces: what
reads their result needs another kernel. Whatever is no such loop is *extern*: matrix products, attention,
convolutions, look-ups, and operators on complex numbers, for which Inductor has no code.

As Inductor decomposes it, a norm is statistics by rows and then a pointwise part, so that the normalised
values can be computed again from saved statistics; its backward is a row reduction for the input and a column
reduction for the weights. Reductions of up to `UNROLLED` elements are written out and are pointwise; one of
up to `UNSPLIT` elements to a number is done in one piece, as a row.

Two kernels become one when they share data (one reads what the other writes, or both read the same), their
loops fit, and no path leads out of one and back into the other. Pairs that share most bytes come first, and
rounds follow until nothing joins. Loops fit that have the same points, by rows the same rows; values for each
row fit a reduction over those rows. A pointwise kernel that is read by one other only is computed where
it is read, whatever its size. Nothing joins across a segment (a collective, a wait for another stream), an
extern operator, or the second stage of a reduction. The order of the loops and what each reads decide alone,
so the same graph always gets the same kernels.

Source: PyTorch 2.13, ``torch/_inductor`` (``lowering.py``, ``ir.py``: ``Reduction.num_splits`` and
``create_multilayer_existing_ranges``, ``decomposition.py``, ``config.unroll_reductions_threshold``;
``scheduler.py``: ``fuse_nodes_once``, ``can_fuse``, ``will_fusion_create_cycle``, ``score_fusion_memory``;
``config.max_fusion_size``).
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from math import prod
from typing import Literal

from windtunnel.training.emulate.graph import Operator, TensorMeta
from windtunnel.training.emulate.twin.costs.work import OVERWRITES, base_name, kind_of

UNROLLED = 8
UNSPLIT = 8192
LARGEST = 64


@dataclass(frozen=True, slots=True)
class KernelLoops:
    """``points``: how often the innermost statement runs; ``rows``: results of a row reduction, else 0."""

    kind: Literal["pointwise", "row", "full", "column"]
    points: int
    rows: int = 0

    @property
    def staged(self) -> bool:
        """Whether what reads the result needs another kernel."""
        return self.kind in ("full", "column")


@dataclass(frozen=True, slots=True)
class KernelPart:
    """A part of an operator: its loops (None: extern), which of the operator's inputs it reads, which results
    it reads that an earlier part wrote, and which it writes; positions among tensors."""

    loops: KernelLoops | None
    reads: tuple[int, ...]
    again: tuple[int, ...]
    writes: tuple[int, ...]


NORMS = {"_fused_rms_norm": 1, "native_layer_norm": 1}
NORM_BACKWARDS = ("_fused_rms_norm_backward", "native_layer_norm_backward")
NEVER = frozenset({"split_with_sizes_copy", "_chunk_cat", "_local_scalar_dense", "item", "_pin_memory"})


def parts_of(op: Operator) -> tuple[KernelPart, ...]:
    """The parts of ``op``, in order; an operator that is no loop has one, with ``loops`` None."""
    tensors, base, kind = op.tensors(), base_name(op.name), kind_of(op)
    reads, writes = tuple(range(len(tensors))), tuple(range(len(op.outputs)))
    extern = (KernelPart(None, reads, (), writes),)
    every = [*tensors, *op.outputs]
    if (
        base in NEVER
        or base.startswith("_foreach")
        or any(tensor.dtype.startswith("complex") for tensor in every)
    ):
        return extern
    if len({tensor.device for tensor in every if tensor.shape}) > 1 or not op.outputs:
        return extern  # a copy between host and device
    points = max(tensor.numel for tensor in every)
    if base in NORMS and len(op.outputs) > 1 and tensors:
        rows = op.outputs[-1].numel
        return (
            KernelPart(KernelLoops("row", points, rows), (0,), (), writes[1:]),
            KernelPart(KernelLoops("pointwise", points), reads, writes[1:], (0,)),
        )
    if base in NORM_BACKWARDS and len(tensors) > 2:
        rows = min(tensor.numel for tensor in tensors[2:3])
        kernel_parts = [KernelPart(KernelLoops("row", points, rows), reads, (), (0,))]
        if writes[1:]:
            kernel_parts.append(KernelPart(KernelLoops("column", points), reads[:-1], (), writes[1:]))
        return tuple(kernel_parts)
    if kind == "softmax" and base.endswith(("softmax", "softmax_backward_data")):
        axis = next((arg for arg in op.inputs if isinstance(arg, int) and not isinstance(arg, bool)), -1)
        shape = op.outputs[0].shape
        rows = points // max(1, shape[axis] if shape else 1)
        return (KernelPart(KernelLoops("row", points, rows), reads, (), writes),)
    if (
        kind == "reduction"
        and tensors
        and base not in ("topk", "sort", "msort", "median", "cumsum", "cumprod")
    ):
        return (KernelPart(_reduction(op, tensors[0]), reads, (), writes),)
    if op.name.endswith(".out") and kind in ("elementwise", "other") and len(op.outputs) == 1 and reads[1:]:
        # The last tensor is only written; where it is made to fit, it is recorded as it was before.
        return (KernelPart(KernelLoops("pointwise", max(t.numel for t in tensors)), reads[:-1], (), writes),)
    if kind in ("elementwise", "copy"):
        overwritten = base in OVERWRITES
        points = max(tensor.numel for tensor in op.outputs)
        return (
            KernelPart(KernelLoops("pointwise", points), reads[1:] if overwritten else reads, (), writes),
        )
    return extern


def _reduction(op: Operator, source: TensorMeta) -> KernelLoops:
    out = op.outputs[0].numel
    each = source.numel // max(1, out)
    if each <= UNROLLED:
        return KernelLoops("pointwise", max(out, 1))
    axes = next((arg for arg in op.inputs[1:] if isinstance(arg, tuple) and arg), None)
    if axes is None:
        number = next((a for a in op.inputs[1:] if isinstance(a, int) and not isinstance(a, bool)), None)
        axes = None if number is None or base_name(op.name) == "linalg_vector_norm" else (number,)
    rank = len(source.shape)
    if out == 1 and source.numel <= UNSPLIT:
        return KernelLoops("row", source.numel, 1)
    if out == 1 or axes is None or not all(isinstance(axis, int) for axis in axes):
        return KernelLoops("full", source.numel)
    inner = {axis % rank for axis in axes} == set(range(rank - len(axes), rank))
    if inner and prod(source.shape[rank - len(axes) :]) == each:
        return KernelLoops("row", source.numel, out)
    return KernelLoops("column", source.numel)


@dataclass(frozen=True, slots=True)
class Item:
    """A node as fusion sees it: its loops (None: extern), values read and written (numbers), bytes of each
    value read, whether what it writes is read outside the graph, and its segment."""

    loops: KernelLoops | None
    reads: tuple[int, ...]
    sizes: tuple[int, ...]
    writes: tuple[int, ...]
    external: bool
    segment: int


def kernels(items: Sequence[Item]) -> list[int]:
    """The kernel of each of ``items``, which are in an order that they can run in; a kernel is named by its
    first member."""
    return _Fusion(items).run()


class _Fusion:
    def __init__(self, items: Sequence[Item]) -> None:
        self.items = items
        self.of = list(range(len(items)))
        self.members = {i: 1 << i for i in range(len(items))}
        self.readers: dict[int, set[int]] = defaultdict(set)
        writer: dict[int, int] = {}
        self.before = [0] * len(items)  # bits of the items that must come before, through kernels as they are
        for i, item in enumerate(items):
            for value in item.reads:
                self.readers[value].add(i)
                at = writer.get(value)
                if at is not None:
                    self.before[i] |= self.before[at] | 1 << at
            for value in item.writes:
                writer[value] = i
        self.writer = writer

    def run(self) -> list[int]:
        while any(self._round()):
            pass
        return self.of

    def _round(self) -> list[bool]:
        return [self._join(a, b) for _, a, b in self._pairs()]

    def _pairs(self) -> list[tuple[int, int, int]]:
        """(-shared bytes, kernel, kernel) of the pairs that share a value."""
        shared: dict[tuple[int, int], int] = defaultdict(int)
        for value, readers in self.readers.items():
            pairs = (zip(self.items[i].reads, self.items[i].sizes, strict=True) for i in sorted(readers))
            size = max(size for each in pairs for read, size in each if read == value)
            touched = {self.of[i] for i in readers if self.items[i].loops}
            writer = self.writer.get(value)
            if writer is not None and self.items[writer].loops:
                touched.add(self.of[writer])
            ordered = sorted(touched)
            for n, a in enumerate(ordered):
                for b in ordered[n + 1 :]:
                    shared[a, b] += size
        return sorted((-size, a, b) for (a, b), size in shared.items())

    def _join(self, a: int, b: int) -> bool:
        a, b = self.of[a], self.of[b]
        if a == b or not self._fit(a, b):
            return False
        mine = self.members[a] | self.members[b]
        if mine.bit_count() > LARGEST:
            return False
        before = self.before[a] | self.before[b]
        outside = before & ~mine
        while outside:  # something that must come before, and itself comes after one of them
            low = outside & -outside
            if self.before[low.bit_length() - 1] & mine:
                return False
            outside ^= low
        first = min(a, b)
        self.members[first] = mine
        del self.members[max(a, b)]
        before &= ~mine
        for i in _bits(mine):
            self.of[i] = first
            self.before[i] = before
        for i in range(len(self.items)):
            if self.before[i] & mine:
                self.before[i] |= mine | before
        return True

    def _fit(self, a: int, b: int) -> bool:
        ours, theirs = self._loops(a), self._loops(b)
        if self.items[a].segment != self.items[b].segment:
            return False
        if self._inlined(a, b) or self._inlined(b, a):
            return not any(mine.staged for mine in ours) or not any(its.staged for its in theirs)
        points = max(loops.points for loops in (*ours, *theirs))
        rows = {loops.rows for loops in (*ours, *theirs) if loops.rows}
        kinds = {loops.kind for loops in (*ours, *theirs)}
        if len(rows) > 1 or {"row", "column"} <= kinds or {"full", "column"} <= kinds:
            return False
        wide = [max(loops.points for loops in side) == points for side in (ours, theirs)]
        if all(wide):
            return True
        small = ours if not wide[0] else theirs
        return bool(rows) and all(loops.kind == "pointwise" and loops.points in rows for loops in small)

    def _inlined(self, a: int, b: int) -> bool:
        """Whether all that kernel ``a`` makes is pointwise and read by kernel ``b`` alone."""
        for i in _bits(self.members[a]):
            item = self.items[i]
            if item.loops is None or item.loops.kind != "pointwise" or item.external:
                return False
            for value in item.writes:
                if any(self.of[reader] not in (a, b) for reader in self.readers.get(value, ())):
                    return False
        return True

    def _loops(self, kernel: int) -> list[KernelLoops]:
        loop = [self.items[i].loops for i in _bits(self.members[kernel])]
        return [loops for loops in loop if loops is not None]


def _bits(mask: int) -> list[int]:
    numbers = []
    while mask:
        low = mask & -mask
        numbers.append(low.bit_length() - 1)
        mask ^= low
    return numbers
