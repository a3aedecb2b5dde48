"""The files of a run that are looked at: report.html, timeline.json.gz, and graph/ in Chakra's form.

A graph is the steady step of a class of ranks. Every node of the replayed program becomes a node of the
trace: an operator, a collective, a message, or a wait of the host. Its data dependencies are what the replay
waits for: the node before it on its queue, and the waits on events. The attributes are those that ASTRA-sim's
feeder reads (``comm_type``, ``comm_size``, ``pg_name``, ``num_ops``, ``tensor_size``, ``is_cpu_op``,
``comm_src``, ``comm_dst``, ``comm_tag``). Beside them ``job.json`` is the whole step for a shared network.
"""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from windtunnel.base import atomic
from windtunnel.cluster.draw import picture
from windtunnel.report.chakra import (
    COMM_COLL,
    COMM_RECV,
    COMM_SEND,
    COMM_TYPES,
    COMP,
    GraphNodes,
    write_graph,
)
from windtunnel.report.html import write_report
from windtunnel.report.timeline import (
    COLLECTIVE,
    About,
    HeatMap,
    MemoryCurve,
    Timeline,
    Track,
    write_trace,
)
from windtunnel.training.emulate.emulation import EmulationResult
from windtunnel.training.emulate.graph import COMM_STREAM, Category, EventKind, Phase
from windtunnel.training.emulate.joins import NAME as JOB
from windtunnel.training.emulate.joins import joins
from windtunnel.training.emulate.twin.costs.collectives import full_bytes
from windtunnel.training.emulate.twin.costs.operators import cost_of
from windtunnel.training.emulate.twin.costs.work import base_name, counted_flops, moved_bytes
from windtunnel.training.emulate.twin.emulate import Timing
from windtunnel.training.emulate.twin.program import HOST, HOST_COMM_STREAM, StepProgram

Floats = NDArray[np.float64]
KINDS = ["compute", "communication", "idle", "host"]
MODULE_TIMES = (*(phase.name.lower() for phase in Phase), "in all", "flops", "bytes")
_COMPUTE, _COMMUNICATION, _IDLE, _HOST = range(4)


def timeline(timing: Timing, ranks: Sequence[int]) -> Timeline:
    """Tracks of every queue of ``ranks`` from the end of the step before to the end of the last.

    Times are seconds from the beginning of that window. A collective's waiting for its last member is a span
    of its own, of kind ``idle``, before the transfer.
    """
    names: dict[str, int] = {}
    about: dict[tuple[int, ...], int] = {}
    described: list[About] = []
    tracks: list[Track] = []
    for rank in ranks:
        colour = int(timing.job.colour[rank])
        program = timing.job.programs[timing.job.class_of(colour)]
        issued = _issued(timing, colour)
        for queue in range(len(program.streams)):
            track = _track(timing, rank, colour, queue, names, about, described, issued)
            if len(track.start):
                tracks.append(track)
    begin, end = timing.window
    number = max((len(program.slice.steps) for program in timing.job.programs), default=0)
    return Timeline(tracks, list(names), KINDS, described, step=(number, end - begin))


def _issued(timing: Timing, colour: int) -> NDArray[np.float64]:
    """From when to when the host issued each node, [2, nodes]: after what it did since it last waited."""
    program = timing.job.programs[timing.job.class_of(colour)]
    issue = program.program.issue * timing.job.replay.issue_scale[colour]
    done, before = np.cumsum(issue), program.host_before
    stop = timing.result.of(colour)[1]
    end = done + np.where(before >= 0, stop[before] - done[before], 0.0)
    return np.stack([end - issue, end])


def _track(
    timing: Timing, rank: int, colour: int, queue: int, names: dict[str, int],
    about: dict[tuple[int, ...], int], described: list[About], issued: NDArray[np.float64],
) -> Track:  # fmt: skip
    job, result = timing.job, timing.result
    program = job.programs[job.class_of(colour)]
    begin, end = timing.window
    start, stop = result.of(colour)
    ready = result.ready[result.rank_ptr[colour] : result.rank_ptr[colour + 1]]
    inside = (program.program.queue == queue) & (stop > begin) & (ready < end)
    nodes = np.flatnonzero(inside)
    texts = [_name(timing, colour, node) for node in nodes.tolist()]
    joins = program.is_join[nodes]
    kind = np.where(joins, _COMMUNICATION, np.where(program.computes[nodes], _COMPUTE, _HOST))
    starts, stops = start[nodes], stop[nodes]
    name = np.array([names.setdefault(text, len(names)) for text in texts], np.int32)
    places = []
    for node, event in zip(
        nodes.tolist(), program.slice.events[program.event[nodes % program.nodes]], strict=True
    ):
        key = (job.class_of(colour), *(int(event[column]) for column in ("kind", "ref", "scope", "phase")))
        if key not in about:
            about[key] = len(described)
            described.append(_about(timing, colour, node))
        places.append(about[key])

    waits = joins & (ready[nodes] < starts)
    waiting = [f"wait for {text}" for text, wait in zip(texts, waits.tolist(), strict=True) if wait]
    wait_name = np.array([names.setdefault(text, len(names)) for text in waiting], np.int32)
    all_starts = np.concatenate([starts, ready[nodes][waits]])
    order = np.argsort(all_starts, kind="stable")
    host = np.concatenate([issued[:, nodes] - begin, np.full((2, len(waiting)), -1.0)], axis=1)
    return Track(
        rank=rank,
        queue=_queue_name(program, queue, timing, colour),
        start=np.maximum(all_starts, begin)[order] - begin,
        end=np.minimum(np.concatenate([stops, starts[waits]]), end)[order] - begin,
        name=np.concatenate([name, wait_name])[order],
        kind=np.concatenate([kind, np.full(len(waiting), _IDLE)])[order].astype(np.int32),
        about=np.concatenate([places, np.full(len(waiting), -1)])[order].astype(np.int32),
        issued=host[:, order],
    )


