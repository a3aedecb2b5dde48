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

    targets, sources = _dependencies(slice_, event, node_stream)
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


Ends = dict[int, int]
"""For each stream the node whose end is waited for; it implies those before it."""
_WAITS = (EventKind.WORK_WAIT, EventKind.WAIT)


def _dependencies(slice_: Slice, event: Longs, node_stream: Longs) -> tuple[Longs, Longs]:
    """Pairs (node, node that must end before it) of a copy; the latter is less than zero in a copy before.

    The events that order nodes are read for each of three copies, since what one leaves behind (records,
    waits that no node has taken up) is what the next begins with. The pairs are those of the last copy.
    """
    n, events = len(event), slice_.events[slice(*slice_.steady)]
    kind, stream = events["kind"], events["stream"]
    nodes = {name: np.flatnonzero(node_stream == name).tolist() for name in set(node_stream.tolist())}
    nodes.pop(HOST, None)
    at = {name: event[of_stream].tolist() for name, of_stream in nodes.items()}
    reads = np.isin(kind, (*_WAITS, EventKind.RECORD, EventKind.COLLECTIVE, EventKind.SYNC))
    for name, places in at.items():  # an operator only where it takes up a wait
        waits = np.flatnonzero(np.isin(kind, _WAITS) & (stream == name))
        reads[[places[bisect_left(places, wait) % len(places)] for wait in waits.tolist()]] = True
    positions = np.flatnonzero(reads)
    rows = [positions.tolist(), *(events[name][positions].tolist() for name in ("kind", "ref", "value"))]
    streams = stream[positions].tolist()
    node_at = dict(zip(event.tolist(), enumerate(node_stream.tolist()), strict=True))
    same_record = _counterparts(slice_, EventKind.RECORD, "ref")
    same_handle = _counterparts(slice_, EventKind.COLLECTIVE, "value")

    records: dict[int, Ends] = {}
    handles: dict[int, Ends] = {}
    pending: dict[int, Ends] = {}  # for each stream the waits that its next node takes up
    pairs: list[tuple[int, int]] = []
    for first in (0, n, 2 * n):
        before, records, work_before, handles = records, {}, handles, {}
        pairs, waited = [], dict[tuple[int, int], int]()

        def given(name: int, position: int, first: int = first) -> Ends:
            """What ends when everything that the stream was given up to there has ended."""
            ends = dict(pending.get(name, {}))
            if name in nodes:
                place = bisect_left(at[name], position) - 1
                ends[name] = first + nodes[name][place] - (n if place < 0 else 0)
            return ends

        for position, name, what, ref, handle in zip(rows[0], streams, *rows[1:], strict=True):
            recorded = records.get(ref, before.get(same_record.get(ref, -1), {}))
            finished = handles.get(handle, work_before.get(same_handle.get(handle, -1), {}))
            if what in _WAITS:
                ends = recorded if what == EventKind.WAIT else finished
                pending[name] = _both(pending.get(name, {}), ends)
            elif what == EventKind.RECORD:
                records[ref] = given(name, position)
            elif what == EventKind.SYNC:
                ends = {_STREAM: given(name, position), _HANDLE: finished}.get(ref, recorded)
                for other in {*nodes, *pending} if ref == _DEVICE else ():
                    if other < HOST_COMM_STREAM:
                        ends = _both(ends, given(other, position))
                pairs += [(node_at[position][0], node - first) for node in ends.values()]
            else:
                node, queue = node_at[position]
                for source, end in pending.pop(queue, {}).items():
                    if source != queue and waited.get((queue, source), end - 1) < end:
                        waited[queue, source] = end
                        pairs.append((node, end - first))
                if what == EventKind.COLLECTIVE:
                    handles[handle] = {queue: first + node}
    array = np.array(pairs or np.zeros((0, 2)), np.int64)
    return array[:, 0], array[:, 1]


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
