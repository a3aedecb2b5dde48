"""The steady step of a class of ranks as a program for the replay engine.

What becomes a node: an operator that takes time on its queue, a collective or message (a join), and a point
where the host waits. Everything else only costs host time, which is added to the issue time of the next node,
or orders nodes: a wait on an event makes the next node of the waiting stream depend on what the recorded
stream had been given up to then. Waits that others imply are dropped, because queues are first in, first out.

One step is no steady state: the host runs ahead, and the end of one step overlaps the beginning of the next.
So `COPIES` copies of the step are replayed back to back, what a copy leaves behind (last nodes of streams,
pending waits, host time after the last node) carries over to the next, and the last copy is what is reported.
"""

from __future__ import annotations

from bisect import bisect_left
from dataclasses import dataclass
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from windtunnel.engines.replay.layout import Program
from windtunnel.training.emulate.graph import COMM_STREAM, EventKind, Slice

Floats = NDArray[np.float64]
Longs = NDArray[np.int64]
Bools = NDArray[np.bool_]

COPIES = 3
HOST = -1  # the "stream" of queue 0
HOST_COMM_STREAM = 1 << 20  # communication by threads of the host, numbered from here
_DEVICE, _STREAM, _HANDLE = -1, -2, -3  # what a SYNC event waits for


@dataclass(frozen=True)
class StepProgram:
    """``copies`` copies of a class's steady step.

    ``program``: all copies, ``len(event)`` nodes each. ``event[n]``: position of each node of a copy in the
    slice's events. ``streams``: the stream of each queue, `HOST` for queue 0.
    """

    slice: Slice
    program: Program
    event: Longs
    streams: list[int]
    copies: int

    @property
    def nodes(self) -> int:
        """Nodes of one copy."""
        return len(self.event)

    @cached_property
    def is_join(self) -> Bools:
        """Of every node of all copies: whether it is a collective or a message."""
        joins: Bools = self.program.join >= 0
        return joins

    @cached_property
    def computes(self) -> Bools:
        """Of every node of all copies: whether it is an operator (a host node on a CPU device)."""
        kinds = self.slice.events["kind"][self.event] == EventKind.OP
        return np.tile(kinds, self.copies)

    @cached_property
    def in_place(self) -> Bools:
        """Of every node of all copies: whether it is a collective on a compute stream."""
        streams = np.array(self.streams)[self.program.queue]
        bools: Bools = self.is_join & (streams < COMM_STREAM)
        return bools

    @cached_property
    def before_on_queue(self) -> Longs:
        """The node before each node on its queue, or -1."""
        before = np.full(len(self.program), -1, np.int64)
        for queue in range(len(self.streams)):
            nodes = np.flatnonzero(self.program.queue == queue)
            before[nodes[1:]] = nodes[:-1]
        return before

    @cached_property
    def host_before(self) -> Longs:
        """The last host node that was issued before each node, or -1."""
        places = np.where(self.program.queue == 0, np.arange(len(self.program)), -1)
        latest = np.maximum.accumulate(places) if len(places) else places
        return np.concatenate([[-1], latest[:-1]]) if len(latest) else latest


def step_program(
    slice_: Slice, op_seconds: Floats, host_seconds: Floats, on_host: bool = False, copies: int = COPIES,
    spare_cores: bool = True,
) -> StepProgram:  # fmt: skip
    """Compile the steady step.

    Args:
        op_seconds: seconds of each event of the steady step that is an operator (others are ignored); [n].
        host_seconds: host seconds that each event of the steady step costs; [n].
        on_host: the device is a CPU, whose operators run on the host thread.
        copies: how often the step is repeated.
        spare_cores: with ``on_host``, whether the threads that move messages have cores of their own. Where
            they have not, a collective takes its time from the operators, however asynchronous it is.
    """
    begin, end = slice_.steady
    events = slice_.events[begin:end]
    kind, stream = events["kind"], events["stream"].astype(np.int64)
    is_op = (kind == EventKind.OP) & (op_seconds > 0)
    is_call = kind == EventKind.COLLECTIVE
    is_sync = kind == EventKind.SYNC
    where = np.where(is_sync | (is_op & on_host), HOST, stream)
    if is_call.any():
        host_stream = _host_streams(slice_, on_host)[events["ref"][is_call]]
        where[is_call] = np.where(host_stream >= 0, host_stream, stream[is_call])
        if on_host and not spare_cores:
            # Ranks that both send before they receive would wait for ever: messages stay asynchronous.
            message = np.array([row.kind in ("send", "recv") for row in slice_.collectives])
            where[is_call] = np.where(message[events["ref"][is_call]], where[is_call], HOST)

    event = np.flatnonzero(is_op | is_call | is_sync)
    node_stream = where[event]
    streams = [HOST, *sorted(set(node_stream.tolist()) - {HOST})]
    queue_of = {name: queue for queue, name in enumerate(streams)}
    queue = np.array([queue_of[name] for name in node_stream.tolist()], np.int32)

    spent = np.cumsum(host_seconds)
    issue = np.diff(spent[event], prepend=0.0) if len(event) else np.zeros(0)
    if len(event):
        issue[0] += spent[-1] - spent[event[-1]]  # what the step before did after its last node
    duration = np.where(is_op, op_seconds, 0.0)[event]
    join = np.where(is_call, np.cumsum(is_call) - 1, -1)[event]

    targets, sources = _Order(slice_, event, node_stream).dependencies()
    program = _repeat(queue, duration, np.maximum(issue, 0.0), join, targets, sources, copies)
    return StepProgram(slice_, program, event + begin, streams, copies)


