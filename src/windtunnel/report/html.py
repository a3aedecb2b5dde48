"""The report as one HTML file that needs nothing else: no network, no library, light and dark.

Figures, tables and sentences are plain HTML, made here; the three pictures that need a pointer (timeline,
memory, heat map) are canvases, drawn by the scripts in ``assets/`` from packed arrays.

These are small enough for one file and exact enough for the eye. Spans become whole ticks
(the timeline's length over 2³²), in base64; memory curves keep a few hundred points, each the greatest of
those that it stands for, so that no peak is lost.
"""

from __future__ import annotations

import base64
import json
import math
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from windtunnel.report import text
from windtunnel.report.page import page, resource
from windtunnel.report.sections import (
    about,
    approximations,
    cards,
    cluster,
    collectives,
    critical_path,
    heat_section,
    memory,
    module_table,
    operators,
    period,
    timeline_section,
    waits,
    warnings,
)
from windtunnel.report.text import Summary
from windtunnel.report.timeline import HeatMap, MemoryTimeline, Timeline, Track

SCRIPTS = ("common.js", "timeline.js", "charts.js")


def write_report(
    path: Path, summary: Summary, timeline: Timeline | None = None,
    memory_curves: list[MemoryTimeline] | None = None, heat_map: HeatMap | None = None, *, picture: str = "",
    modules: Sequence[dict[str, Any]] = (),
) -> None:  # fmt: skip
    """Write the page of a run to ``path`` (folders are made).

    ``summary`` has the form of ``summary.json``; ``picture`` is the cluster as text. Parts that are not given
    are left out. Beyond a few hundred thousand spans the page shows the first ranks and says so.
    """
    spans, note = pack_timeline(timeline) if timeline else (None, "")
    curves = pack_curves(memory_curves or [])
    has_heat = heat_map is not None and bool((heat_map.value == heat_map.value).any())
    sections = (
        ("warnings", "Warnings", warnings(summary)),
        ("figures", "Figures", cards(summary)),
        ("period", "Period", period(summary)),
        ("path", "Critical path", critical_path(summary)),
        ("waits", "Waits", waits(summary)),
        ("timeline", "Timeline", timeline_section(spans, note)),
        ("memory", "Memory", memory(summary, curves)),
        ("collectives", "Collectives", collectives(summary)),
        ("modules", "Modules", module_table(modules)),
        ("operators", "Operators", operators(summary)),
        ("heat", "Ranks", heat_section(heat_map) if heat_map and has_heat else ""),
        ("cluster", "Cluster", cluster(summary, picture)),
        ("approximations", "Approximations", approximations(summary)),
        ("inputs", "Inputs", about(summary)),
    )
    data = {
        "timeline": spans,
        "memory": curves,
        "heat": pack_heat(heat_map) if heat_map and has_heat else None,
    }
    scripts = "".join(resource(name) for name in SCRIPTS)
    lead = [line for line in (text.cluster_line(summary), text.ranks_line(summary)) if line]
    whole = page(
        text.command_line(summary), lead, sections, note=_stamp(summary),
        alarm=text.worst_out_of_memory(summary),
        footer=text.provenance_sentence(summary),
        tail=f"""<div id="tip" role="status" hidden></div>
<script type="application/json" id="data">{_json(data)}</script>
<script>
{scripts}</script>
""",
        code=True,
    )  # fmt: skip
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(whole, encoding="utf-8")


def _stamp(summary: Summary) -> str:
    run = f"Run {summary['run_id']}" if summary.get("run_id") else "Run"
    when = str(summary.get("created_at", ""))[:19].replace("T", " ")
    return f"{run}{f' of {when} UTC' if when else ''}. {text.provenance_sentence(summary)}"


def _json(data: object) -> str:
    """JSON that cannot end the element it stands in."""
    return json.dumps(data, separators=(",", ":"), allow_nan=False).replace("<", "\\u003c")


MOST_SPANS = 250_000  # about 4 MB of page
MOST_POINTS = 40_000  # of all memory curves together
CURVE_POINTS = 600