def _about(timing: Timing, colour: int, node: int) -> About:
    """What PyTorch's profiler would say of a node."""
    row = timing.job.class_of(colour)
    program = timing.job.programs[row]
    slice_ = program.slice
    event = slice_.events[program.event[node % program.nodes]]
    args: dict[str, Any] = {
        "module": slice_.scopes[event["scope"]], "step": len(slice_.steps),
        "phase": Phase(event["phase"]).name.lower(),
    }  # fmt: skip
    if event["kind"] == EventKind.SYNC:
        return About("cudaStreamSynchronize", "cuda_runtime", {"operator": "wait for the device", **args})
    if event["kind"] == EventKind.COLLECTIVE:
        calls = timing.job.world.calls[row]
        call = int(program.program.join[node]) % len(calls.event)
        collective, family = calls.collective(call), timing.job.world.family(calls.channel(call))
        words = (
            "SendRecv"
            if collective.kind in ("send", "recv")
            else "".join(map(str.title, collective.kind.split("_")))
        )
        nccl = {
            "Collective name": collective.kind, "Process Group Description": family.name,
            "dtype": collective.dtype, "Group size": family.size,
            "In bytes": collective.in_bytes, "Out bytes": collective.out_bytes,
        }  # fmt: skip
        return About(f"{COLLECTIVE}{words}", "kernel", {**nccl, **args}, f"c10d::{collective.kind}")
    op = slice_.operators[int(event["ref"])]
    ends = [tensor.device for tensor in (*op.tensors(), *op.outputs)]
    args = {
        "operator": op.name, "Input Dims": [tensor.shape for tensor in op.tensors()],
        "Input type": [tensor.dtype for tensor in op.tensors()], "bytes": moved_bytes(op),
        "FLOP": counted_flops(op), **args,
    }  # fmt: skip
    name = op.name.rpartition(".")[0].replace(".", "::")
    if len(set(ends)) > 1 or base_name(op.name) == "_local_scalar_dense":
        way = (
            "HtoD" if ends[0] == "cuda" and len(set(ends)) > 1 else "DtoH"
        )  # copy_: where to, and from where
        return About(f"Memcpy {way}", "gpu_memcpy", args, name)
    return About(name, "kernel", args, name)


def _name(timing: Timing, colour: int, node: int) -> str:
    row = timing.job.class_of(colour)
    program = timing.job.programs[row]
    if program.is_join[node]:
        calls = timing.job.world.calls[row]
        call = int(program.program.join[node]) % len(calls.event)
        family = timing.job.world.family(calls.channel(call))
        return f"{calls.collective(call).kind} {family.name}"
    event = program.slice.events[program.event[node % program.nodes]]
    if event["kind"] == EventKind.OP:
        return program.slice.operators[int(event["ref"])].name
    return "wait for the device"


def _queue_name(program: StepProgram, queue: int, timing: Timing, colour: int) -> str:
    stream = program.streams[queue]
    if stream == HOST:
        return "host"
    if stream == 0:
        return "compute"
    if stream < COMM_STREAM:
        calls = np.flatnonzero((program.program.queue == queue) & program.is_join)
        return _name(timing, colour, int(calls[0])) if len(calls) else f"stream {stream}"
    first = int(np.flatnonzero(program.program.queue == queue)[0])
    kind, _, label = _name(timing, colour, first).partition(" ")
    way = f" {kind}" if kind in ("send", "recv") else ""
    return f"{'gloo' if stream >= HOST_COMM_STREAM else 'nccl'} {label}{way}"


MOST_CURVES = 12
"""Rank classes whose memory is drawn: the fullest ones."""

MOST_TRACKS = 4
"""Ranks in the timeline when the user names none."""


