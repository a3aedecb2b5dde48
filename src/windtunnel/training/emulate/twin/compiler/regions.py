"""The compiled regions of a captured rank as graphs of nodes and values.

Each call of a region is two graphs, as AOTAutograd has them: what its forward pass did, and what its
backward pass did, with what was recomputed for it (a checkpoint inside of the region). A *node* is a captured
operator with its loops (`loops`), a *value* what a node wrote into a block of memory: a block that is written
again holds another value. Views are no nodes, and neither is what FSDP's hooks do while the backward pass of
a region is under way: packing, and whatever runs on another stream.

A node that does what another of its graph did with the same values is none: what it would write is the
other's (``torch/_functorch/compile_utils.py``, ``fx_graph_cse``), so three projections that cast their input
to float8 cast it once. What is random stays.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np

from windtunnel.training.emulate.graph import Category, EventKind, Operator, Phase, Slice
from windtunnel.training.emulate.twin.compiler.loops import NEVER, KernelLoops, loops_of
from windtunnel.training.emulate.twin.costs.work import OVERWRITES, base_name, kind_of, stored_bytes

Graph = tuple[int, bool]
"""The call of a region, and whether it is the graph of its backward pass."""

FIXED = (Category.PARAMETER, Category.OPTIMIZER, Category.COMMUNICATION)
"""What such blocks hold lives as long as the script says, whatever a compiler makes of the region."""

RANDOM = ("rand", "dropout", "bernoulli", "normal", "uniform", "multinomial", "exponential")
MOST_PARTS = 6  # that a value is computed again from: a residual stream is not added up from its beginning
BEFORE = 2.0**-16  # of an event: less than what stands between two events


@dataclass(slots=True)
class RegionValue:
    """What ``maker`` (a node, -1: something outside of all regions) wrote into ``block``; ``users``: live
    nodes. ``outside``: it is read by something outside of all regions, or outlives them."""

    block: int
    maker: int
    users: list[int] = field(default_factory=list)
    outside: bool = False


class Access(NamedTuple):
    """Of ``value``, ``nbytes`` from byte ``offset`` of its block on; 0 bytes: that it was written must be
    known, no more."""

    value: int
    offset: int
    nbytes: int


@dataclass(slots=True)
class RegionNode:
    """``event`` is where the operator stands, ``at`` where the node does (a recomputed one moves to its first
    reader). ``row`` of the operator table. ``live``: somebody needs what it writes."""

    graph: Graph
    event: int
    row: int
    loops: KernelLoops | None
    reads: list[Access]
    writes: list[Access]
    recomputed: bool
    at: float
    live: bool = False

    @property
    def is_pointwise(self) -> bool:
        return self.loops is not None and self.loops.kind == "pointwise"

    @property
    def is_norm(self) -> bool:
        """Whether it writes statistics of rows after what comes of these."""
        return self.loops is not None and self.loops.kind == "row" and len(self.writes) > 1


@dataclass
class Regions:
    """The ``nodes`` in the order of events, the ``values``, the events that the graphs take the place of, and
    of each block that a graph makes (``owned``) where it is allocated and freed (-1: never). Nothing is fused
    across ``segment`` (of each event): a collective, a wait for another stream."""

    nodes: list[RegionNode]
    values: list[RegionValue]
    replaced_events: list[int]
    owned: dict[int, tuple[int, int]]
    segment: np.ndarray[tuple[int], np.dtype[np.int64]]

    def link(self) -> None:
        """Find the live nodes, and the users of all values."""
        for value in self.values:
            value.users = []
        for number in reversed(range(len(self.nodes))):
            node = self.nodes[number]
            written = [self.values[write.value] for write in node.writes]
            node.live = not written or any(value.outside or value.users for value in written)
            for read in node.reads if node.live else ():
                self.values[read.value].users.append(number)

    def graphs(self) -> Iterator[tuple[Graph, list[int]]]:
        """The live nodes of each graph, in order."""
        by_graph: dict[Graph, list[int]] = {}
        for number, node in enumerate(self.nodes):
            if node.live:
                by_graph.setdefault(node.graph, []).append(number)
        yield from by_graph.items()


class RegionReader:
    """Reads the regions of a slice, which has some."""

    def __init__(self, slice_: Slice) -> None:
        self.slice = slice_
        self.flow = slice_.flow.tolist()
        self.operators = slice_.operators
        self.loops: dict[int, KernelLoops | None] = {}  # of a row of the operator table
        self.nodes: list[RegionNode] = []
        self.values: list[RegionValue] = []
        self.done: dict[tuple[object, ...], list[Access]] = {}  # what was done, and the results
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
            self._node(row, event, (call, not forward), phase == Phase.RECOMPUTE, reads, writes)
        owned = {
            block: (self.born[block], self.died.get(block, -1))
            for block, node in self.first.items()
            if node >= 0 and block in self.born and block not in self.fixed
        }
        self._outlive(owned)
        regions = Regions(self.nodes, self.values, replaced_events, owned, self.segment)
        regions.link()
        return regions

    def _entry(self, at: int) -> tuple[int, list[tuple[int, int]], list[tuple[int, int]]]:
        call, reads, writes = self.flow[at : at + 3]
        pairs = list(zip(self.flow[at + 3 : at + 3 + 2 * (reads + writes) : 2],
                         self.flow[at + 4 : at + 4 + 2 * (reads + writes) : 2], strict=False))  # fmt: skip
        return call, pairs[:reads], pairs[reads : reads + writes]

    def _value(self, block: int, maker: int) -> int:
        self.values.append(RegionValue(block, maker))
        self.current[block] = len(self.values) - 1
        self.first.setdefault(block, maker)
        return self.current[block]

    def _outside(self, reads: list[tuple[int, int]], writes: list[tuple[int, int]]) -> None:
        for block, _ in (*reads, *writes):
            if block in self.current:
                self.values[self.current[block]].outside = True
        for block, _ in writes:
            if block >= 0:
                self._value(block, -1)

    def _node(
        self, row: int, event: int, graph: Graph, recomputed: bool,
        reads: list[tuple[int, int]], writes: list[tuple[int, int]],
    ) -> None:  # fmt: skip
        op, number = self.operators[row], len(self.nodes)
        if row not in self.loops:
            self.loops[row] = loops_of(op)
        accessed = []
        sources = list(zip(reads, op.tensors(), strict=False))
        if self.loops[row]:  # an extern operator is left as it is
            sources = sources[slice(*_only_read(op))]
        for (block, offset), tensor in sources:
            if block >= 0:
                value = self.current[block] if block in self.current else self._value(block, -1)
                accessed.append(Access(value, offset, stored_bytes(tensor)))
        made = [
            (block, offset, stored_bytes(tensor))
            for (block, offset), tensor in zip(writes, op.outputs, strict=False)
            if block >= 0
        ]
        for block, _, size in made:
            if block in self.current and size < self.bytes.get(block, 0):
                accessed.append(Access(self.current[block], 0, 0))  # the rest of the block stays
        done = (graph, op.name, op.inputs, op.outputs, *accessed)
        if done in self.done:
            for (block, _, _), same in zip(made, self.done[done], strict=True):
                self.first.setdefault(block, number)
                self.current[block] = same.value
            return
        written = [Access(self._value(block, number), offset, size) for block, offset, size in made]
        if self.loops[row] and not any(word in op.name for word in RANDOM):
            self.done[done] = written
        for read in accessed:
            self.values[read.value].users.append(number)
        node = RegionNode(graph, event, row, self.loops[row], accessed, written, recomputed, float(event))
        self.nodes.append(node)

    def _outlive(self, owned: dict[int, tuple[int, int]]) -> None:
        """Mark what nobody reads although it is held until later: a result of the region."""
        last = {node.graph: node.event for node in self.nodes}
        for number, value in enumerate(self.values):
            if value.maker < 0 or self.current[value.block] != number:
                continue  # written over by another node, if it is not from outside
            died = owned.get(value.block, (0, -1))[1]
            late = not value.users and died > last[self.nodes[value.maker].graph]
            value.outside |= value.block not in owned or died < 0 or late


def _compiles(op: Operator) -> bool:
    base = base_name(op.name)
    return base not in NEVER and not base.startswith("_foreach")


def _only_read(op: Operator) -> tuple[int, int | None]:
    """The range of an operator's tensors that it reads: some are only written."""
    if op.name.endswith(".out"):
        return 0, -1
    return int(base_name(op.name) in OVERWRITES), None


