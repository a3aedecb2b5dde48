"""Reads what `windtunnel.report.timeline` writes for Perfetto."""

from __future__ import annotations

import gzip
import json
from pathlib import Path

import numpy as np

from windtunnel.report.timeline import COLLECTIVE, LAUNCHES, WAITING, Timeline, Track

_KIND_OF = {"kernel": "compute", "gpu_memcpy": "compute", "gpu_memset": "compute", "cuda_runtime": "host"}


def read_trace(path: Path) -> Timeline:
    """The timeline that `write_trace` wrote to ``path``, as the page shows it; times to the nanosecond."""
    with gzip.open(path, "rt", encoding="utf-8") as file:
        events = json.load(file)["traceEvents"]
    labels = {
        (event["pid"], event["tid"]): event["args"]["name"]
        for event in events
        if event["name"] == "thread_name"
    }
    queues = {key: name for key, name in labels.items() if name != LAUNCHES}
    names: dict[str, int] = {}
    kinds: dict[str, int] = {}
    spans: dict[tuple[int, int], list[tuple[float, float, int, int]]] = {key: [] for key in queues}
    for event in events:
        if event["ph"] != "X" or (event["pid"], event["tid"]) not in queues:
            continue
        args = event.get("args", {})
        name, kind = event["name"], _KIND_OF.get(event["cat"], event["cat"])
        if name.startswith(COLLECTIVE):
            name, kind = f"{args['Collective name']} {args['Process Group Description']}", "communication"
        name = args.get("operator", name)
        start, end = event["ts"] / 1e6, (event["ts"] + event["dur"]) / 1e6
        rows = [(start, end, name, kind)]
        if waited := args.get(WAITING, 0):
            middle = start + waited / 1e6
            rows = [(start, middle, f"wait for {name}", "idle"), (middle, end, name, kind)]
        spans[event["pid"], event["tid"]].extend(
            (*times, names.setdefault(word, len(names)), kinds.setdefault(of, len(kinds)))
            for *times, word, of in rows
        )
    tracks = []
    for key in sorted(queues, key=lambda event: event[1]):
        start, end, name_of, kind_of = np.array(spans[key], np.float64).reshape(-1, 4).T
        tracks.append(
            Track(key[0], queues[key], start, end, name_of.astype(np.int32), kind_of.astype(np.int32))
        )
    return Timeline(tracks, list(names), list(kinds))
