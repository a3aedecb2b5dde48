"""A scenario's result as a page: iterations alone and together, what they wait for, links, who sends when."""

from __future__ import annotations

from collections.abc import Sequence
from html import escape
from pathlib import Path
from typing import Any

from windtunnel.base import atomic, units
from windtunnel.network.scenario.together import PARTS, JobTimes
from windtunnel.report.page import figure, heading, page, plot

WORDS = {
    "computing": "computing", "latency": "starting collectives", "sending": "sending, as alone",
    "neighbours": "lost in sending",
}  # fmt: skip
WINDOW = 3.0
"""Iterations of the slowest job that the picture of who sends shows."""


def write_page(path: Path, result: dict[str, Any], ran: Sequence[JobTimes], cluster: str) -> None:
    """``cluster``: its picture as text."""
    jobs = result["jobs"]
    worst = max(jobs, key=lambda job: job["slowdown"])
    lead = [
        f"{len(jobs)} jobs on {result['cluster']}, placed {result['placement']}; sharing {result['sharing']},"
        f" schedule {result['schedule']}, aggregation {result['aggregation']}.",
        f"{worst['name']} loses most: its iteration takes {worst['slowdown']:.2f} times as long as alone.",
    ]
    head = heading("Iterations", "emulated; together: median and 95th percentile")
    tall = figure("", "seconds of an iteration", barmode="stack")
    names = [f"{job['name']} {when}" for job in jobs for when in ("alone", "together")]
    for part in PARTS:
        values = [job[key][part] for job in jobs for key in ("alone_path_s", "path_s")]
        tall.add_bar(x=names, y=values, name=WORDS[part])
    sections = [
        ("jobs", "Iterations", head + _table(JOBS, [_job(job) for job in jobs]) + plot(tall)),
        ("links", "Links", heading("Links", "the busiest of each kind") + _table(LINKS, _links(result))),
        (
            "sending",
            "Who sends when",
            heading("Who sends when", "the last iterations") + plot(_sending(jobs, ran)),
        ),
        ("cluster", "Cluster", heading("Cluster") + f"<pre>{escape(cluster)}</pre>"),
    ]
    atomic.replace(
        path, page(Path(result["scenario"]).name, lead, sections, note=result["figures"], plots=True)
    )


JOBS = ("job", "what", "devices", "alone", "together", "p95", "slow-down", "lowering's error")
LINKS = ("kind", "used", "busiest", "use", "by")


def _job(job: dict[str, Any]) -> tuple[str, ...]:
    error = job["lowering_error"]
    return (
        job["name"], f"{job['kind']}: {job['program']}", f"{job['devices']} on {job['hosts']} hosts",
        units.seconds(job["alone_s"]), units.seconds(job["together_s"]), units.seconds(job["together_p95_s"]),
        f"{job['slowdown']:.2f}x", "–" if error is None else f"{error:+.1%}",
    )  # fmt: skip


def _links(result: dict[str, Any]) -> list[tuple[str, ...]]:
    return [
        (row["kind"], str(row["used"]), row["busiest"], f"{row['use']:.0%}",
         ", ".join(f"{name} {share:.0%}" for name, share in row["by"].items() if share > 0))
        for row in result["links"]
    ]  # fmt: skip


def _table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    top = "".join(f'<th scope="col">{escape(name)}</th>' for name in head)
    body = "".join(f"<tr>{''.join(f'<td>{escape(cell)}</td>' for cell in row)}</tr>" for row in rows)
    return f'<div class="scroll"><table><thead><tr>{top}</tr></thead><tbody>{body}</tbody></table></div>'


def _sending(jobs: Sequence[dict[str, Any]], ran: Sequence[JobTimes]) -> Any:
    """A row a job, a bar a collective, over the last iterations."""
    chart = figure("milliseconds", "", barmode="overlay", height=120 + 50 * len(jobs))
    last = min(max((end for _, end, _ in outcome.spans), default=0.0) for outcome in ran)
    first = last - WINDOW * max(job["together_s"] for job in jobs)
    for job, outcome in zip(jobs, ran, strict=True):
        spans = [span for span in outcome.spans if span[1] > first and span[0] < last]
        chart.add_bar(
            y=[job["name"]] * len(spans), base=[(begin - first) * 1e3 for begin, _, _ in spans],
            x=[(end - begin) * 1e3 for begin, end, _ in spans], orientation="h", name=job["name"],
            opacity=0.6, text=[kind for _, _, kind in spans], textposition="none",
        )  # fmt: skip
    chart.update_xaxes(range=[0, (last - first) * 1e3])
    return chart