def partition(regions: Regions) -> None:
    """Let the backward graphs compute again what is cheap, from what is kept for them.

    A value may be computed again where it is pointwise; not where a matrix product or other extern operator
    of the backward pass reads it, since then it would have to be written there. It is computed again where
    what has to be kept for that, and is not kept anyway, weighs no more than itself: its bytes, twice where
    fusion would have spared writing it in the forward pass. Long chains are cut. That is AOTAutograd's
    minimum cut (``torch/_functorch/partitioners.py``), looked for one value after the other. A region that
    holds a checkpoint has said itself what is kept.

    Whoever reads such a value reads what it is made of.
    """
    nodes = regions.nodes
    by_graph = dict(regions.graphs())
    checkpointed = {node.graph for node in nodes if node.recomputed}
    for (call, backward), numbers in by_graph.items():
        graph = (call, True)
        if backward or graph in checkpointed or graph not in by_graph:
            continue
        made_of = _made_of(regions, numbers, by_graph[graph])
        for number in by_graph[graph]:
            reads = [made_of.get(read.value, (read,)) for read in nodes[number].reads]
            nodes[number].reads = list(dict.fromkeys(read for part in reads for read in part))
    regions.link()


def _made_of(regions: Regions, forward: list[int], backward: list[int]) -> dict[int, tuple[Access, ...]]:
    """The values that a backward graph computes again, and of what."""
    nodes, values = regions.nodes, regions.values
    wanted = {read.value for number in backward for read in nodes[number].reads}
    fixed = {read.value for number in backward if not nodes[number].loops for read in nodes[number].reads}

    def weight(access: Access) -> int:
        value = values[access.value]
        touching = [number for number in (value.maker, *value.users) if number not in reread]
        written = value.maker < 0 or any(nodes[number].loops is None for number in touching)
        return access.nbytes * (1 if written else 2)

    reread = set(backward)
    cheap: dict[int, tuple[Access, list[Access]]] = {}  # what is written, and of what that is made
    for node in (nodes[number] for number in forward):
        again = 1 if node.is_norm else len(node.writes) if node.is_pointwise else 0
        for written in node.writes[:again]:
            if written.value not in fixed:
                cheap[written.value] = written, [*node.reads, *node.writes[again:]]
    kept = wanted - cheap.keys()
    made_of: dict[int, tuple[Access, ...]] = {}
    for value, (written, reads) in cheap.items():
        parts = tuple(dict.fromkeys(part for read in reads for part in made_of.get(read.value, (read,))))
        if value in wanted:
            missing = sum(weight(part) for part in parts if part.value not in kept)
            if missing > weight(written) or len(parts) > MOST_PARTS:
                kept.add(value)
                continue
            kept.update(part.value for part in parts)
        made_of[value] = parts
    return made_of


def sink(regions: Regions) -> None:
    """Move what is computed again for a checkpoint, and what it alone needs of that, to its first reader."""
    for node in reversed(regions.nodes):
        values = [regions.values[write.value] for write in node.writes]
        users = [user for value in values for user in value.users]
        if node.live and node.recomputed and users and not any(value.outside for value in values):
            node.at = min(regions.nodes[user].at for user in users) - BEFORE
