"""What chosen ranks do in the last step, queue by queue, for pictures and trace viewers."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from windtunnel.report.timeline import Timeline, Track
from windtunnel.training.emulate.graph import COMM_STREAM, EventKind
from windtunnel.training.emulate.twin.emulate import Timing
from windtunnel.training.emulate.twin.program import HOST, HOST_COMM_STREAM, StepProgram

KINDS = ["compute", "communication", "idle", "host"]
_COMPUTE, _COMMUNICATION, _IDLE, _HOST = range(4)


def timeline(timing: Timing, ranks: Sequence[int]) -> Timeline:
    """Tracks of every queue of ``ranks`` from the end of the step before to the end of the last.

    Times are seconds from the beginning of that window. A collective's waiting for its last member is a span
    of its own, of kind ``idle``, before the transfer.
    """
    names: dict[str, int] = {}
    tracks: list[Track] = []
    for rank in ranks:
        colour = int(timing.job.colour[rank])
        program = timing.job.programs[timing.job.class_of(colour)]
        for queue in range(len(program.streams)):
            track = _track(timing, rank, colour, queue, names)
            if len(track.start):
                tracks.append(track)
    return Timeline(tracks, list(names), KINDS)


def _track(timing: Timing, rank: int, colour: int, queue: int, names: dict[str, int]) -> Track:
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

    waits = joins & (ready[nodes] < starts)
    waiting = [f"wait for {text}" for text, wait in zip(texts, waits.tolist(), strict=True) if wait]
    wait_name = np.array([names.setdefault(text, len(names)) for text in waiting], np.int32)
    all_starts = np.concatenate([starts, ready[nodes][waits]])
    order = np.argsort(all_starts, kind="stable")
    return Track(
        rank=rank,
        queue=_queue_name(program, queue, timing, colour),
        start=np.maximum(all_starts, begin)[order] - begin,
        end=np.minimum(np.concatenate([stops, starts[waits]]), end)[order] - begin,
        name=np.concatenate([name, wait_name])[order],
        kind=np.concatenate([kind, np.full(len(waiting), _IDLE)])[order].astype(np.int32),
    )


def _name(timing: Timing, colour: int, node: int) -> str:
    row = timing.job.class_of(colour)
    program = timing.job.programs[row]
    if program.is_join[node]:
        calls = timing.job.world.calls[row]
        call = int(program.program.join[node]) % len(calls.event)
        family = timing.job.world.classes.families.families[calls.rows[int(calls.row[call])].channel[0]]
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
