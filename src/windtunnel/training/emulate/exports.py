"""Files of a run for other programs: ``operators.json``, ``graph/job.json``, and graphs in Chakra's form.

``operators.json`` is a device profile whose times are still to be filled in, for who prices the steady steps
on another device. A row is (name, arguments, outputs, facts); ``count`` is calls in a period.

``graph/job.json`` is the step for a shared network: `windtunnel network run` puts several jobs on one
cluster. Of a job it needs its skeleton (`engines.replay.skeleton`: computing as delays between collectives)
and of each collective its kind, bytes and groups, not the 20,000 operators. All groups in which like ranks
meet at once are one call, as they are one join of the replay. A step is there what repeats, a period of
several.

A Chakra graph is the steady step of a class of ranks. Every node of the replayed program becomes a node of
the trace: an operator, a collective, a message, or a wait of the host. Its data dependencies are what the
replay waits for: the node before it on its queue, and the waits on events. The attributes are those that
ASTRA-sim's feeder reads (``comm_type``, ``comm_size``, ``pg_name``, ``num_ops``, ``tensor_size``,
``is_cpu_op``, ``comm_src``, ``comm_dst``, ``comm_tag``).
"""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from windtunnel.calibration import profiles
from windtunnel.engines.replay.skeleton import skeleton
from windtunnel.report.chakra import COMM_COLL, COMM_RECV, COMM_SEND, COMM_TYPES, COMP, GraphNodes
from windtunnel.training.emulate.emulation import EmulationResult
from windtunnel.training.emulate.graph import EventKind
from windtunnel.training.emulate.policy.groups import Channel
from windtunnel.training.emulate.twin.costs import work
from windtunnel.training.emulate.twin.costs.collectives import full_bytes
from windtunnel.training.emulate.twin.costs.profile import VERSION, cost_of, encode, signature
from windtunnel.training.emulate.twin.job import WorldJob

OPERATORS = "operators.json"


def write_operators(directory: Path, result: EmulationResult) -> None:
    """The file, in the run's folder; bytes and FLOP of one call, shapes as `matmul_shape` and
    `attention_shapes` give them."""
    shapes, rows = {"matmul": work.matmul_shape, "attention": work.attention_shapes}, []
    for cls in result.classes.classes:
        for op, count in cls.slice.calls():
            if (kind := work.kind_of(op)) == "view":
                continue
            shape = shapes[kind](op) if kind in shapes else ()
            calls_of = {"kind": kind, "count": count, "ranks": len(cls.members), "shape": shape}
            each = {"flops": work.executed_flops(op), "bytes": work.moved_bytes(op, kind)}
            rows.append([*encode(op), {**calls_of, **each}])
    profiles.save(
        directory / OPERATORS,
        VERSION,
        {"period": result.classes.classes[0].slice.period},
        ("operators", rows),
    )


def joules(result: EmulationResult) -> float | None:
    """Of the operators of all ranks in the mean step; None where the device's profile lacks one of them."""
    joules_of = result.profile.joules if result.profile else {}
    total = sum(
        joules_of.get(signature(op), math.nan) * count * len(cls.members)
        for cls in result.classes.classes
        for op, count in cls.slice.calls()
        if work.kind_of(op) != "view"
    )
    return total / result.classes.classes[0].slice.period if joules_of and not math.isnan(total) else None


Meeting = tuple[tuple[int, ...], ...]
"""Groups of ranks."""
JOB = "job.json"
CALL = ("kind", "bytes", "dtype", "backend", "groups")
MOST = 500_000
"""Join nodes of all replayed ranks; with more (jitter tells all ranks apart) no such file is made."""


def joins(result: EmulationResult) -> dict[str, Any] | None:
    """The step as values of JSON: ``marks`` [call or -1, [[mark, steps back, seconds], …]], ``ends`` (marks),
    ``calls`` (`CALL`) with ``groups`` a place in the list of that name: ranks, the root
    first, sender and receiver of a message. Marks wait for earlier ones of their step."""
    job = result.timing.job
    begin, end = result.timing.window
    if len(job.replay.rank_join) > MOST:
        return None
    frames = skeleton(job.replay, job.programs[0].copies)
    groups: dict[Meeting, int] = {}
    meetings: dict[tuple[Channel, tuple[int, ...]], Meeting] = {}
    calls: dict[tuple[str, int, str, str, int], int] = {}
    marks = []
    for mark in frames.marks:
        call = -1
        if mark.join >= 0:
            named, meeting = _call(job, mark.join, meetings)
            call = calls.setdefault((*named, groups.setdefault(meeting, len(groups))), len(calls))
        marks.append([call, [list(term) for term in mark.after]])
    return {
        "version": 1, "program": result.program.name, "cluster": result.cluster.name,
        "world_size": result.cluster.world_size, "iteration_time_s": end - begin,
        "marks": marks, "ends": list(frames.ends),
        "groups": [[list(row) for row in group] for group in groups],
        "calls": [dict(zip(CALL, call, strict=True)) for call in calls],
    }  # fmt: skip


