"""A captured rank as it would be if ``torch.compile`` had compiled its regions.

The capture runs compiled regions eagerly, and writes down which block every operator reads and writes. Here
the regions are done as the compiler does them:

1. *Common and dead code* (`regions`): what is done twice with the same values is done once; an operator whose
   results nobody needs is gone, in a recomputation too, and a value that is kept for it is freed after the
   forward pass.
2. *What is kept* (`regions.partition`): what AOTAutograd's partitioner keeps, or the script's own checkpoint;
   what is computed again is so where it is read, not at the beginning of the backward pass.
3. *Kernels* (`fusion`): loops that share data become one operator ``compiled.NAMES``, which reads every input
   once and writes what is read outside of it. A block whose whole life is within one kernel is never
   allocated.
4. *Memory*: a block is allocated before the kernel that first writes it, and freed after the last that reads
   it, as Inductor's generated code does; a kernel's result may take the place of an input of the same size
   that ends there.

Eager operators, collectives, hooks and the optimiser stay as they are, as do the blocks that they use.
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import replace
from math import ceil

import numpy as np

from windtunnel.training.emulate.graph import EventKind, Operator, Phase, Slice, TensorMeta
from windtunnel.training.emulate.twin.compiler.fusion import FusedKernel, kernels
from windtunnel.training.emulate.twin.compiler.regions import RegionReader, partition, sink
from windtunnel.training.emulate.twin.costs.work import base_name

NAMES = 6  # operators that a kernel is named after

Key = tuple[float, float]
"""Where an event goes: the event that it stands at, and an order among those that stand there."""


def compiled(slice_: Slice) -> Slice:
    """``slice_`` with its regions compiled; itself where it has none. Compiling what came out changes
    nothing."""
    return _Compiler(slice_).written() if len(slice_.flow) else slice_


class _Compiler:
    """Compiles the regions, and writes the events anew."""

    def __init__(self, slice_: Slice) -> None:
        self.slice, self.regions = slice_, RegionReader(slice_).read()
        events = slice_.events
        allocating = events[events["kind"] == EventKind.ALLOC]
        self.sizes = dict(zip(allocating["ref"].tolist(), allocating["value"].tolist(), strict=True))
        partition(self.regions)
        sink(self.regions)
        self.kernels = [k for _, numbers in self.regions.graphs() for k in kernels(self.regions, numbers)]
        self.kernel_of = {node: number for number, k in enumerate(self.kernels) for node in k.nodes}
        self.operators = list(slice_.operators)
        self.rows: dict[Operator, int] = {}

    def written(self) -> Slice:
        events, kernels = self.slice.events, self.kernels
        dropped = np.zeros(len(events), bool)
        dropped[self.regions.replaced_events] = True
        new: list[tuple[Key, np.void]] = [(kernel.key, self._event(kernel)) for kernel in kernels]
        uses = self._uses()
        results = {value.block for value in self.regions.values if value.outside}
        for block, (born, died) in self.regions.owned.items():
            makers, users = uses[block]
            both = makers | users
            inside = len(both) == 1 and all(kernels[k].fused for k in both)
            if not makers and (users or block in results):
                continue  # what wrote it in the region is done once, and it was written outside
            dropped[[place for place in (born, died) if place >= 0]] = True
            if not both or (inside and block not in results):
                continue
            first = min((kernels[k] for k in makers), key=lambda kernel: kernel.key)
            last = max((kernels[k] for k in both), key=lambda kernel: kernel.key)
            before = (first.key[0], first.key[1] - 0.5)
            new.append((before, self._memory(block, EventKind.ALLOC, before)))
            if died >= 0:
                free = self._freed(block, died, first, last, block in results)
                new.append((free, self._memory(block, EventKind.FREE, free)))
        remaining = np.flatnonzero(~dropped)
        positions = np.concatenate([remaining.astype(np.float64), [key[0] for key, _ in new]])
        order = np.concatenate([np.zeros(len(remaining)), [key[1] for key, _ in new]])
        rows = np.concatenate([events[remaining], np.array([row for _, row in new], events.dtype)])
        sequence = np.lexsort((order, positions))
        rows, positions = rows[sequence], positions[sequence]
        rows["value"][rows["kind"] == EventKind.OP] = 0
        # An event belongs to the step that the event does which it stands at.
        ends = np.searchsorted(positions, np.array(self.slice.steps, np.float64)).tolist()
        allocated = set(rows["ref"][rows["kind"] == EventKind.ALLOC].tolist())
        return replace(
            self.slice, events=rows, steps=[(begin, end) for begin, end in ends], operators=self.operators,
            flow=np.zeros(0, np.int64), block_category={
                block: what for block, what in self.slice.block_category.items() if block in allocated
            },
        )  # fmt: skip

    def _uses(self) -> dict[int, tuple[set[int], set[int]]]:
        """Of each block: the kernels that write, and that read it."""
        uses: dict[int, tuple[set[int], set[int]]] = defaultdict(lambda: (set(), set()))
        for number, kernel in self.kernel_of.items():
            node = self.regions.nodes[number]
            for way, accesses in enumerate((node.writes, node.reads)):
                for access in accesses:
                    uses[self.regions.values[access.value].block][way].add(kernel)
        return uses

    def _freed(self, block: int, died: int, first: FusedKernel, last: FusedKernel, result: bool) -> Key:
        """Where ``block`` is freed, which is at ``died`` in eager mode."""
        after = (last.key[0], last.key[1] + 0.5)
        written, read = (self.regions.nodes[kernel.nodes[0]].graph for kernel in (first, last))
        if result or (read != written and not read[1]):
            return max(after, (float(died), 0.0))  # who called the region still holds what it was given
        if last.fused and any(self._takes_place(node, block) for node in last.nodes):
            return (last.key[0], last.key[1] - 0.6)
        return after

    def _takes_place(self, node: int, block: int) -> bool:
        """Whether the node writes a new block of the same size, which can have the place of this one."""
        others = [self.regions.values[write.value].block for write in self.regions.nodes[node].writes]
        return any(other != block and self.sizes.get(other) == self.sizes[block] for other in others)

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
        if last.graph[1]:
            again = all(node.recomputed for node in nodes)
            row["phase"] = int(Phase.RECOMPUTE if again else Phase.BACKWARD)
        if kernel.fused:
            op = self._operator(kernel)
            if op not in self.rows:
                self.rows[op] = len(self.operators)
                self.operators.append(op)
            row["ref"] = self.rows[op]
        return row  # type: ignore[no-any-return]

    def _operator(self, kernel: FusedKernel) -> Operator:
        """The kernel as one operator, on bytes."""
        nodes, values = [self.regions.nodes[number] for number in kernel.nodes], self.regions.values
        inside = {write.value for node in nodes for write in node.writes}
        names = [base_name(self.slice.operators[node.row].name).strip("_") for node in nodes]
        reads: dict[int, int] = defaultdict(int)
        for access in dict.fromkeys(read for node in nodes for read in node.reads):
            if access.value not in inside and access.nbytes:
                reads[values[access.value].block] += access.nbytes
        written: dict[int, int] = {}
        for node in nodes:
            for access in node.writes:
                value = values[access.value]
                if value.outside or not set(value.users) <= set(kernel.nodes):
                    written[value.block] = access.nbytes
        inputs = tuple(_meta(min(size, self.sizes.get(block, size))) for block, size in reads.items())
        outputs = tuple(_meta(size) for size in written.values())
        return Operator("compiled." + "_".join(list(dict.fromkeys(names))[:NAMES]), inputs, outputs)


def _meta(nbytes: int) -> TensorMeta:
    return TensorMeta((nbytes,), "uint8", (1,))
