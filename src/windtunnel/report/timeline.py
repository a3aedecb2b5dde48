"""What the report draws: spans on queues, memory over time, one figure for each rank.

Plain arrays that a capability fills in; times are seconds, memory is bytes.

`write_trace` makes a file that https://ui.perfetto.dev opens: Chrome's trace events as JSON, gzipped. A
process is a rank, a thread is one of its queues, a span is a complete event. Spans are rounded to whole
nanoseconds at both ends, so that neighbours stay neighbours. What is known more of a span (`About`) is
written as PyTorch's profiler (Kineto) writes it: kernels with stream, device, correlation and arguments, the
operator and the launch on the host's thread, an arrow (``ac2g``) from the launch to the kernel, a collective
from where it is ready to where it ends, the step as ``ProfilerStep#n``, and memory as a counter. So the file
of one rank is what Meta's HolisticTraceAnalysis reads.

Source: "Trace Event Format" (Google, 2016), https://perfetto.dev/docs/getting-started/other-formats;
``libkineto/src/output_json.cpp`` (pytorch/kineto).
"""

from __future__ import annotations

import gzip
import json
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass, field
from itertools import count, islice
from pathlib import Path
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]
Indices = NDArray[np.int32]

COLLECTIVE = "ncclDevKernel_"  # what the names of kernels that communicate begin with
WAITING = "Waiting (us)"
ON_HOST = ("Input Dims", "Input type", "module")  # of an operator's arguments, beside those of its kernel
LAUNCHES = "launches"  # the thread of the host that issues
KINDS = ("compute", "communication", "idle", "launch", "host")
"""Kinds of spans that the report has a colour for."""


@dataclass(frozen=True)
class About:
    """What PyTorch's profiler would say of a span: its name and category there, its arguments, and the
    operator that the host ran for it ("": none, the span is the host's own)."""

    name: str
    category: str
    args: dict[str, Any]
    operator: str = ""


@dataclass(frozen=True)
class Track:
    """What one queue of one rank did: n spans that do not overlap, in order.

    ``queue`` is shown to the reader (``"host"``, ``"compute"``, ``"nccl dp"``). ``start`` and ``end`` are
    seconds, ``name`` and ``kind`` index the timeline's tables; all of shape [n]. So is, where more is known,
    ``about`` (-1: the wait of the span that follows); and from when to when the host ``issued``, [2, n].
    """

    rank: int
    queue: str
    start: Floats
    end: Floats
    name: Indices
    kind: Indices
    about: Indices | None = None
    issued: Floats | None = None

    def __len__(self) -> int:
        return len(self.start)


@dataclass(frozen=True)
class Timeline:
    """The tracks of the ranks that were chosen, those of one rank next to each other."""

    tracks: list[Track]
    names: list[str]
    kinds: list[str] = field(default_factory=lambda: list(KINDS))
    about: list[About] = field(default_factory=list)
    memory: dict[int, tuple[Floats, Floats, Floats]] = field(default_factory=dict)
    """Of each rank the times, and the bytes that are allocated and reserved from then on."""
    step: tuple[int, float] = (0, 0.0)
    """The number of the step that is shown, and how long it takes."""

    def ranks(self) -> list[int]:
        """The ranks shown, in the order of their first tracks."""
        return list(dict.fromkeys(track.rank for track in self.tracks))


@dataclass(frozen=True)
class MemoryTimeline:
    """Memory of a rank class over a step; all arrays of shape [n], bytes but for ``time``.

    ``time`` ascends: seconds, or the share of the step's events that have passed (0 to 1), as ``axis`` says.
    ``by_category`` adds up to ``allocated``. ``capacity``: what the device can give.
    """

    label: str
    time: Floats
    allocated: Floats
    reserved: Floats
    by_category: dict[str, Floats]
    capacity: float
    axis: Literal["seconds", "fraction"] = "fraction"


