"""The report as one HTML file that needs nothing else: no network, no library, light and dark.

Figures, tables and sentences are plain HTML, made here; the three pictures that need a pointer (timeline,
memory, heat map) are canvases, drawn by the scripts in ``assets/`` from arrays that `page_data` packs.
"""

from __future__ import annotations

import json
from pathlib import Path

from windtunnel.report import text
from windtunnel.report.page import page, resource
from windtunnel.report.page_data import pack_curves, pack_heat, pack_timeline
from windtunnel.report.sections import (
    about,
    cards,
    cluster,
    critical_path,
    heat_section,
    timeline_section,
    waits,
    warnings,
)
from windtunnel.report.tables import collectives, memory, operators
from windtunnel.report.text import Summary
from windtunnel.report.timeline import HeatMap, MemoryCurve, Timeline

SCRIPTS = ("common.js", "timeline.js", "charts.js")


def write_report(
    path: Path,
    summary: Summary,
    timeline: Timeline | None = None,
    memory_curves: list[MemoryCurve] | None = None,
    heat_map: HeatMap | None = None,
    *,
    picture: str = "",
) -> None:
    """Write the page of a run to ``path`` (folders are made).

    ``summary`` has the form of docs/summary.md; ``picture`` is the cluster as text. Parts that are not given
    are left out. Beyond a few hundred thousand spans the page shows the first ranks and says so.
    """
    spans, note = pack_timeline(timeline) if timeline else (None, "")
    curves = pack_curves(memory_curves or [])
    has_heat = heat_map is not None and bool((heat_map.value == heat_map.value).any())
    sections = (
        ("path", "Critical path", critical_path(summary)),
        ("waits", "Waits", waits(summary)),
        ("timeline", "Timeline", timeline_section(spans, note)),
        ("memory", "Memory", memory(summary, curves)),
        ("collectives", "Collectives", collectives(summary)),
        ("operators", "Operators", operators(summary)),
        ("heat", "Ranks", heat_section(heat_map) if heat_map and has_heat else ""),
        ("cluster", "Cluster", cluster(summary, picture)),
        ("warnings", "Warnings", warnings(summary)),
        ("inputs", "Inputs", about(summary)),
    )
    data = {
        "timeline": spans,
        "memory": curves,
        "heat": pack_heat(heat_map) if heat_map and has_heat else None,
    }
    scripts = "".join(resource(name) for name in SCRIPTS)
    whole = page(
        text.command_line(summary),
        [text.cluster_line(summary)],
        sections,
        note=_stamp(summary),
        cards=cards(summary),
        footer=text.provenance_sentence(summary),
        tail=f"""<div id="tip" role="status" hidden></div>
<script type="application/json" id="data">{_json(data)}</script>
<script>
{scripts}</script>
""",
        code=True,
    )
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(whole, encoding="utf-8")


def _stamp(summary: Summary) -> str:
    run = f"Run {summary['run_id']}" if summary.get("run_id") else "Run"
    when = str(summary.get("created_at", ""))[:19].replace("T", " ")
    return f"{run}{f' of {when} UTC' if when else ''}. {text.provenance_sentence(summary)}"


def _json(data: object) -> str:
    """JSON that cannot end the element it stands in."""
    return json.dumps(data, separators=(",", ":"), allow_nan=False).replace("<", "\\u003c")
