"""When each step of each rank ends, by brute force: every event of every rank as a graph, sorted and summed.

Nothing is shared with the twin: no classes, no copies of a steady step, no queues. Every event is a vertex
with the vertices that must come before it, and a vertex's time is the longest path to it.
"""

from __future__ import annotations

from graphlib import TopologicalSorter

import numpy as np

from windtunnel.training.emulate.graph import EventKind, Slice

Vertex = tuple[object, ...]


class ReferenceWorld:
    """Vertices by name, each with its seconds and those before it."""

    def __init__(self) -> None:
        self.seconds: dict[Vertex, float] = {}
        self.before: dict[Vertex, list[Vertex]] = {}

    def add(self, name: Vertex, seconds: float, before: list[Vertex]) -> Vertex:
        self.seconds[name] = self.seconds.get(name, 0.0) or seconds
        self.before.setdefault(name, []).extend(before)
        return name

    def ends(self) -> dict[Vertex, float]:
        ends: dict[Vertex, float] = {}
        for name in TopologicalSorter(self.before).static_order():
            start = max((ends[other] for other in self.before[name]), default=0.0)
            ends[name] = start + self.seconds[name]
        return ends


def step_ends(slices: list[Slice], host: float = 0.0, on_host: bool = False) -> np.ndarray:
    """float64[ranks, steps]. Operators take their input, calls a second a byte, issuing an operator ``host``.

    Raises `graphlib.CycleError` where the job hangs.
    """
    world = ReferenceWorld()
    marks = [_rank(world, slice_, host, on_host) for slice_ in slices]
    ends = world.ends()
    latest = [[max((ends[v] for v in step), default=0.0) for step in steps] for steps in marks]
    return np.maximum.accumulate(np.array(latest), axis=1)


def _rank(world: ReferenceWorld, slice_: Slice, host_seconds: float, on_host: bool) -> list[list[Vertex]]:
    rank = slice_.rank
    host = world.add((rank, "begin"), 0.0, [])
    last: dict[int, list[Vertex]] = {}  # for each stream what its next vertex comes after
    records: dict[int, list[Vertex]] = {}
    handles: dict[int, Vertex] = {}
    counts: dict[object, int] = {}
    marks: list[list[Vertex]] = []
    done: list[Vertex] = []
    for position, event in enumerate(slice_.events):
        kind, stream = EventKind(int(event["kind"])), int(event["stream"])
        ref, value = int(event["ref"]), int(event["value"])
        name = (rank, position)
        if kind == EventKind.OP:
            host = world.add((*name, "issue"), host_seconds, [host])
            seconds = slice_.operators[ref].inputs[0]
            if on_host:
                host = world.add(name, seconds, [host])
            else:
                last[stream] = [world.add(name, seconds, [host, *last.get(stream, [])])]
            done.append(name)
        elif kind == EventKind.COLLECTIVE:
            row = slice_.collectives[ref]
            group = slice_.groups[row.group].ranks
            ends: tuple[object, ...] = ()
            if row.kind in ("send", "recv"):
                ends = (rank, row.peer) if row.kind == "send" else (row.peer, rank)
            channel = (slice_.groups[row.group].name, group, ends)
            counts[channel] = counts.get(channel, 0) + 1
            meeting = ("call", channel, counts[channel])
            queue = stream
            if row.backend == "gloo":
                queue = hash((row.group, row.peer, row.kind)) if ends else -10 - row.group
            ready = world.add(name, 0.0, [host, *last.get(queue, [])])
            world.add(meeting, float(max(row.in_bytes, row.out_bytes)), [ready])
            last[queue] = [meeting]
            handles[value] = meeting
            done.append(meeting)
        elif kind == EventKind.RECORD:
            records[ref] = list(last.get(stream, []))
        elif kind == EventKind.WAIT:
            last[stream] = [*last.get(stream, []), *records[ref]]
        elif kind == EventKind.WORK_WAIT:
            last[stream] = [*last.get(stream, []), handles[value]]
        elif kind == EventKind.SYNC:
            waits = {-1: [v for vs in last.values() for v in vs], -2: last.get(stream, []), -3: []}
            waits = waits.get(ref, records.get(ref, [])) if ref != -3 else [handles[value]]
            host = world.add(name, 0.0, [host, *waits])
            done.append(name)
        elif kind == EventKind.STEP:
            marks.append(done)
            done = []
    return marks
