"""What a compiled region keeps for its backward pass, and what it computes there again.

Without a checkpoint in the region, AOTAutograd's partitioner takes a minimum cut between what the forward
pass is given and what the backward pass reads: the values on the cut are kept, what lies beyond is computed
again.
A value may be computed again where it is pointwise; not where a matrix product or other extern operator of
the backward pass reads it, since then it would have to be written there; and a reduction to less than a
quarter is kept. A kept value weighs its bytes, twice where fusion would have spared writing it in the
forward pass. A region that holds a checkpoint has said itself what is kept, and that is kept of it
which the backward pass needs.

Source: PyTorch 2.13, ``torch/_functorch/partitioners.py`` (``solve_min_cut``, ``should_ban_recomputation``,
``get_node_weight``, ``is_materialized_backwards``).
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import replace
from functools import lru_cache

from windtunnel.training.emulate.twin.compiler.regions import Graph, RegionNode, Regions, RegionValue, graphs

BEFORE = 2.0**-16  # of an event: less than what stands between two events
Edges = tuple[tuple[int, int], ...]


@lru_cache(maxsize=4096)
def minimum_cut(
    weights: tuple[float, ...],
    edges: Edges,
    available: frozenset[int],
    must_keep: frozenset[int],
    targets: frozenset[int],
) -> frozenset[int]:
    """The values to keep, of ``len(weights)``: the least in sum that separate the ``available`` ones, and
    those that must not be computed again (``must_keep``), from the ``targets`` ones. ``edges``: (read, made
    from it)."""
    import networkx as nx  # type: ignore[import-untyped]  # it comes with torch

    cut = nx.DiGraph()
    for value, weight in enumerate(weights):
        cut.add_edge((value, 0), (value, 1), capacity=weight)
        if value in available or value in must_keep:
            cut.add_edge("given", (value, 0))  # without a capacity: unlimited
        if value in targets:
            cut.add_edge((value, 1), "wanted")
    for read, written in edges:
        cut.add_edge((read, 1), (written, 0))
    if "given" not in cut or "wanted" not in cut:
        return frozenset()
    _, (near, _) = nx.minimum_cut(cut, "given", "wanted")
    return frozenset(v for v in range(len(weights)) if (v, 0) in near and (v, 1) not in near)


def partition(regions: Regions, sizes: dict[int, int], next_block: int) -> int:
    """Put copies of what is computed again into the backward graphs of ``regions``.

    ``sizes``: bytes of each block; gets those of the new ones, numbered from ``next_block`` on. Returns the
    next number after them.
    """
    by_graph = dict(graphs(regions))
    checkpointed = {
        regions.nodes[n].graph
        for numbers in by_graph.values()
        for n in numbers
        if regions.nodes[n].recomputed
    }
    for (call, backward), numbers in list(by_graph.items()):
        if backward or (call, True) in checkpointed or (call, True) not in by_graph:
            continue
        again = _computed_again(regions, numbers, sizes, (call, True))
        if again:
            next_block = _copy(regions, numbers, again, sizes, (call, True), next_block)
    return next_block


def _computed_again(regions: Regions, numbers: list[int], sizes: dict[int, int], graph: Graph) -> set[int]:
    """Of the forward graph ``numbers``, the values that the backward graph computes again."""
    nodes, values = regions.nodes, regions.values
    local: dict[int, int] = {}

    def name(value: int) -> int:
        return local.setdefault(value, len(local))

    edges: set[tuple[int, int]] = set()
    weights: dict[int, tuple[int, int]] = {}  # bytes, value
    available: set[int] = set()
    must_keep: set[int] = set()
    targets: set[int] = set()
    for number in numbers:
        node = nodes[number]
        for read in node.reads:
            if not sizes.get(values[read.value].block):
                continue
            if values[read.value].maker not in numbers:
                available.add(name(read.value))
            weights.setdefault(name(read.value), (read.nbytes, read.value))
        for write in node.writes:
            weights[name(write.value)] = (write.nbytes, write.value)
            if not _cheap(node):
                must_keep.add(name(write.value))
            for read in node.reads:
                if sizes.get(values[read.value].block):
                    edges.add((name(read.value), name(write.value)))
    for value, number in local.items():
        readers = [
            nodes[user] for user in values[value].users if nodes[user].live and nodes[user].graph == graph
        ]
        if readers:
            targets.add(number)
            if any(reader.part.loops is None for reader in readers):
                must_keep.add(number)
    if not targets:
        return set()
    order = [weights[number] for number in range(len(local))]
    weighed = tuple(
        float(max(size, 1) * (1 if _written_anyway(values[value], nodes) else 2)) for size, value in order
    )
    chosen = minimum_cut(
        weighed, tuple(sorted(edges)), frozenset(available), frozenset(must_keep), frozenset(targets)
    )
    makers = {number: values[value].maker for value, number in local.items()}
    again: set[int] = set()
    ask = [number for number in targets if number not in chosen]
    back = {number: value for value, number in local.items()}
    while ask:
        number = ask.pop()
        if back[number] in again or makers[number] not in numbers:
            continue
        again.add(back[number])
        for read in nodes[makers[number]].reads:
            if read.value in local and local[read.value] not in chosen:
                ask.append(local[read.value])
    return again


def _cheap(node: RegionNode) -> bool:
    return node.part.loops is not None and node.part.loops.kind == "pointwise"


def _written_anyway(value: RegionValue, nodes: list[RegionNode]) -> bool:
    """Whether the forward pass has to write it: it is given, or an extern operator makes or reads it."""
    if value.maker < 0 or nodes[value.maker].part.loops is None:
        return True
    graph = nodes[value.maker].graph
    return any(nodes[u].part.loops is None for u in value.users if nodes[u].live and nodes[u].graph == graph)


def _copy(
    regions: Regions,
    numbers: list[int],
    again: set[int],
    sizes: dict[int, int],
    graph: Graph,
    next_block: int,
) -> int:
    """Copy the makers of ``again`` into ``graph``, whose nodes read the copies from now on."""
    nodes, values = regions.nodes, regions.values
    makers = [number for number in numbers if any(write.value in again for write in nodes[number].writes)]
    new: dict[int, int] = {}
    blocks: dict[int, int] = {}
    readers: dict[int, list[int]] = defaultdict(list)
    for number, node in enumerate(nodes):
        if node.live and node.graph == graph:
            for read in node.reads:
                readers[read.value].append(number)
    for number in makers:
        node, copy = nodes[number], len(nodes)
        reads = [replace(read, value=new.get(read.value, read.value)) for read in node.reads]
        writes = []
        for write in node.writes:
            if write.value not in again:
                continue
            block = values[write.value].block
            if block not in blocks:
                blocks[block] = next_block
                sizes[next_block] = sizes[block]
                regions.owned[next_block] = (-1, -1)
                next_block += 1
            new[write.value] = len(values)
            values.append(RegionValue(blocks[block], copy))
            writes.append(replace(write, value=new[write.value]))
        nodes.append(
            RegionNode(graph, node.event, node.row, node.part, reads, writes, True, node.at, live=True)
        )
        for read in reads:
            values[read.value].users.append(copy)
    for value, copied in new.items():
        for number in readers[value]:
            nodes[number].reads = [
                replace(r, value=copied) if r.value == value else r for r in nodes[number].reads
            ]
            values[value].users.remove(number)
            values[copied].users.append(number)
    return next_block


def sink(regions: Regions) -> None:
    """Move what is computed again, and what it alone needs of that, to its first reader."""
    nodes, values = regions.nodes, regions.values
    for number in reversed(range(len(nodes))):
        node = nodes[number]
        if not (node.live and node.recomputed):
            continue
        users = [u for write in node.writes for u in values[write.value].users if nodes[u].live]
        if users and not any(values[write.value].outside for write in node.writes):
            node.at = min(nodes[user].at for user in users) - BEFORE