def _call(
    job: WorldJob, join: int, meetings: dict[tuple[Channel, tuple[int, ...]], Meeting]
) -> tuple[tuple[str, int, str, str], Meeting]:
    """Kind, bytes, dtype and backend of a join, and its groups. ``meetings``: those of joins before it, by
    channel and colours."""
    ptr, owners, nodes = job.members
    members = slice(ptr[join], ptr[join + 1])
    colours = tuple(sorted(set(owners[members].tolist())))
    call = job.call(*job.join_call[join].tolist())
    if call.is_message:  # both ends of a message are of the sender's channel, and of its colour
        ends = zip(owners[members].tolist(), nodes[members].tolist(), strict=True)
        calls = ((colour, job.call_at(job.class_of(colour), node)) for colour, node in ends)
        sender, call = next(end for end in calls if end[1].row.kind == "send")
        colours = (sender,)
    if (call.channel, colours) not in meetings:
        family = call.family
        if call.is_message:
            peers = tuple(map(call.ranks, np.flatnonzero(job.colour == colours[0]).tolist()))
        else:
            of_groups = job.colour[family.members].tolist()
            rows = [tuple(sorted(set(of_group))) == colours for of_group in of_groups]
            # the root is at the same place in all groups
            root = int(family.index_of[call.row.peer]) if call.row.peer >= 0 else 0
            peers = tuple(map(tuple, np.roll(family.members[rows], -root, axis=1).tolist()))
        meetings[call.channel, colours] = peers
    size = full_bytes(call.row, 2 if call.is_message else call.family.size)
    kind = "send" if call.is_message else call.row.kind
    return (kind, size, call.row.dtype, call.row.backend), meetings[call.channel, colours]


def graph_nodes(result: EmulationResult, row: int) -> GraphNodes:
    """The nodes of class ``row`` of ``result``; durations are emulated seconds, as replayed."""
    step = result.timing.job.programs[row]
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
            text, kind, attributes = _describe(result, row, EventKind(key[0]), key[1])
            described.append((names.setdefault(text, len(names)), kind, attributes | {"stream": key[2]}))
        which[node] = rows[key]
    pointer, dependencies = _dependencies(result, row)
    cls = result.classes.classes[row]
    return GraphNodes(
        id=np.arange(step.nodes, dtype=np.int64),
        name=np.array([name for name, _, _ in described], np.int32)[which], names=list(names),
        type=np.array([kind for _, kind, _ in described], np.int32)[which], duration=_durations(result, row),
        data_ptr=pointer, data_deps=dependencies, ctrl_ptr=np.zeros(step.nodes + 1, np.int64),
        ctrl_deps=np.zeros(0, np.int64), attribute=which.astype(np.int32),
        attributes=[attributes for _, _, attributes in described],
        metadata={
            "rank_class": cls.name,
            "ranks": len(cls.members),
            "first_rank": int(cls.members[0]),
            "world_size": result.cluster.world_size,
            "cluster": result.cluster.name,
            "durations": "emulated",
        },
    )  # fmt: skip


def _describe(
    result: EmulationResult, row: int, kind: EventKind, ref: int
) -> tuple[str, int, dict[str, Any]]:
    """Name, node type and attributes of a node."""
    cls = result.classes.classes[row]
    if kind == EventKind.OP:
        op = cls.slice.operators[ref]
        cost = cost_of(op, result.cluster.host.device)
        on_host = result.cluster.host.device.kind == "cpu"
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
        "is_cpu_op": call.backend == "gloo", "comm_size": size, "pg_name": group.name, "group": group.label,
    }  # fmt: skip
    me = cls.slice.rank
    if call.kind == "send":
        return "send", COMM_SEND, common | {"comm_src": me, "comm_dst": call.peer, "comm_tag": 0}
    if call.kind == "recv":
        return "recv", COMM_RECV, common | {"comm_src": call.peer, "comm_dst": me, "comm_tag": 0}
    return call.kind, COMM_COLL, common | {"comm_type": COMM_TYPES.index(call.kind)}


def _durations(result: EmulationResult, row: int) -> NDArray[np.float64]:
    """Seconds of each node in the last step; of collectives the transfer, without waiting for members."""
    job, replayed = result.timing.job, result.timing.result
    nodes = job.programs[row].nodes
    colour = int(job.colour[result.classes.classes[row].members[0]])
    start, end = replayed.of(colour)
    seconds: NDArray[np.float64] = (end - start)[-nodes:]
    host = job.programs[row].program.queue[:nodes] == 0
    own = job.programs[row].program.duration[:nodes]
    # A host node's span holds its issue and its waiting; what it does itself is its duration.
    return np.where(host, own, seconds)


def _dependencies(result: EmulationResult, row: int) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """What every node waits for within one step, as (pointer, node ids): its queue, and events."""
    step = result.timing.job.programs[row]
    ptr, waits = step.program.dep_ptr, step.program.dep.tolist()
    before = [[node] if node >= 0 else [] for node in step.before_on_queue[: step.nodes].tolist()]
    rows = [sorted({*waits[ptr[node] : ptr[node + 1]], *own}) for node, own in enumerate(before)]
    pointer = np.cumsum([0, *map(len, rows)], dtype=np.int64)
    return pointer, np.array([node for row in rows for node in row], np.int64)