def pack_timeline(timeline: Timeline) -> tuple[dict[str, Any] | None, str]:
    """The timeline for the page's script, and a sentence on what had to be left out ("": nothing)."""
    tracks, note = _chosen(timeline)
    if not any(len(track) for track, _ in tracks):
        return None, note
    begin = min(float(track.start.min()) for track, _ in tracks if len(track))
    span = max(float(track.end.max()) for track, _ in tracks if len(track)) - begin
    tick = max(span, 1e-9) / (2**32 - 1)
    starts, widths, rows = [], [], []
    offset = 0
    for track, selected in tracks:
        first = np.round((track.start[selected] - begin) / tick)
        starts.append(first)
        widths.append(np.maximum(np.round((track.end[selected] - begin) / tick) - first, 0))
        rows.append(
            {"rank": track.rank, "queue": track.queue, "begin": offset, "end": offset + len(selected)}
        )
        offset += len(selected)
    wide = len(timeline.names) > 2**16
    kinds = _column(tracks, "kind")
    packed = {
        "tick": tick,
        "span": max(span, 1e-9),
        "ranks": list(dict.fromkeys(row["rank"] for row in rows)),
        "tracks": rows,
        "names": timeline.names,
        "kinds": timeline.kinds,
        "used": [timeline.kinds[kind] for kind in np.unique(kinds)],
        "wide": wide,
        "start": _base64(np.concatenate(starts), np.uint32),
        "width": _base64(np.concatenate(widths), np.uint32),
        "name": _base64(_column(tracks, "name"), np.uint32 if wide else np.uint16),
        "kind": _base64(kinds, np.uint8),
    }
    return packed, note


def pack_curves(curves: list[MemoryTimeline]) -> list[dict[str, Any]]:
    """The memory curves for the page's script, those with the least headroom first."""
    most = max(50, min(CURVE_POINTS, MOST_POINTS // max(1, len(curves))))
    ordered = sorted(curves, key=lambda curve: curve.capacity - float(curve.reserved.max(initial=0)))
    return [_curve(curve, most) for curve in ordered if len(curve.time)]


def pack_heat(heat: HeatMap) -> dict[str, Any]:
    """The heat map for the page's script."""
    low, high = float(np.nanmin(heat.value)), float(np.nanmax(heat.value))
    # Differences of less than one in a thousand are not shown as a full range of colours.
    spread = max(high - low, 1e-3 * abs(high))
    return {
        "hosts": heat.value.shape[0], "devices": heat.value.shape[1], "low": low, "high": low + spread,
        "unit": heat.unit, "value": _base64(heat.value.ravel(), np.float32),
    }  # fmt: skip


def _chosen(timeline: Timeline) -> tuple[list[tuple[Track, NDArray[np.int64]]], str]:
    """The tracks that fit into the page: (track, spans kept), whole ranks as far as they go."""
    sizes: dict[int, int] = {}
    for track in timeline.tracks:
        sizes[track.rank] = sizes.get(track.rank, 0) + len(track)
    ranks: list[int] = []
    for rank in timeline.ranks():
        if ranks and sum(sizes[rank] for rank in ranks) + sizes[rank] > MOST_SPANS:
            break
        ranks.append(rank)
    chosen = [track for track in timeline.tracks if track.rank in ranks]
    shortest = 0.0
    if sum(len(track) for track in chosen) > MOST_SPANS:
        every = np.concatenate([track.end - track.start for track in chosen])
        shortest = float(np.partition(every, len(every) - MOST_SPANS)[len(every) - MOST_SPANS])
    notes = []
    if len(ranks) < len(sizes):
        notes.append(f"{len(ranks)} of {len(sizes)} ranks are shown")
    if shortest:
        notes.append(f"spans of less than {shortest * 1e6:.3g} µs are left out")
    note = f"{' and '.join(notes)}; timeline.json.gz has all." if notes else ""
    return [(track, np.flatnonzero(track.end - track.start >= shortest)) for track in chosen], note


def _column(tracks: list[tuple[Track, NDArray[np.int64]]], name: str) -> NDArray[np.int32]:
    return np.concatenate([getattr(track, name)[selected] for track, selected in tracks])


def _curve(curve: MemoryTimeline, most: int) -> dict[str, Any]:
    sampled = _peaks(curve.allocated, most)
    columns = {
        "time": curve.time,
        "allocated": curve.allocated,
        "reserved": curve.reserved,
        **curve.by_category,
    }
    return {
        "label": curve.label,
        "axis": curve.axis,
        "capacity": curve.capacity if math.isfinite(curve.capacity) else None,
        "peak": float(curve.reserved.max()),
        "categories": [key for key, value in curve.by_category.items() if value.any()],
        "columns": {key: _base64(value[sampled], np.float32) for key, value in columns.items()},
    }


def _peaks(value: NDArray[np.float64], most: int) -> NDArray[np.int64]:
    """At most ``most`` places of ``value``, ends included, the greatest of every stretch of equal length."""
    n = len(value)
    if n <= most:
        return np.arange(n)
    edges = np.linspace(0, n, most - 1).astype(np.int64)
    best = [a + int(value[a:b].argmax()) for a, b in pairwise(edges.tolist())]
    return np.unique([0, *best, n - 1])


def _base64(values: NDArray[Any], dtype: Any) -> str:
    little = np.dtype(dtype).newbyteorder("<")
    return base64.b64encode(np.ascontiguousarray(values, little).tobytes()).decode()
