"""The files of a run that are looked at: report.html, timeline.json.gz, and what ``graph/`` has."""

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
from windtunnel.report.chakra import write_graph
from windtunnel.report.html import write_report
from windtunnel.report.timeline import (
    COLLECTIVE,
    About,
    HeatMap,
    MemoryTimeline,
    Timeline,
    Track,
    write_trace,
)
from windtunnel.training.emulate.emulation import EmulationResult
from windtunnel.training.emulate.exports import JOB, graph_nodes, joins
from windtunnel.training.emulate.graph import COMM_STREAM, Category, EventKind, Phase
from windtunnel.training.emulate.twin.costs.profile import cost_of
from windtunnel.training.emulate.twin.costs.work import base_name, counted_flops, moved_bytes
from windtunnel.training.emulate.twin.emulate import Timing
from windtunnel.training.emulate.twin.program import HOST, HOST_COMM_STREAM

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
    for replayed in (_ReplayedRank(timing, rank) for rank in ranks):
        for queue in range(len(replayed.program.streams)):
            track = _track(replayed, queue, names, about, described)
            if len(track.start):
                tracks.append(track)
    begin, end = timing.window
    number = max((len(program.slice.steps) for program in timing.job.programs), default=0)
    return Timeline(tracks, list(names), KINDS, described, step=(number, end - begin))


class _ReplayedRank:
    """What a rank's nodes are, and when they began and ended. ``issued``: from when to when the host issued
    each node, [2, nodes]: after what it did since it last waited."""

    def __init__(self, timing: Timing, rank: int) -> None:
        job, result = timing.job, timing.result
        colour = int(job.colour[rank])
        self.timing, self.rank, self.row = timing, rank, job.class_of(colour)
        self.program = job.programs[self.row]
        self.start, self.stop = result.of(colour)
        self.ready = result.ready[result.rank_ptr[colour] : result.rank_ptr[colour + 1]]
        issue = self.program.program.issue * job.replay.issue_scale[colour]
        done, before = np.cumsum(issue), self.program.host_before
        end = done + np.where(before >= 0, self.stop[before] - done[before], 0.0)
        self.issued = np.stack([end - issue, end])

    def events(self, nodes: NDArray[np.int64]) -> np.ndarray[Any, np.dtype[Any]]:
        """What the nodes are in the slice."""
        return self.program.slice.events[self.program.event[nodes % self.program.nodes]]

    def name(self, node: int, event: Any) -> str:
        if self.program.is_join[node]:
            call = self.timing.job.call_at(self.row, node)
            return f"{call.row.kind} {call.family.name}"
        if event["kind"] == EventKind.OP:
            return self.program.slice.operators[int(event["ref"])].name
        return "wait for the device"

    def queue_name(self, queue: int) -> str:
        stream = self.program.streams[queue]
        if stream in (HOST, 0):
            return "host" if stream == HOST else "compute"
        of_queue = self.program.program.queue == queue
        calls = np.flatnonzero(of_queue & self.program.is_join)
        if not len(calls):
            return f"stream {stream}"
        first = self.name(int(calls[0]), None)
        if stream < COMM_STREAM:
            return first
        kind, _, label = first.partition(" ")
        way = f" {kind}" if kind in ("send", "recv") else ""
        return f"{'gloo' if stream >= HOST_COMM_STREAM else 'nccl'} {label}{way}"

    def about(self, node: int, event: Any) -> About:
        """What PyTorch's profiler would say of a node."""
        slice_ = self.program.slice
        args: dict[str, Any] = {
            "module": slice_.scopes[event["scope"]], "step": len(slice_.steps),
            "phase": Phase(event["phase"]).name.lower(),
        }  # fmt: skip
        if event["kind"] == EventKind.SYNC:
            return About("cudaStreamSynchronize", "cuda_runtime", {"operator": "wait for the device", **args})
        if event["kind"] == EventKind.COLLECTIVE:
            call = self.timing.job.call_at(self.row, node)
            words = "SendRecv" if call.is_message else call.row.kind.title().replace("_", "")
            nccl = {
                "Collective name": call.row.kind, "Process Group Description": call.family.name,
                "dtype": call.row.dtype, "Group size": call.family.size,
                "In bytes": call.row.in_bytes, "Out bytes": call.row.out_bytes,
            }  # fmt: skip
            return About(f"{COLLECTIVE}{words}", "kernel", {**nccl, **args}, f"c10d::{call.row.kind}")
        op = slice_.operators[int(event["ref"])]
        ends = [tensor.device for tensor in (*op.tensors(), *op.outputs)]
        args = {
            "operator": op.name, "Input Dims": [tensor.shape for tensor in op.tensors()],
            "Input type": [tensor.dtype for tensor in op.tensors()], "bytes": moved_bytes(op),
            "FLOP": counted_flops(op), **args,
        }  # fmt: skip
        name = op.name.rpartition(".")[0].replace(".", "::")
        between = len(set(ends)) > 1
        if between or base_name(op.name) == "_local_scalar_dense":
            way = "HtoD" if between and ends[0] == "cuda" else "DtoH"  # copy_: where to, and from where
            return About(f"Memcpy {way}", "gpu_memcpy", args, name)
        return About(name, "kernel", args, name)


