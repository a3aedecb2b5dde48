"""The files of a run that are looked at: report.html, timeline.json.gz, and graph/ in Chakra's form."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from windtunnel.cluster.draw import picture
from windtunnel.report.chakra import write_graph
from windtunnel.report.html import write_report
from windtunnel.report.perfetto import write_trace
from windtunnel.report.timeline import HeatMap, MemoryCurve
from windtunnel.training.emulate.chakra import graph_nodes
from windtunnel.training.emulate.graph import Category
from windtunnel.training.emulate.run import Outcome
from windtunnel.training.emulate.twin.timeline import timeline

MOST_CURVES = 12
"""Rank classes whose memory is drawn: the fullest ones."""

MOST_TRACKS = 4
"""Ranks in the timeline when the user names none."""


def write_pictures(
    directory: Path, outcome: Outcome, summary: dict[str, Any], timeline_ranks: Sequence[int] = ()
) -> None:
    """Write the report, the timeline and the graphs of ``outcome`` to ``directory``.

    ``timeline_ranks``: the ranks in the timeline; by default the critical one and one of some classes.
    """
    spans = timeline(outcome.timing, list(timeline_ranks) or shown_ranks(outcome))
    write_trace(directory / "timeline.json.gz", spans)
    for row, cls in enumerate(outcome.classes.classes):
        name = re.sub(r"[^A-Za-z0-9=.-]+", "_", cls.name).strip("_") or "all"
        write_graph(directory / "graph" / f"{name}.et", graph_nodes(outcome, row))
    write_report(
        directory / "report.html",
        summary,
        spans,
        memory_curves(outcome),
        heat_map(outcome),
        picture=picture(outcome.cluster),
    )


def shown_ranks(outcome: Outcome) -> list[int]:
    """The rank that ends last, and the first of classes spread evenly over the rest."""
    firsts = [int(cls.members[0]) for cls in outcome.classes.classes]
    places = np.unique(np.linspace(0, len(firsts) - 1, min(MOST_TRACKS, len(firsts))).astype(int))
    chosen = [outcome.timing.critical_rank, *(firsts[place] for place in places)]
    critical = int(outcome.classes.rank_class[outcome.timing.critical_rank])
    return sorted({r for r in chosen if r == chosen[0] or int(outcome.classes.rank_class[r]) != critical})


def memory_curves(outcome: Outcome) -> list[MemoryCurve]:
    """Memory over the events of the run for the classes that need most, the fullest first."""
    order = sorted(range(len(outcome.memory)), key=lambda row: -outcome.memory[row].whole.reserved_bytes)
    curves = []
    for row in order[:MOST_CURVES]:
        slice_, memory = outcome.classes.classes[row].slice, outcome.memory[row]
        begin, end = slice_.steady
        curve = memory.curve
        inside = (curve.event >= begin) & (curve.event < end)
        curves.append(
            MemoryCurve(
                label=outcome.classes.classes[row].name,
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


def heat_map(outcome: Outcome) -> HeatMap:
    """How long each rank's compute streams are busy in a step, host by host."""
    cluster = outcome.cluster
    busy = outcome.timing.rank_busy_s.reshape(cluster.hosts, cluster.devices_per_host)
    return HeatMap("Compute streams busy in a step", busy, "s")
