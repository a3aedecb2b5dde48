"""The compiled regions of a captured rank as graphs of nodes and values.

Each call of a region is two graphs, as AOTAutograd has them: what its forward pass did, and what its
backward pass did, with what was recomputed for it (a checkpoint inside of the region). A *node* is a part of
a captured operator (`loops`), a *value* what a node wrote into a block of memory: a block that is written
again holds another value. Views are no nodes, and neither is what FSDP's hooks do while the backward pass of
a region is under way: packing, and whatever runs on another stream.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field, replace

import numpy as np

from windtunnel.training.emulate.graph import Category, EventKind, Operator, Phase, Slice
from windtunnel.training.emulate.twin.compiler.loops import NEVER, KernelPart, parts_of
from windtunnel.training.emulate.twin.costs.work import base_name, kind_of, stored_bytes

Graph = tuple[int, bool]
"""The call of a region, and whether it is the graph of its backward pass."""

FIXED = (Category.PARAMETER, Category.OPTIMIZER, Category.COMMUNICATION)
"""What such blocks hold lives as long as the script says, whatever a compiler makes of the region."""


@dataclass(slots=True)
class RegionValue:
    """What ``maker`` (a node, -1: something outside of all regions) wrote into ``block``. ``outside``: it is
    read by something outside of all regions, or outlives them. A block of -1 is no memory."""

    block: int
    maker: int
    users: list[int] = field(default_factory=list)
    outside: bool = False


@dataclass(frozen=True, slots=True)
class Read:
    """Of ``value``, ``nbytes`` from byte ``offset`` of its block on; 0 bytes: that it was written must be
    known, no more."""

    value: int
    offset: int
    nbytes: int


@dataclass(slots=True)
class RegionNode:
    """``event`` is where the operator stands, ``at`` where the node does (a recomputed one moves to its first
    reader). ``writes``: value, offset and bytes. ``row`` of the operator table. ``merged``: another node
    stands for it."""

    graph: Graph
    event: int
    row: int
    part: KernelPart
    reads: list[Read]
    writes: list[Read]
    recomputed: bool
    at: float
    live: bool = False
    merged: bool = False


@dataclass
class Regions:
    """The ``nodes`` in the order of events, the ``values``, the events that the graphs take the place of, and
    of each block that a graph makes (``owned``) where it is allocated and freed (-1: never)."""

    nodes: list[RegionNode]
    values: list[RegionValue]
    replaced_events: list[int]
    owned: dict[int, tuple[int, int]]
    segment: np.ndarray[tuple[int], np.dtype[np.int64]]


def read_regions(slice_: Slice) -> Regions:
    """The regions of ``slice_``, which has some."""
    return _RegionReader(slice_).read()


class _RegionReader:
    def __init__(self, slice_: Slice) -> None:
        self.slice = slice_
        self.flow = slice_.flow.tolist()
        self.operators = slice_.operators
        self.parts: dict[int, tuple[KernelPart, ...]] = {}
        self.nodes: list[RegionNode] = []
        self.values: list[RegionValue] = []
        self.current: dict[int, int] = {}  # block -> its value
        self.first: dict[int, int] = {}  # block -> the node that wrote it first, -1 for something outside
        self.streams: dict[int, int] = {}
        events = slice_.events
        kind, ref = events["kind"], events["ref"]
        alloc, free = np.flatnonzero(kind == EventKind.ALLOC), np.flatnonzero(kind == EventKind.FREE)
        self.born = dict(zip(ref[alloc].tolist(), alloc.tolist(), strict=True))
        self.bytes = dict(zip(ref[alloc].tolist(), events["value"][alloc].tolist(), strict=True))
        self.died = dict(zip(ref[free].tolist(), free.tolist(), strict=True))
        streamed = ref[kind == EventKind.RECORD_STREAM].tolist()
        fixed_blocks = (block for block, what in slice_.block_category.items() if what in FIXED)
        self.fixed = {*streamed, *fixed_blocks, *slice_.communicated.tolist()}
        cuts = np.isin(kind, (EventKind.COLLECTIVE, EventKind.WORK_WAIT, EventKind.SYNC, EventKind.STEP))
        self.segment = np.cumsum(cuts | ((kind == EventKind.WAIT) & (events["stream"] == 0)))

    def read(self) -> Regions:
        events = self.slice.events
        at = np.flatnonzero((events["kind"] == EventKind.OP) & (events["value"] > 0))
        columns = (at, *(events[name][at] for name in ("ref", "value", "stream", "phase")))
        replaced_events = []
        for event, row, place, stream, phase in zip(*(c.tolist() for c in columns), strict=True):
            call, reads, writes = self._entry(place - 1)
            op = self.operators[row]
            inside = call > 0 and self.streams.setdefault(call, stream) == stream and _compiles(op)
            if kind_of(op) == "view":
                if inside:
                    replaced_events.append(event)
                continue
            if not inside:
                self._outside(reads, writes)
                continue
            replaced_events.append(event)
            forward = bool(op.region) or phase in (Phase.FORWARD, Phase.OTHER)
            self._node(op, row, event, (call, not forward), phase == Phase.RECOMPUTE, reads, writes)
        owned = {
            block: (self.born[block], self.died.get(block, -1))
            for block, node in self.first.items()
            if node >= 0 and block in self.born and block not in self.fixed
        }
        self._outlive(owned)
        return Regions(self.nodes, self.values, replaced_events, owned, self.segment)

    def _entry(self, at: int) -> tuple[int, list[tuple[int, int]], list[tuple[int, int]]]:
        call, reads, writes = self.flow[at : at + 3]
        pairs = list(zip(self.flow[at + 3 : at + 3 + 2 * (reads + writes) : 2],
                         self.flow[at + 4 : at + 4 + 2 * (reads + writes) : 2], strict=False))  # fmt: skip
        return call, pairs[:reads], pairs[reads : reads + writes]

    def _value(self, block: int, maker: int) -> int:
        self.values.append(RegionValue(block, maker))
        number = len(self.values) - 1
        if block >= 0:
            self.current[block] = number
            self.first.setdefault(block, maker)
        return number

    def _outside(self, reads: list[tuple[int, int]], writes: list[tuple[int, int]]) -> None:
        for block, _ in (*reads, *writes):
            if block in self.current:
                self.values[self.current[block]].outside = True
        for block, _ in writes:
            if block >= 0:
                self._value(block, -1)

    def _node(
        self, op: Operator, row: int, event: int, graph: Graph, recomputed: bool,
        reads: list[tuple[int, int]], writes: list[tuple[int, int]],
    ) -> None:  # fmt: skip
        if row not in self.parts:
            self.parts[row] = parts_of(op)
        available: dict[int, Read] = {}
        for place in sorted({place for part in self.parts[row] for place in part.reads}):
            block, offset = reads[place] if place < len(reads) else (-1, 0)
            if block >= 0:
                value = self.current[block] if block in self.current else self._value(block, -1)
                available[place] = Read(value, offset, stored_bytes(op.tensors()[place]))
        before = {block: self.current.get(block) for block, _ in writes}
        produced: dict[int, Read] = {}
        for part in self.parts[row]:
            number = len(self.nodes)
            node = RegionNode(graph, event, row, part, [], [], recomputed, float(event))
            for place in part.reads:
                if place in available:
                    node.reads.append(available[place])
            node.reads += [produced[place] for place in part.again if place in produced]
            for place in part.writes:
                if place >= len(writes) or writes[place][0] < 0:
                    continue
                block, offset = writes[place]
                size = stored_bytes(op.outputs[place]) if place < len(op.outputs) else 0
                old = before.get(block)
                if old is not None and size < self.bytes.get(block, 0):
                    node.reads.append(Read(old, 0, 0))  # a part of the block is written, the rest stays
                produced[place] = Read(self._value(block, number), offset, size)
                node.writes.append(produced[place])
            for read in node.reads:
                self.values[read.value].users.append(number)
            self.nodes.append(node)

    def _outlive(self, owned: dict[int, tuple[int, int]]) -> None:
        """Mark what nobody reads although it is held until later: a result of the region."""
        last: dict[Graph, int] = {}
        for node in self.nodes:
            last[node.graph] = node.event
        for number, value in enumerate(self.values):
            if value.maker < 0 or self.current[value.block] != number:
                continue  # written over by another node, if it is not from outside
            died = owned.get(value.block, (0, -1))[1]
            if (
                value.block not in owned
                or died < 0
                or (not value.users and died > last[self.nodes[value.maker].graph])
            ):
                value.outside = True


def _compiles(op: Operator) -> bool:
    base = base_name(op.name)
    return base not in NEVER and not base.startswith("_foreach")


RANDOM = ("rand", "dropout", "bernoulli", "normal", "uniform", "multinomial", "exponential")


def merge_equal(regions: Regions, operators: list[Operator]) -> None:
    """Let one node stand for all of its graph that do the same with the same values, as AOTAutograd does
    (``torch/_functorch/compile_utils.py``, ``fx_graph_cse``): three projections that cast their input to
    float8 cast it once. What is random, in place, or read outside of the regions stays."""
    nodes, values = regions.nodes, regions.values
    written = Counter(value.block for value in values)
    stands: dict[int, int] = {}  # value -> the one that it equals
    first_nodes: dict[tuple[object, ...], RegionNode] = {}
    for number, node in enumerate(nodes):
        for place, read in enumerate(node.reads):
            if read.value in stands:
                node.reads[place] = replace(read, value=stands[read.value])
                values[read.value].users.remove(number)
                values[stands[read.value]].users.append(number)
        op = operators[node.row]
        once = all(written[values[w.value].block] == 1 and not values[w.value].outside for w in node.writes)
        if node.part.loops is None or not once or any(word in op.name for word in RANDOM):
            continue
        same = first_nodes.setdefault(
            (node.graph, op.name, op.inputs, op.outputs, node.part, *node.reads), node
        )
        if same is node:
            continue
        for mine, other in zip(node.writes, same.writes, strict=True):
            stands[mine.value] = other.value
        for read in node.reads:
            values[read.value].users.remove(number)
        node.reads, node.writes = [], []
        node.merged = True


def mark_live(regions: Regions) -> None:
    """Mark the nodes whose results somebody needs; the others are not in a compiled graph."""
    nodes, values = regions.nodes, regions.values
    for node in reversed(nodes):
        needed = not node.writes or any(
            values[write.value].outside or any(nodes[user].live for user in values[write.value].users)
            for write in node.writes
        )
        node.live = needed and not node.merged


def graphs(regions: Regions) -> Iterator[tuple[Graph, list[int]]]:
    """The live nodes of each graph, in order."""
    by_graph: dict[Graph, list[int]] = {}
    for number, node in enumerate(regions.nodes):
        if node.live:
            by_graph.setdefault(node.graph, []).append(number)
    for graph, numbers in by_graph.items():
        yield graph, sorted(numbers, key=lambda n: (regions.nodes[n].at, n))
