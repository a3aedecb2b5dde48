"""What the report draws: spans on queues, memory over time, one figure for each rank.

Plain arrays that a capability fills in; times are seconds, memory is bytes.

`write_trace` makes a file that https://ui.perfetto.dev opens: Chrome's trace events as JSON, gzipped. A
process is a rank, a thread is one of its queues, a span is a complete event. Spans are rounded to whole
nanoseconds at both ends, so that neighbours stay neighbours. Events are written as they are made: memory does
not grow with the length of the trace beyond that of one track.

Source: "Trace Event Format" (Google, 2016), https://perfetto.dev/docs/getting-started/other-formats.
"""

from __future__ import annotations

import gzip
import json
from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import chain
from pathlib import Path
from typing import Literal

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]
Indices = NDArray[np.int32]

KINDS = ("compute", "communication", "idle", "launch", "host")
"""Kinds of spans that the report has a colour for."""


@dataclass(frozen=True)
class Track:
    """What one queue of one rank did: n spans that do not overlap, in order.

    ``queue`` is shown to the reader (``"host"``, ``"compute"``, ``"nccl dp"``). ``start`` and ``end`` are
    seconds, ``name`` and ``kind`` index the timeline's tables; all of shape [n].
    """

    rank: int
    queue: str
    start: Floats
    end: Floats
    name: Indices
    kind: Indices

    def __len__(self) -> int:
        return len(self.start)


@dataclass(frozen=True)
class Timeline:
    """The tracks of the ranks that were chosen, those of one rank next to each other."""

    tracks: list[Track]
    names: list[str]
    kinds: list[str] = field(default_factory=lambda: list(KINDS))

    def ranks(self) -> list[int]:
        """The ranks shown, in the order of their first tracks."""
        return list(dict.fromkeys(track.rank for track in self.tracks))


@dataclass(frozen=True)
class MemoryCurve:
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


def write_trace(path: Path, timeline: Timeline) -> None:
    """Write ``timeline`` to ``path`` (``….json.gz``; folders are made), for equal timelines equal bytes."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("wb") as raw, gzip.GzipFile("", "wb", 6, raw, mtime=0) as file:
        file.write(b'{"displayTimeUnit":"ms","traceEvents":[\n')
        lines: list[str] = []
        separator = ""
        for line in chain(_names(timeline), _spans(timeline)):
            lines.append(separator + line)
            separator = ",\n"
            if len(lines) == _LINES:
                file.write("".join(lines).encode())
                lines.clear()
        file.write("".join(lines).encode())
        file.write(b"\n]}\n")


def _names(timeline: Timeline) -> Iterator[str]:
    for place, rank in enumerate(timeline.ranks()):
        yield _label("process_name", rank, 0, "name", f"rank {rank}")
        yield _label("process_sort_index", rank, 0, "sort_index", place)
    for i, track in enumerate(timeline.tracks):
        yield _label("thread_name", track.rank, i + 1, "name", track.queue)
        yield _label("thread_sort_index", track.rank, i + 1, "sort_index", i)


def _label(kind: str, rank: int, thread: int, key: str, value: str | int) -> str:
    event = {"ph": "M", "name": kind, "pid": rank, "tid": thread, "args": {key: value}}
    return json.dumps(event, separators=(",", ":"))


def _spans(timeline: Timeline) -> Iterator[str]:
    names = [json.dumps(name) for name in timeline.names]
    kinds = [json.dumps(kind) for kind in timeline.kinds]
    for i, track in enumerate(timeline.tracks):
        tail = f',"pid":{track.rank},"tid":{i + 1}}}'
        start, end = _nanoseconds(track)
        columns = (start.tolist(), (end - start).tolist(), track.name.tolist(), track.kind.tolist())
        for begin, lasting, name, kind in zip(*columns, strict=True):
            yield (
                f'{{"ph":"X","name":{names[name]},"cat":{kinds[kind]},'
                f'"ts":{_micros(begin)},"dur":{_micros(lasting)}{tail}'
            )


def _nanoseconds(track: Track) -> tuple[np.ndarray[tuple[int], np.dtype[np.int64]], ...]:
    return tuple(np.round(times * 1e9).astype(np.int64) for times in (track.start, track.end))


def _micros(nanoseconds: int) -> str:
    """The trace's unit, exactly: a float of a long run would lose the nanoseconds."""
    sign, size = ("-", -nanoseconds) if nanoseconds < 0 else ("", nanoseconds)
    return f"{sign}{size // 1000}.{size % 1000:03d}"


def read_trace(path: Path) -> Timeline:
    """The timeline that `write_trace` wrote to ``path``; times to the nanosecond."""
    with gzip.open(path, "rt", encoding="utf-8") as file:
        events = json.load(file)["traceEvents"]
    queues = {(one["pid"], one["tid"]): one["args"]["name"] for one in events if one["name"] == "thread_name"}
    names: dict[str, int] = {}
    kinds: dict[str, int] = {}
    spans: dict[tuple[int, int], list[tuple[float, float, int, int]]] = {key: [] for key in queues}
    for one in events:
        if one["ph"] == "X":
            name, kind = (
                known.setdefault(one[key], len(known)) for known, key in ((names, "name"), (kinds, "cat"))
            )
            start = one["ts"] / 1e6
            spans[one["pid"], one["tid"]].append((start, start + one["dur"] / 1e6, name, kind))
    tracks = []
    for key in sorted(queues, key=lambda one: one[1]):
        start, end, name_of, kind_of = np.array(spans[key], np.float64).reshape(-1, 4).T
        tracks.append(
            Track(key[0], queues[key], start, end, name_of.astype(np.int32), kind_of.astype(np.int32))
        )
    return Timeline(tracks, list(names), list(kinds))