@dataclass(frozen=True)
class HeatMap:
    """One figure for each rank: ``value`` of shape [hosts, devices per host], NaN where there is no rank.

    ``unit`` is ``"s"``, ``"bytes"``, ``"share"`` or a word that is printed after the number.
    """

    title: str
    value: Floats
    unit: str


_LINES = 8192  # of text that are compressed at a time


def write_trace(path: Path, timeline: Timeline, by_rank: Path | None = None) -> None:
    """Write ``timeline`` to ``path`` (``….json.gz``; folders are made), for equal timelines equal bytes.
    ``by_rank``: a folder that gets each rank's part as a file, ``rank-17.json.gz``."""
    numbers = count(1)
    with ExitStack() as end:
        whole = _open(path, "", end)
        for place, rank in enumerate(timeline.ranks()):
            with ExitStack() as part:
                files = [whole]
                if by_rank is not None:
                    head_fields = f'"schemaVersion":1,"distributedInfo":{{"backend":"nccl","rank":{rank}}},'
                    files.append(_open(by_rank / f"rank-{rank}.json.gz", head_fields, part))
                if place:
                    whole.write(b",\n")
                lines = _events(timeline, place, rank, numbers)
                separator = ""
                while some := list(islice(lines, _LINES)):
                    for file in files:
                        file.write((separator + ",\n".join(some)).encode())
                    separator = ",\n"


def _open(path: Path, head_fields: str, stack: ExitStack) -> gzip.GzipFile:
    """The beginning of a file, which gets its end when ``stack`` does."""
    path.parent.mkdir(parents=True, exist_ok=True)
    raw = stack.enter_context(path.open("wb"))
    file = stack.enter_context(gzip.GzipFile("", "wb", 2, raw, mtime=0))
    file.write(f'{{{head_fields}"displayTimeUnit":"ms","traceEvents":[\n'.encode())
    stack.callback(file.write, b"\n]}\n")
    return file


def _events(timeline: Timeline, place: int, rank: int, numbers: Iterator[int]) -> Iterator[str]:
    """All lines of one rank."""
    yield _label("process_name", rank, 0, "name", f"rank {rank}")
    yield _label("process_sort_index", rank, 0, "sort_index", place)
    described, host = False, len(timeline.tracks) + 1
    for i, track in enumerate(timeline.tracks):
        if track.rank == rank:
            yield _label("thread_name", rank, i + 1, "name", track.queue)
            yield _label("thread_sort_index", rank, i + 1, "sort_index", i)
            described = described or track.about is not None
    if described:
        yield _label("thread_name", rank, host, "name", LAUNCHES)
        yield _label("thread_sort_index", rank, host, "sort_index", -1)
        step, lasting = timeline.step
        yield (
            f'{{"ph":"X","name":"ProfilerStep#{step}","cat":"user_annotation","ts":0,'
            f'"dur":{_micros(round(lasting * 1e9))},"pid":{rank},"tid":{host}}}'
        )
    for time, *sizes in zip(*timeline.memory.get(rank, ()), strict=True):
        sizes_by_name = dict(zip(("allocated", "reserved"), map(int, sizes), strict=True))
        event = {"ph": "C", "name": "device memory", "pid": rank, "ts": time * 1e6, "args": sizes_by_name}
        yield json.dumps(event, separators=(",", ":"))
    for i, track in enumerate(timeline.tracks):
        if track.rank == rank:
            timed = track.about is not None
            yield from (
                _kernels(timeline, track, i + 1, host, numbers) if timed else _spans(timeline, track, i + 1)
            )


