"""The summary of a run on the terminal: what a reader asks first, on one screen of at most 100 columns.

Emulated figures are never shown as measured: the last line says where the figures come from.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from rich.console import Console
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from windtunnel.base import units
from windtunnel.report import text
from windtunnel.report.text import Summary

WIDTH = 100
_BAR = 30  # columns, at the full width
_EIGHTHS = " ▏▎▍▌▋▊▉█"
_STYLES = {"compute": "blue", "pipeline_bubble": "magenta", "imbalance": "red", "launch": "cyan"}
_VERDICTS = {"fits": "green", "tight": "yellow", "does not fit": "bold red"}
_CLASSES = 12  # rank classes that are listed; of more, those with the least headroom


def print_summary(summary: Summary, console: Console, report: Path | None = None) -> None:
    """Print ``summary`` (the form of ``summary.json``); ``report`` is the file of the page, if any."""
    width = min(console.width, WIDTH)

    def show(item: Any, indent: int = 2) -> None:
        console.print(Padding(item, (0, 0, 0, indent)), width=width, highlight=False)

    refused = text.worst_out_of_memory(summary)
    if refused:
        show(Text(f"✗ {refused}", "bold red"), 0)
    show(Text(text.command_line(summary), "bold"), 0)
    show(Text(text.cluster_line(summary), "dim"), 0)
    if ran := text.ranks_line(summary):
        show(Text(ran, "dim"), 0)
    console.print()
    show(_headline(summary))
    for title, body in (
        ("The steps that repeat", _period(summary)),
        (f"Where the iteration goes{_whose(summary)}", _path(summary, width)),
        ("Device memory (peaks)", _memory(summary)),
        ("Live ranks (virtual time; memory of their tensors, measured)", _live(summary)),
    ):
        if body.row_count:
            _title(console, title)
            show(body)
    for note in (summary.get("live") or {}).get("notes", ()):
        show(Text(f"! {note}", "yellow"))
    lacking = [group for group in summary.get("ranks") or () if group.get("oom")]
    for group in lacking[:_CLASSES] if len(lacking) > 1 else ():
        show(Text(f"✗ ranks {group['name']}: {text.out_of_memory(group['oom'])}", "red"))
    verdict_text = text.asked(summary)
    if verdict_text:
        console.print()
        show(Text(verdict_text, "green" if summary["verdict"]["passed"] else "bold red"))
    waits = (summary.get("waits") or ())[:3]
    if waits:
        _title(console, "What it waits for")
        for number, wait in enumerate(waits, start=1):
            line = Text(f"{number}. ")
            line.append(f"{units.seconds(wait['seconds'])} ({units.share(wait['share'])})", "bold")
            line.append(f"  {wait['what']}")
            show(line)
            show(Text(f"→ {wait['remedy']}", "green"), 5)
    warnings = summary.get("warnings") or ()
    if warnings:
        _title(console, "Warnings")
        for warning in warnings:
            show(Text(f"! {warning}", "yellow"))
    console.print()
    if report is not None:
        # A path is never broken by the terminal's width: it is there to be clicked or copied.
        console.print(Text.assemble("Report  ", (str(report), "bold")), soft_wrap=True, highlight=False)
    run = f"Run {summary['run_id']}. " if summary.get("run_id") else ""
    show(Text(run + text.provenance_sentence(summary), "dim"), 0)


def _title(console: Console, title: str) -> None:
    console.print()
    console.print(Text(title, "bold"))


def _whose(summary: Summary) -> str:
    return f" (critical path{text.critical(summary)}, {units.seconds(summary.get('iteration_time_s'))})"


def _headline(summary: Summary) -> Table:
    table = Table.grid(padding=(0, 2))
    table.add_column()
    table.add_column(justify="right", style="bold", no_wrap=True)
    table.add_column(style="dim")
    for name, value, origin, about in text.headline(summary):
        table.add_row(name, value, ", ".join(filter(None, (origin, about))))
    wall = summary.get("wall_time_s")
    if wall:
        rss = summary.get("peak_rss_bytes")
        took = f"measured, with {units.size(rss)}" if rss else "measured"
        table.add_row("This run took", units.seconds(wall), took)
    return table


def _period(summary: Summary) -> Table:
    rows = text.period(summary)
    names = rows[0] if rows else ()
    table = Table(*names, box=None, pad_edge=False, header_style="dim", padding=(0, 2, 0, 0))
    for row in rows:
        table.add_row(*row.values())
    return table


def _path(summary: Summary, width: int) -> Table:
    table = Table.grid(padding=(0, 2))
    table.add_column(no_wrap=True)
    table.add_column(justify="right", no_wrap=True)
    table.add_column(justify="right", no_wrap=True)
    table.add_column(no_wrap=True)
    parts = text.path_parts(summary)
    columns = max(6, _BAR - (WIDTH - width))
    longest = max((share for _, _, share in parts), default=1.0)
    for key, seconds, share in parts:
        style = "yellow" if key.startswith("communication") else _STYLES.get(key, "bright_black")
        bar = Text(_bar(share / longest, columns), style)
        table.add_row(text.path_label(key), units.seconds(seconds), units.share(share), bar)
    return table


def _bar(share: float, columns: int) -> str:
    eighths = max(1, round(share * columns * 8))
    return "█" * (eighths // 8) + _EIGHTHS[eighths % 8].strip()


def _memory(summary: Summary) -> Table:
    table = Table(box=None, pad_edge=False, header_style="dim", padding=(0, 2, 0, 0))
    table.add_column("ranks", overflow="fold", min_width=5)
    classes = list(summary.get("ranks") or ())
    listed = classes
    if len(classes) > _CLASSES:
        listed = sorted(classes, key=lambda group: group.get("headroom_bytes", 0))[:_CLASSES]
    has_first = any(text.first_step(group) for group in listed)
    first = ("first step",) if has_first else ()
    for name in ("allocated", "reserved", *first, "device", "headroom", ""):
        table.add_column(name, justify="right" if name else "left", no_wrap=True)
    for group in listed:
        word = text.verdict(group)
        table.add_row(
            Text.assemble(str(group["name"]), (f" ({group['count']:,})", "dim")),
            units.size(group.get("peak_allocated_bytes")),
            Text(units.size(group.get("peak_reserved_bytes")), "bold"),
            *((units.size(text.first_step(group)),) if has_first else ()),
            units.size(group.get("memory_bytes")),
            units.size(group.get("headroom_bytes")),
            Text(word, _VERDICTS[word]),
        )
    if len(classes) > len(listed):
        table.add_row(Text(f"{len(classes) - len(listed)} more, with more headroom", "dim"))
    return table


def _live(summary: Summary) -> Table:
    """The live ranks' mean step with the replay in it."""
    table = Table(box=None, pad_edge=False, header_style="dim", padding=(0, 2, 0, 0))
    for name in ("rank", "step", "itself", "waits", "calls", "peak", "loss"):
        table.add_column(name, justify="right", no_wrap=True)
    for rank in (summary.get("live") or {}).get("ranks", ()):
        times = [rank[name] for name in ("iteration_time_s", "own_s", "waited_s")]
        loss = "" if rank["loss"] is None else f"{rank['loss']:.4f}"
        listed = ["" if time is None else units.seconds(time) for time in times]
        row = [str(rank["rank"]), *listed, str(rank["calls_per_step"])]
        table.add_row(*row, units.size(rank["peak_tensor_bytes"]), loss)
    return table