def _host_streams(slice_: Slice, on_host: bool) -> Longs:
    """The queue of each row of the collective table that threads of the host carry out (gloo), else -1.

    Such calls do not occupy the stream that they are issued on: they start at once, and the host waits
    for them where a SYNC says so. The calls of a group follow each other; messages only those of the same
    pair.
    """
    numbers: dict[tuple[int, int, str], int] = {}
    streams = np.full(len(slice_.collectives), -1, np.int64)
    for i, row in enumerate(slice_.collectives):
        if row.backend == "gloo" or on_host:
            message = row.kind in ("send", "recv")
            key = (row.group, row.peer if message else -1, row.kind if message else "")
            streams[i] = HOST_COMM_STREAM + numbers.setdefault(key, len(numbers))
    return streams


def _repeat(
    queue: NDArray[np.int32], duration: Floats, issue: Floats, join: Longs, targets: Longs, sources: Longs,
    copies: int,
) -> Program:  # fmt: skip
    n, joins = len(queue), int(join.max(initial=-1)) + 1
    order = np.argsort(targets, kind="stable")
    shift = np.arange(copies)[:, None]
    target = (targets[order] + shift * n).ravel()
    source = (sources[order] + shift * n).ravel()
    internal = source >= 0  # the first copy has no step before it
    counts = np.bincount(target[internal], minlength=n * copies)
    return Program(
        queue=np.tile(queue, copies),
        duration=np.tile(duration, copies),
        issue=np.tile(issue, copies),
        dep_ptr=np.concatenate([[0], np.cumsum(counts)]).astype(np.int32),
        dep=source[internal].astype(np.int32),
        join=np.where(join >= 0, join + shift * joins, -1).ravel().astype(np.int32),
    )


Ends = dict[int, int]  # for each stream the node whose end is waited for; it implies those before it