def _kernels(
    timeline: Timeline, track: Track, thread: int, host: int, numbers: Iterator[int]
) -> Iterator[str]:
    """Spans of which more is known, with the operators and launches that lead to them."""
    names = [json.dumps(entry.name) for entry in timeline.about]
    heads = [
        f'"name":{name},"cat":"{entry.category}"' for name, entry in zip(names, timeline.about, strict=True)
    ]
    texts = [_inside(entry.args) for entry in timeline.about]
    operators = [json.dumps(entry.operator) for entry in timeline.about]
    inputs = [
        _inside({key: entry.args[key] for key in ON_HOST if key in entry.args}) for entry in timeline.about
    ]
    start, end = (times.tolist() for times in _nanoseconds(track.start, track.end))
    issued = np.full((2, len(track)), -1.0) if track.issued is None else track.issued
    first, last = (times.tolist() for times in _nanoseconds(*issued))
    on_host = f'"pid":{track.rank},"tid":{host}'
    here = f'"pid":{track.rank},"tid":{thread}'
    since = -1
    for row, about in enumerate([] if track.about is None else track.about.tolist()):
        if about < 0:
            since = start[row]
            continue
        begin, waited = start[row], ""
        if since >= 0:
            begin, waited = since, f',"{WAITING}":{_micros(start[row] - since)}'
        since = -1
        span = f'"ts":{_micros(begin)},"dur":{_micros(end[row] - begin)}'
        if not timeline.about[about].operator:
            yield f'{{"ph":"X",{heads[about]},{span},{here},"args":{{{texts[about][1:]}}}}}'
            continue
        number = next(numbers)
        tie = f'"External id":{number},"correlation":{number}'
        more = f'"stream":{thread},"device":{track.rank},{tie}{waited}'
        yield f'{{"ph":"X",{heads[about]},{span},{here},"args":{{{more}{texts[about]}}}}}'
        if first[row] < 0:
            continue
        launch = f'"ts":{_micros(first[row])},"dur":{_micros(last[row] - first[row])},{on_host}'
        operator = f'"name":{operators[about]},"cat":"cpu_op",{launch}'
        yield f'{{"ph":"X",{operator},"args":{{"External id":{number}{inputs[about]}}}}}'
        yield f'{{"ph":"X","name":"cudaLaunchKernel","cat":"cuda_runtime",{launch},"args":{{{tie}}}}}'
        arrow = f'"cat":"ac2g","name":"ac2g","id":{number}'
        yield f'{{"ph":"s",{arrow},"ts":{_micros(first[row])},{on_host}}}'
        yield f'{{"ph":"f","bp":"e",{arrow},"ts":{_micros(begin)},{here}}}'


def _label(kind: str, rank: int, thread: int, key: str, value: str | int) -> str:
    event = {"ph": "M", "name": kind, "pid": rank, "tid": thread, "args": {key: value}}
    return json.dumps(event, separators=(",", ":"))


def _inside(args: dict[str, Any]) -> str:
    """Arguments as they follow others."""
    return "".join(f",{json.dumps(key)}:{json.dumps(value)}" for key, value in args.items())


def _spans(timeline: Timeline, track: Track, thread: int) -> Iterator[str]:
    names = [json.dumps(name) for name in timeline.names]
    kinds = [json.dumps(kind) for kind in timeline.kinds]
    tail = f',"pid":{track.rank},"tid":{thread}}}'
    start, end = _nanoseconds(track.start, track.end)
    columns = (start.tolist(), (end - start).tolist(), track.name.tolist(), track.kind.tolist())
    for begin, lasting, name, kind in zip(*columns, strict=True):
        yield (
            f'{{"ph":"X","name":{names[name]},"cat":{kinds[kind]},'
            f'"ts":{_micros(begin)},"dur":{_micros(lasting)}{tail}'
        )


def _nanoseconds(*times: Floats) -> list[NDArray[np.int64]]:
    return [np.round(column * 1e9).astype(np.int64) for column in times]


def _micros(nanoseconds: int) -> str:
    """The trace's unit, exactly: a float of a long run would lose the nanoseconds."""
    sign, size = ("-", -nanoseconds) if nanoseconds < 0 else ("", nanoseconds)
    return f"{sign}{size // 1000}.{size % 1000:03d}"
