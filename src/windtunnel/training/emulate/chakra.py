"""The steady step of a class of ranks as the nodes of a Chakra execution trace.

Every node of the replayed program becomes a node of the trace: an operator, a collective, a message, or a
wait of the host. Its data dependencies are what the replay waits for: the node before it on its queue, and
the waits on events. The attributes are those that ASTRA-sim's feeder reads (``comm_type``, ``comm_size``,
``pg_name``, ``num_ops``, ``tensor_size``, ``is_cpu_op``, ``comm_src``, ``comm_dst``, ``comm_tag``).
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from windtunnel.report.chakra import GraphNodes
from windtunnel.report.chakra_schema import COMM_COLL, COMM_RECV, COMM_SEND, COMM_TYPES, COMP
from windtunnel.training.emulate.graph import EventKind
from windtunnel.training.emulate.run import Outcome
from windtunnel.training.emulate.twin.cost.collectives import full_bytes
from windtunnel.training.emulate.twin.cost.operators import cost_of


def graph_nodes(outcome: Outcome, row: int) -> GraphNodes:
    """The nodes of class ``row`` of ``outcome``; durations are emulated seconds, as replayed."""
    step = outcome.timing.flight.programs[row]
    queue = step.program.queue[: step.nodes]
    events = step.slice.events[step.event]
    names: dict[str, int] = {}
    rows: dict[tuple[int, int, int], int] = {}
    described: list[tuple[int, int, dict[str, Any]]] = []  # name, type, attributes
    which = np.zeros(step.nodes, np.int64)
    # What a host waits for (SYNC) is in the dependencies: all such nodes of a queue look alike.
    refs = np.where(events["kind"] == EventKind.SYNC, -1, events["ref"])
    for node, key in enumerate(zip(events["kind"].tolist(), refs.tolist(), queue.tolist(), strict=True)):
        if key not in rows:
            rows[key] = len(described)
            text, kind, attributes = _describe(outcome, row, EventKind(key[0]), key[1])
            described.append((names.setdefault(text, len(names)), kind, attributes | {"stream": key[2]}))
        which[node] = rows[key]
    pointer, dependencies = _dependencies(outcome, row)
    cls = outcome.classes.classes[row]
    return GraphNodes(
        id=np.arange(step.nodes, dtype=np.int64),
        name=np.array([name for name, _, _ in described], np.int32)[which],
        names=list(names),
        type=np.array([kind for _, kind, _ in described], np.int32)[which],
        duration=_durations(outcome, row),
        data_ptr=pointer,
        data_deps=dependencies,
        ctrl_ptr=np.zeros(step.nodes + 1, np.int64),
        ctrl_deps=np.zeros(0, np.int64),
        attribute=which.astype(np.int32),
        attributes=[attributes for _, _, attributes in described],
        metadata={
            "rank_class": cls.name,
            "ranks": len(cls.members),
            "first_rank": int(cls.members[0]),
            "world_size": outcome.cluster.world_size,
            "cluster": outcome.cluster.name,
            "durations": "emulated",
        },
    )


def _describe(outcome: Outcome, row: int, kind: EventKind, ref: int) -> tuple[str, int, dict[str, Any]]:
    """Name, node type and attributes of a node."""
    cls = outcome.classes.classes[row]
    if kind == EventKind.OP:
        op = cls.slice.operators[ref]
        cost = cost_of(op, outcome.cluster.host.device)
        on_host = outcome.cluster.host.device.kind == "cpu"
        return (
            op.name,
            COMP,
            {"is_cpu_op": on_host, "num_ops": int(cost.flops), "tensor_size": int(cost.bytes)},
        )
    if kind != EventKind.COLLECTIVE:
        return "wait", COMP, {"is_cpu_op": True}
    call = cls.slice.collectives[ref]
    group = cls.slice.groups[call.group]
    size = full_bytes(call, len(group.ranks))
    common = {
        "is_cpu_op": call.backend == "gloo",
        "comm_size": size,
        "pg_name": group.name,
        "group": group.label,
    }
    me = cls.slice.rank
    if call.kind == "send":
        return "send", COMM_SEND, common | {"comm_src": me, "comm_dst": call.peer, "comm_tag": 0}
    if call.kind == "recv":
        return "recv", COMM_RECV, common | {"comm_src": call.peer, "comm_dst": me, "comm_tag": 0}
    return call.kind, COMM_COLL, common | {"comm_type": COMM_TYPES.index(call.kind)}


def _durations(outcome: Outcome, row: int) -> NDArray[np.float64]:
    """Seconds of each node in the last step; of collectives the transfer, without waiting for members."""
    flight, result = outcome.timing.flight, outcome.timing.result
    nodes = flight.programs[row].nodes
    colour = int(flight.colour[outcome.classes.classes[row].members[0]])
    start, end = result.of(colour)
    seconds: NDArray[np.float64] = (end - start)[-nodes:]
    host = flight.programs[row].program.queue[:nodes] == 0
    own = flight.programs[row].program.duration[:nodes]
    # A host node's span holds its issue and its waiting; what it does itself is its duration.
    return np.where(host, own, seconds)


def _dependencies(outcome: Outcome, row: int) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """What every node waits for within one step, as (pointer, node ids): its queue, and events."""
    step = outcome.timing.flight.programs[row]
    program, nodes = step.program, step.nodes
    before = step.before_on_queue[:nodes]
    pointer = np.zeros(nodes + 1, np.int64)
    found: list[int] = []
    ptr, deps = program.dep_ptr, program.dep
    for node in range(nodes):
        waits = {int(d) for d in deps[ptr[node] : ptr[node + 1]]}
        if before[node] >= 0:
            waits.add(int(before[node]))
        found.extend(sorted(waits))
        pointer[node + 1] = len(found)
    return pointer, np.array(found, np.int64)