def _track(
    replayed: _ReplayedRank, queue: int, names: dict[str, int], about: dict[tuple[int, ...], int],
    described: list[About],
) -> Track:  # fmt: skip
    program = replayed.program
    begin, end = replayed.timing.window
    nodes = np.flatnonzero(
        (program.program.queue == queue) & (replayed.stop > begin) & (replayed.ready < end)
    )
    events = replayed.events(nodes)
    texts = [replayed.name(node, event) for node, event in zip(nodes.tolist(), events, strict=True)]
    joins = program.is_join[nodes]
    kind = np.where(joins, _COMMUNICATION, np.where(program.computes[nodes], _COMPUTE, _HOST))
    starts, stops, ready = replayed.start[nodes], replayed.stop[nodes], replayed.ready[nodes]
    places = []
    for node, event in zip(nodes.tolist(), events, strict=True):
        key = (replayed.row, *(int(event[column]) for column in ("kind", "ref", "scope", "phase")))
        if key not in about:
            about[key] = len(described)
            described.append(replayed.about(node, event))
        places.append(about[key])

    waits = joins & (ready < starts)
    texts += [f"wait for {text}" for text, wait in zip(texts, waits.tolist(), strict=True) if wait]
    name = np.array([names.setdefault(text, len(names)) for text in texts], np.int32)
    waiting = len(texts) - len(nodes)
    all_starts = np.concatenate([starts, ready[waits]])
    order = np.argsort(all_starts, kind="stable")
    host = np.concatenate([replayed.issued[:, nodes] - begin, np.full((2, waiting), -1.0)], axis=1)
    return Track(
        rank=replayed.rank,
        queue=replayed.queue_name(queue),
        start=np.maximum(all_starts, begin)[order] - begin,
        end=np.minimum(np.concatenate([stops, starts[waits]]), end)[order] - begin,
        name=name[order],
        kind=np.concatenate([kind, np.full(waiting, _IDLE)])[order].astype(np.int32),
        about=np.concatenate([places, np.full(waiting, -1)])[order].astype(np.int32),
        issued=host[:, order],
    )


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
    spans = timeline(result.timing, list(timeline_ranks) or default_ranks(result))
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


def default_ranks(result: EmulationResult) -> list[int]:
    """The rank that ends last, and the first of classes spread evenly over the rest."""
    firsts = [int(cls.members[0]) for cls in result.classes.classes]
    places = np.unique(np.linspace(0, len(firsts) - 1, min(MOST_TRACKS, len(firsts))).astype(int))
    chosen = [result.timing.critical_rank, *(firsts[place] for place in places)]
    critical = int(result.classes.rank_class[result.timing.critical_rank])
    return sorted({r for r in chosen if r == chosen[0] or int(result.classes.rank_class[r]) != critical})


def memory_curves(result: EmulationResult) -> list[MemoryTimeline]:
    """Memory over the events of the run for the classes that need most, the fullest first."""
    order = sorted(range(len(result.memory)), key=lambda row: -result.memory[row].whole.reserved_bytes)
    curves = []
    for row in order[:MOST_CURVES]:
        slice_, memory = result.classes.classes[row].slice, result.memory[row]
        begin, end = slice_.steady
        curve = memory.curve
        inside = (curve.event >= begin) & (curve.event < end)
        curves.append(
            MemoryTimeline(
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
    curve, replayed = result.memory[row].curve, _ReplayedRank(result.timing, rank)
    program = replayed.program
    first, end = program.slice.steady
    inside = np.flatnonzero((curve.event >= first) & (curve.event < end))
    changed = inside[np.diff(curve.allocated[inside], prepend=-1) != 0]
    at = replayed.issued[1, -program.nodes :] - result.timing.window[0]
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