class _Order:
    """Reads the events that order nodes and finds what each node must wait for.

    Nodes are numbered in their copy; a number less than zero is a node of the copy before. The events are
    read twice: what the first reading leaves behind is what the second begins with.
    """

    def __init__(self, slice_: Slice, event: Longs, node_stream: Longs) -> None:
        begin, end = slice_.steady
        self.events = slice_.events[begin:end]
        self.n = len(event)
        self.event: list[int] = event.tolist()
        self.node_stream: list[int] = node_stream.tolist()
        self.on_stream: dict[int, list[int]] = {}
        for node, name in enumerate(self.node_stream):
            if name != HOST:
                self.on_stream.setdefault(name, []).append(node)
        self.same_record = _counterparts(slice_, EventKind.RECORD, "ref")
        self.same_handle = _counterparts(slice_, EventKind.COLLECTIVE, "value")
        self.records: dict[int, Ends] = {}
        self.handles: dict[int, int] = {}
        # For each stream the waits that no node has taken up yet: the node that will (None on a stream that
        # never gets one), and for whom.
        self.pending: dict[int, tuple[int | None, Ends]] = {}

    def dependencies(self) -> tuple[Longs, Longs]:
        """Pairs (node, node that must end before it); the latter may be negative."""
        self._read()
        self._age()
        pairs = self._read()
        array = np.array(pairs or np.zeros((0, 2)), np.int64)
        return array[:, 0], array[:, 1]

    def _age(self) -> None:
        def older(ends: Ends) -> Ends:
            return {name: node - self.n for name, node in ends.items()}

        self.records = {ref: older(ends) for ref, ends in self.records.items()}
        self.handles = {handle: node - self.n for handle, node in self.handles.items()}
        self.pending = {
            name: (None if target is None else target - self.n, older(ends))
            for name, (target, ends) in self.pending.items()
        }

    def _read(self) -> list[tuple[int, int]]:
        kinds = (EventKind.COLLECTIVE, EventKind.WORK_WAIT, EventKind.RECORD, EventKind.WAIT, EventKind.SYNC)
        positions = np.flatnonzero(np.isin(self.events["kind"], kinds))
        rows = self.events[positions]
        columns = (positions, rows["kind"], rows["stream"], rows["ref"], rows["value"])
        pairs: list[tuple[int, int]] = []
        waited: dict[tuple[int, int], int] = {}
        new_records: dict[int, Ends] = {}
        new_handles: dict[int, int] = {}

        def recorded(ref: int) -> Ends:
            if ref in new_records:
                return new_records[ref]
            return self.records.get(self.same_record.get(ref, -1), {})

        def finished(handle: int) -> Ends:
            node = new_handles.get(handle, self.handles.get(self.same_handle.get(handle, -1)))
            return {} if node is None else {self.node_stream[node % self.n]: node}

        def wait(name: int, position: int, ends: Ends) -> None:
            target = self._next(name, position)
            for source, node in ends.items():
                if target is None or source == name or waited.get((name, source), node - 1) >= node:
                    continue
                waited[name, source] = node
                pairs.append((target, node) if target < self.n else (target - self.n, node - self.n))
            pending_target, before = self.pending.get(name, (target, {}))
            self.pending[name] = (target, _both(before, ends) if pending_target == target else ends)

        for position, kind, name, ref, value in zip(*(column.tolist() for column in columns), strict=True):
            if kind == EventKind.RECORD:
                new_records[ref] = self._last_ends(name, position)
            elif kind == EventKind.WAIT:
                wait(name, position, recorded(ref))
            elif kind == EventKind.COLLECTIVE:
                new_handles[value] = bisect_left(self.event, position)
            elif kind == EventKind.WORK_WAIT:
                wait(name, position, finished(value))
            else:
                if ref == _DEVICE:
                    ends: Ends = {}
                    for other in {*self.on_stream, *self.pending}:
                        if other < HOST_COMM_STREAM:
                            ends = _both(ends, self._last_ends(other, position))
                elif ref == _STREAM:
                    ends = self._last_ends(name, position)
                else:
                    ends = finished(value) if ref == _HANDLE else recorded(ref)
                target = bisect_left(self.event, position)
                pairs.extend((target, node) for node in ends.values())
        self.records, self.handles = new_records, new_handles
        return pairs

    def _last_ends(self, name: int, position: int) -> Ends:
        """What ends when everything that stream ``name`` was given up to ``position`` has ended."""
        target = self._next(name, position)
        pending_target, waits = self.pending.get(name, (target, {}))
        ends = dict(waits) if pending_target == target else {}
        if nodes := self.on_stream.get(name):
            count = bisect_left(nodes, bisect_left(self.event, position))
            ends[name] = nodes[count - 1] if count else nodes[-1] - self.n
        return ends

    def _next(self, name: int, position: int) -> int | None:
        """The first node that stream ``name`` gets after ``position``, perhaps in the next copy."""
        nodes = self.on_stream.get(name)
        if not nodes:
            return None
        count = bisect_left(nodes, bisect_left(self.event, position))
        return nodes[count] if count < len(nodes) else nodes[0] + self.n


def _both(some: Ends, others: Ends) -> Ends:
    """What ends when both have ended."""
    return {**some, **{name: max(node, some.get(name, node)) for name, node in others.items()}}


def _counterparts(slice_: Slice, kind: EventKind, column: str) -> dict[int, int]:
    """For each record (handle) of the step before the steady one, that of the steady step in its place.

    Counted from the end, because the first step begins with set-up.
    """
    if len(slice_.steps) < 2:
        return {}
    names = []
    for begin, end in slice_.steps[-2:]:
        events = slice_.events[begin:end]
        names.append(events[column][events["kind"] == kind].tolist())
    earlier, steady = names
    return dict(zip(reversed(earlier), reversed(steady), strict=False))