def write_pictures(
    directory: Path, result: EmulationResult, summary: dict[str, Any], timeline_ranks: Sequence[int] = ()
) -> None:
    """Write the report, the timeline and the graphs of ``result`` to ``directory``.

    ``timeline_ranks``: the ranks in the timeline; by default the critical one and one of some classes.
    """
    spans = timeline(result.timing, list(timeline_ranks) or shown_ranks(result))
    for rank in spans.ranks():
        spans.memory[rank] = _memory(result, rank)
    write_trace(directory / "timeline.json.gz", spans, directory / "trace")
    for row, cls in enumerate(result.classes.classes):
        name = re.sub(r"[^A-Za-z0-9=.-]+", "_", cls.name).strip("_") or "all"
        write_graph(directory / "graph" / f"{name}.et", graph_nodes(result, row))
    if (step := joins(result)) is not None:
        atomic.replace(directory / "graph" / JOB, json.dumps(step, separators=(",", ":")))
    write_report(
        directory / "report.html", summary, spans, memory_curves(result), heat_map(result),
        picture=picture(result.cluster), modules=module_times(result),
    )  # fmt: skip


def shown_ranks(result: EmulationResult) -> list[int]:
    """The rank that ends last, and the first of classes spread evenly over the rest."""
    firsts = [int(cls.members[0]) for cls in result.classes.classes]
    places = np.unique(np.linspace(0, len(firsts) - 1, min(MOST_TRACKS, len(firsts))).astype(int))
    chosen = [result.timing.critical_rank, *(firsts[place] for place in places)]
    critical = int(result.classes.rank_class[result.timing.critical_rank])
    return sorted({r for r in chosen if r == chosen[0] or int(result.classes.rank_class[r]) != critical})


def memory_curves(result: EmulationResult) -> list[MemoryCurve]:
    """Memory over the events of the run for the classes that need most, the fullest first."""
    order = sorted(range(len(result.memory)), key=lambda row: -result.memory[row].whole.reserved_bytes)
    curves = []
    for row in order[:MOST_CURVES]:
        slice_, memory = result.classes.classes[row].slice, result.memory[row]
        begin, end = slice_.steady
        curve = memory.curve
        inside = (curve.event >= begin) & (curve.event < end)
        curves.append(
            MemoryCurve(
                label=result.classes.classes[row].name,
                time=(curve.event[inside] - begin) / max(1, end - begin),
                allocated=curve.allocated[inside].astype(float),
                reserved=curve.reserved[inside].astype(float),
                by_category={
                    category.name.lower(): curve.by_category[inside, category].astype(float)
                    for category in Category
                },
                capacity=memory.capacity_bytes,
            )
        )
    return curves


def _memory(result: EmulationResult, rank: int) -> tuple[Floats, Floats, Floats]:
    """When the memory of a rank changes, which is when its host is there, and to what."""
    row = int(result.classes.rank_class[rank])
    curve, timing = result.memory[row].curve, result.timing
    colour = int(timing.job.colour[rank])
    program = timing.job.programs[timing.job.class_of(colour)]
    first, end = program.slice.steady
    inside = np.flatnonzero((curve.event >= first) & (curve.event < end))
    changed = inside[np.diff(curve.allocated[inside], prepend=-1) != 0]
    at = _issued(timing, colour)[1, -program.nodes :] - timing.window[0]
    time = (
        np.interp(curve.event[changed], program.event, np.maximum.accumulate(at)) if len(at) else np.zeros(0)
    )
    sizes = (column[changed].astype(np.float64) for column in (curve.allocated, curve.reserved))
    return np.maximum(time, 0.0), next(sizes), next(sizes)


def module_times(result: EmulationResult) -> list[dict[str, Any]]:
    """What the modules of the critical rank compute in a step: device seconds by phase and in all, FLOP,
    bytes moved; modules alike (by their numbers) together, those that take longest first."""
    row = int(result.classes.rank_class[result.timing.critical_rank])
    slice_ = result.classes.classes[row].slice
    events = slice_.events[slice(*slice_.steady)]
    events = events[events["kind"] == EventKind.OP]
    costs = [cost_of(op, result.cluster.host.device, result.profile) for op in slice_.operators]
    modules: dict[str, dict[str, Any]] = {}
    columns = (events[name].tolist() for name in ("ref", "scope", "phase"))
    for ref, scope, phase in zip(*columns, strict=True):
        name, cost = re.sub(r"\d+", "*", slice_.scopes[scope]), costs[ref]
        times = modules.setdefault(
            name, {"name": name or "(outside of modules)", **dict.fromkeys(MODULE_TIMES, 0.0)}
        )
        for column, value in ((Phase(phase).name.lower(), cost.seconds), ("in all", cost.seconds),
                              ("flops", cost.flops), ("bytes", cost.bytes)):  # fmt: skip
            times[column] += value
    return sorted(modules.values(), key=lambda times: -times["in all"])


def heat_map(result: EmulationResult) -> HeatMap:
    """How long each rank's compute streams are busy in a step, host by host."""
    cluster = result.cluster
    busy = result.timing.rank_busy_s.reshape(cluster.hosts, cluster.devices_per_host)
    return HeatMap("Compute streams busy in a step", busy, "s")


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
