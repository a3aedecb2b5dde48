"""What a graph file holds, counted: nodes by type, bytes by collective, the longest chain of dependencies."""

from __future__ import annotations

from collections import Counter, defaultdict
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from windtunnel.base.errors import UserError
from windtunnel.report.chakra import (
    COMM_COLL,
    COMM_RECV,
    COMM_SEND,
    COMM_TYPES,
    NODE_TYPES,
    GraphNodes,
    Longs,
)


@dataclass(frozen=True)
class Communication:
    """All collectives of a kind over a group (or messages of a direction): ``count`` nodes, ``bytes`` in all,
    ``seconds`` in all."""

    kind: str
    group: str
    count: int
    bytes: int
    seconds: float


@dataclass(frozen=True)
class GraphFacts:
    """``types``: nodes by type. ``absent``: dependencies on nodes that are not in the file (traces that other
    tools have thinned out have some; they count for nothing). ``depth``: nodes on the longest chain of
    dependencies; ``chain_seconds``: the largest sum of durations along a chain, ``chain``: its nodes (places
    in the graph) from first to last."""

    nodes: int
    dependencies: int
    absent: int
    types: dict[str, int]
    communication: list[Communication]
    depth: int
    chain_seconds: float
    chain: list[int]
    busy_seconds: float


def facts(path: Path, nodes: GraphNodes) -> GraphFacts:
    """Count ``nodes``, read from ``path``.

    Raises `UserError` when two nodes have one id, or dependencies go round in a circle.
    """
    depth, seconds, before, absent = _chains(path, nodes)
    chain: list[int] = []
    if len(nodes):
        node = int(seconds.argmax())
        while node >= 0:
            chain.append(node)
            node = int(before[node])
    types = Counter(NODE_TYPES[kind] for kind in nodes.type.tolist())
    return GraphFacts(
        nodes=len(nodes), dependencies=len(nodes.data_deps) + len(nodes.ctrl_deps), absent=absent,
        types=dict(types.most_common()), communication=_communication(nodes), depth=int(depth.max(initial=0)),
        chain_seconds=float(seconds.max(initial=0.0)), chain=chain[::-1],
        busy_seconds=float(nodes.duration.sum()),
    )  # fmt: skip


def attributes(nodes: GraphNodes, node: int) -> dict[str, Any]:
    """The attributes of a node, ``comm_type`` as a word."""
    facts = dict(nodes.attributes[int(nodes.attribute[node])])
    if "comm_type" in facts and nodes.type[node] == COMM_COLL:
        facts["comm_type"] = _collective(facts["comm_type"])
    return facts


def dependencies(nodes: GraphNodes, node: int) -> list[int]:
    """The ids of all nodes that a node needs or follows."""
    data = nodes.data_deps[nodes.data_ptr[node] : nodes.data_ptr[node + 1]].tolist()
    ctrl = nodes.ctrl_deps[nodes.ctrl_ptr[node] : nodes.ctrl_ptr[node + 1]].tolist()
    return sorted({*data, *ctrl})


def _collective(number: Any) -> str:
    in_range = isinstance(number, int) and 0 <= number < len(COMM_TYPES)
    return COMM_TYPES[number] if in_range else f"collective {number}"


def _communication(nodes: GraphNodes) -> list[Communication]:
    counts: dict[tuple[str, str], int] = defaultdict(int)
    total: dict[tuple[str, str], int] = defaultdict(int)
    spent: dict[tuple[str, str], float] = defaultdict(float)
    for node in np.flatnonzero(np.isin(nodes.type, (COMM_COLL, COMM_SEND, COMM_RECV))).tolist():
        kind = int(nodes.type[node])
        attributes = nodes.attributes[int(nodes.attribute[node])]
        word = {COMM_SEND: "send", COMM_RECV: "recv"}.get(kind) or _collective(attributes.get("comm_type", 0))
        key = (word, str(attributes.get("group") or attributes.get("pg_name", "")))
        counts[key] += 1
        total[key] += int(attributes.get("comm_size", 0))
        spent[key] += float(nodes.duration[node])
    keys = sorted(counts, key=lambda key: (-total[key], key))
    return [Communication(*key, counts[key], total[key], spent[key]) for key in keys]


def _chains(path: Path, nodes: GraphNodes) -> tuple[Longs, NDArray[np.float64], Longs, int]:
    """For each node the nodes and the seconds of the longest chain that ends with it, and the node before it
    on the latter (-1: none); and how many dependencies name absent nodes."""
    n = len(nodes)
    place = {number: i for i, number in enumerate(nodes.id.tolist())}
    if len(place) < n:
        raise UserError(f"{path}: two nodes have the same id")
    owner = np.concatenate(
        [np.repeat(np.arange(n), np.diff(ptr)) for ptr in (nodes.data_ptr, nodes.ctrl_ptr)]
    ).tolist()
    followers: list[list[int]] = [[] for _ in range(n)]
    missing = [0] * n
    absent = 0
    for node, needed in zip(owner, [*nodes.data_deps.tolist(), *nodes.ctrl_deps.tolist()], strict=True):
        if needed not in place:
            absent += 1
            continue
        followers[place[needed]].append(node)
        missing[node] += 1
    depth, before = [1] * n, [-1] * n
    own = nodes.duration.tolist()
    seconds, reach = list(own), [0.0] * n
    ready = [node for node in range(n) if not missing[node]]
    for node in ready:  # grows while it is read: every node once, after all that it needs
        for follower in followers[node]:
            depth[follower] = max(depth[follower], depth[node] + 1)
            if before[follower] < 0 or seconds[node] > reach[follower]:
                before[follower], reach[follower] = node, seconds[node]
                seconds[follower] = seconds[node] + own[follower]
            missing[follower] -= 1
            if not missing[follower]:
                ready.append(follower)
    if len(ready) < n:
        stuck = next(node for node in range(n) if missing[node])
        raise UserError(f"{path}: the dependencies of node {nodes.id[stuck]} go round in a circle")
    return np.array(depth, np.int64), np.array(seconds, np.float64), np.array(before, np.int64), absent
