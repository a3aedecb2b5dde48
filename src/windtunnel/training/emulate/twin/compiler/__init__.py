"""A captured rank as it would be if ``torch.compile`` had compiled its regions.

The capture runs compiled regions eagerly, and writes down which block every operator reads and writes. Here
the regions are done as the compiler does them:

1. *Common and dead code* (`regions`): what is done twice with the same values is done once; an operator whose
   results nobody needs is gone, in a recomputation too, and a value that is kept for it is freed after the
   forward pass.
2. *What is kept* (`partition`): AOTAutograd's minimum cut, or what the script's own checkpoint keeps; what is
   computed again is so where it is first read, not at the beginning of the backward pass.
3. *Kernels* (`loops`): loops that share data become one operator ``compiled.NAMES``, which reads every input
   once and writes what is read outside of it. A block whose whole life is within one kernel is never
   allocated.
4. *Memory*: a block is allocated before the kernel that first writes it, and freed after the last that reads
   it, as Inductor's generated code does; a kernel's result may take the place of an input of the same size
   that ends there.

Eager operators, collectives, hooks and the optimiser stay as they are, as do the blocks that they use.
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass, replace
from functools import lru_cache
from math import ceil

import numpy as np

from windtunnel.training.emulate.graph import Category, EventKind, Operator, Phase, Slice, TensorMeta
from windtunnel.training.emulate.twin.compiler.loops import Item, KernelLoops, kernels
from windtunnel.training.emulate.twin.compiler.partition import partition, sink
from windtunnel.training.emulate.twin.compiler.regions import (
    Read,
    Regions,
    graphs,
    mark_live,
    merge_equal,
    read_regions,
)
from windtunnel.training.emulate.twin.costs.work import base_name

NAMES = 6  # operators that a kernel is named after

Key = tuple[float, float]
"""Where an event goes: the event that it stands at, and an order among those that stand there."""


@dataclass(frozen=True, slots=True)
class FusedKernel:
    """A kernel, or an extern operator by itself: its nodes, and where it goes. Of ``nodes``, those in
    ``first`` have only their first stage here, and write nothing; those in ``second`` have read before what
    they read."""

    nodes: tuple[int, ...]
    key: Key
    fused: bool
    first: frozenset[int] = frozenset()
    second: frozenset[int] = frozenset()


def compiled(slice_: Slice) -> Slice:
    """``slice_`` with its regions compiled; itself where it has none. Compiling what came out changes
    nothing."""
    if not len(slice_.flow):
        return slice_
    regions = read_regions(slice_)
    merge_equal(regions, slice_.operators)
    mark_live(regions)
    events = slice_.events
    allocating = events["kind"] == EventKind.ALLOC
    sizes = dict(zip(events["ref"][allocating].tolist(), events["value"][allocating].tolist(), strict=True))
    first_new = max(sizes, default=-1) + 1
    partition(regions, sizes, first_new)
    mark_live(regions)
    sink(regions)
    kernels: list[FusedKernel] = []
    for _, numbers in graphs(regions):
        kernels += _kernels(regions, numbers)
    return _EventWriter(slice_, regions, sizes, kernels).written()


@lru_cache(maxsize=4096)
def _grouped(items: tuple[Item, ...]) -> tuple[int, ...]:
    return tuple(kernels(items))


def _kernels(regions: Regions, numbers: list[int]) -> list[FusedKernel]:
    """The kernels of one graph, whose live nodes are ``numbers`` in order."""
    items, owner = _items(regions, numbers)
    members: dict[int, list[int]] = defaultdict(list)
    for place, kernel in enumerate(_grouped(items)):
        members[kernel].append(place)
    of = {place: kernel for kernel, places in members.items() for place in places}
    written = {value: place for place, item in enumerate(items) for value in item.writes}
    needs = {
        kernel: {of[written[v]] for p in places for v in items[p].reads if v in written} - {kernel}
        for kernel, places in members.items()
    }
    at = {
        kernel: max(regions.nodes[owner[p]].at if owner[p] >= 0 else 0.0 for p in places)
        for kernel, places in members.items()
    }
    order: list[int] = []
    placed: dict[int, float] = {}
    waiting = sorted(members, key=lambda kernel: (at[kernel], kernel))
    while waiting:
        kernel = next(k for k in waiting if needs[k] <= placed.keys())
        waiting.remove(kernel)
        placed[kernel] = max([at[kernel], *(placed[need] for need in needs[kernel])])
        order.append(kernel)
    result = []
    for number, kernel in enumerate(order):
        nodes = tuple(owner[place] for place in members[kernel] if owner[place] >= 0)
        if not nodes:
            continue  # between the stages of a reduction
        first = frozenset(owner[p] for p in members[kernel] if p + 1 < len(owner) and owner[p + 1] == -1)
        second = frozenset(owner[p] for p in members[kernel] if p and owner[p - 1] == -1)
        fused = items[members[kernel][0]].loops is not None
        result.append(FusedKernel(nodes, (placed[kernel], 1.0 + number), fused, first, second))
    return result


def _items(regions: Regions, numbers: list[int]) -> tuple[tuple[Item, ...], list[int]]:
    """The nodes as fusion sees them, and of which node each item is. A reduction in two stages is three: its
    first stage, a point that nothing joins across, and what its result is written by."""
    nodes, values = regions.nodes, regions.values
    names: dict[int, int] = {}

    def name(value: int) -> int:
        return names.setdefault(value, len(names))

    mine = set(numbers)
    begin = int(regions.segment[ceil(nodes[numbers[0]].at)])  # alike layers have alike items
    items: list[Item] = []
    owner: list[int] = []
    for number in numbers:
        node = nodes[number]
        segment = int(regions.segment[ceil(node.at)]) - begin
        reads, sizes = tuple(name(r.value) for r in node.reads), tuple(r.nbytes for r in node.reads)
        writes = tuple(name(w.value) for w in node.writes)
        external = any(
            values[w.value].outside or any(u not in mine and nodes[u].live for u in values[w.value].users)
            for w in node.writes
        )
        loops = node.part.loops
        if loops is None or not loops.staged:
            items.append(Item(loops, reads, sizes, writes, external, segment))
            owner.append(number)
            continue
        partial, total = name(-2 * number - 2), name(-2 * number - 3)
        out = max((w.nbytes for w in node.writes), default=0)
        items += [
            Item(loops, reads, sizes, (partial,), False, segment),
            Item(None, (partial,), (0,), (total,), False, segment),
            Item(KernelLoops("pointwise", max(1, out // 4)), (total,), (0,), writes, external, segment),
        ]
        owner += [number, -1, number]
    return tuple(items), owner


class _EventWriter:
    """Writes the events anew."""

    def __init__(
        self, slice_: Slice, regions: Regions, sizes: dict[int, int], kernels: list[FusedKernel]
    ) -> None:
        self.slice, self.regions, self.sizes, self.kernels = slice_, regions, sizes, kernels
        self.operators = list(slice_.operators)
        self.rows: dict[Operator, int] = {}
        self.makers: dict[int, int] = {}  # node -> the kernel that writes what it writes
        self.readers: dict[int, int] = {}
        for number, kernel in enumerate(kernels):
            for node in kernel.nodes:
                if node not in kernel.first:
                    self.makers[node] = number
                if node not in kernel.second:
                    self.readers[node] = number

    def written(self) -> Slice:
        events = self.slice.events
        dropped = np.zeros(len(events), bool)
        dropped[self.regions.replaced_events] = True
        categories = dict(self.slice.block_category)
        new: list[tuple[Key, np.void]] = [(kernel.key, self._event(kernel)) for kernel in self.kernels]
        uses = self._uses()
        outside_blocks = {value.block for value in self.regions.values if value.outside}
        for block, (born, died) in self.regions.owned.items():
            used = uses.get(block)
            if used is None:
                if block not in outside_blocks:
                    dropped[[place for place in (born, died) if place >= 0]] = True
                continue
            makers, users, outside = used
            both = makers | users
            if not outside and len(both) == 1 and all(self.kernels[k].fused for k in both):
                dropped[[place for place in (born, died) if place >= 0]] = True
                continue
            first = min((self.kernels[k] for k in makers), key=lambda kernel: kernel.key)
            last = max((self.kernels[k] for k in both), key=lambda kernel: kernel.key)
            before = (first.key[0], first.key[1] - 0.5)
            new.append((before, self._memory(block, EventKind.ALLOC, before)))
            if born >= 0:
                dropped[born] = True
            else:
                categories[block] = int(Category.ACTIVATION)
            free = self._freed(block, died, first, last, outside)
            if free is not None:
                new.append((free, self._memory(block, EventKind.FREE, free)))
                if died >= 0:
                    dropped[died] = True
        remaining = np.flatnonzero(~dropped)
        positions = np.concatenate([remaining.astype(np.float64), [key[0] for key, _ in new]])
        order = np.concatenate([np.zeros(len(remaining)), [key[1] for key, _ in new]])
        rows = np.concatenate([events[remaining], np.array([row for _, row in new], events.dtype)])
        sequence = np.lexsort((order, positions))
        steps = self._steps(positions[sequence])
        rows = rows[sequence]
        rows["value"][rows["kind"] == EventKind.OP] = 0
        allocated = set(rows["ref"][rows["kind"] == EventKind.ALLOC].tolist())
        return replace(
            self.slice, events=rows, steps=steps, operators=self.operators, flow=np.zeros(0, np.int64),
            block_category={block: what for block, what in categories.items() if block in allocated},
        )  # fmt: skip

    def _steps(self, positions: np.ndarray[tuple[int], np.dtype[np.float64]]) -> list[tuple[int, int]]:
        """The ranges of steps in the new order: an event belongs where the event that it stands at does."""
        return [
            (int(np.searchsorted(positions, begin, "left")), int(np.searchsorted(positions, end, "left")))
            for begin, end in self.slice.steps
        ]

    def _uses(self) -> dict[int, tuple[set[int], set[int], bool]]:
        """Of each block: the kernels that write and that read it, and whether something else reads it."""
        uses: dict[int, tuple[set[int], set[int], bool]] = {}
        for number, node in enumerate(self.regions.nodes):
            if not node.live:
                continue
            for read, is_write in (*((r, False) for r in node.reads), *((w, True) for w in node.writes)):
                value = self.regions.values[read.value]
                if value.block not in self.regions.owned:
                    continue
                makers, users, outside = uses.setdefault(value.block, (set(), set(), False))
                if is_write:
                    makers.add(self.makers[number])
                else:
                    users.add(self.readers[number])
                uses[value.block] = (makers, users, outside or value.outside)
        return uses

    def _freed(
        self, block: int, died: int, first: FusedKernel, last: FusedKernel, outside: bool
    ) -> Key | None:
        """Where ``block`` is freed: None where it is not."""
        after = (last.key[0], last.key[1] + 0.5)
        written, read = (self.regions.nodes[kernel.nodes[0]].graph for kernel in (first, last))
        if outside or (
            read != written and not read[1]
        ):  # who called the region still holds what it was given
            return max(after, (float(died), 0.0)) if died >= 0 else None
        if last.fused and any(self._takes_place(other, block) for other in last.nodes):
            return (last.key[0], last.key[1] - 0.6)
        return after

    def _takes_place(self, node: int, block: int) -> bool:
        """Whether the node writes a new block of the same size, which can have the place of this one."""
        values = self.regions.values
        return any(
            values[write.value].block != block
            and self.sizes.get(values[write.value].block) == self.sizes[block]
            for write in self.regions.nodes[node].writes
        )

    def _memory(self, block: int, kind: EventKind, key: Key) -> np.void:
        """The event that allocates or frees ``block``."""
        row = self.slice.events[ceil(key[0])].copy()
        row["kind"], row["ref"] = int(kind), block
        row["value"] = self.sizes[block] if kind == EventKind.ALLOC else 0
        return row  # type: ignore[no-any-return]

    def _event(self, kernel: FusedKernel) -> np.void:
        nodes = [self.regions.nodes[number] for number in kernel.nodes]
        last = max(nodes, key=lambda node: node.at)
        row = self.slice.events[last.event].copy()
        row["value"] = 0
        if last.graph[1]:
            again = all(node.recomputed for node in nodes)
            row["phase"] = int(Phase.RECOMPUTE if again else Phase.BACKWARD)
        if kernel.fused:
            row["ref"] = self._row(self._operator(kernel))
        return row  # type: ignore[no-any-return]

    def _row(self, op: Operator) -> int:
        row = self.rows.get(op)
        if row is None:
            row = self.rows[op] = len(self.operators)
            self.operators.append(op)
        return row

    def _operator(self, kernel: FusedKernel) -> Operator:
        """The kernel as one operator, on bytes."""
        nodes, values = self.regions.nodes, self.regions.values
        inside = {w.value for n in kernel.nodes if n not in kernel.first for w in nodes[n].writes}
        read: dict[tuple[int, int, int], None] = {}
        written: dict[int, Read] = {}
        names: dict[str, None] = {}
        for number in kernel.nodes:
            node = nodes[number]
            names[base_name(self.slice.operators[node.row].name).strip("_")] = None
            for access in () if number in kernel.second else node.reads:
                if access.value not in inside and access.nbytes:
                    read[values[access.value].block, access.offset, access.nbytes] = None
            for access in () if number in kernel.first else node.writes:
                value = values[access.value]
                if value.outside or any(
                    nodes[user].live and self.readers[user] != self.makers[number] for user in value.users
                ):
                    written[value.block] = access
        reads: dict[int, int] = defaultdict(int)
        for block, _, size in read:
            reads[block] += size
        inputs = tuple(_meta(min(size, self.sizes.get(block, size))) for block, size in reads.items())
        outputs = tuple(_meta(read.nbytes) for read in written.values())
        return Operator("compiled." + "_".join(list(names)[:NAMES]), inputs, outputs)


def _meta(nbytes: int) -> TensorMeta:
    return TensorMeta((nbytes,), "uint8", (1,))
