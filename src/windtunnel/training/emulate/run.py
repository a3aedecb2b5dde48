"""Emulates a user's program, writes what was found into the run's folder, and keeps the run in the store."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from contextlib import closing
from dataclasses import dataclass, field, replace
from html import escape
from pathlib import Path
from typing import Any

from windtunnel.base import atomic, units
from windtunnel.base.errors import UserError
from windtunnel.cluster.load import load_cluster
from windtunnel.cluster.model import Cluster
from windtunnel.report import text
from windtunnel.report.timeline import Timeline, read_trace
from windtunnel.store.compare import Comparison, compare
from windtunnel.store.eventlog import NAME, EventLog
from windtunnel.store.runs import Store
from windtunnel.training.emulate.emulation import (
    CAPABILITY,
    Capturing,
    EmulationResult,
    Progress,
    no_progress,
    simulate,
)
from windtunnel.training.emulate.graph import Alternative
from windtunnel.training.emulate.hybrid import check_live, run_live
from windtunnel.training.emulate.operators import write_operators
from windtunnel.training.emulate.options import Options
from windtunnel.training.emulate.pictures import shown_ranks, timeline, write_pictures
from windtunnel.training.emulate.program import Function, Module, Program, Script
from windtunnel.training.emulate.summary import Summary, summarise
from windtunnel.training.emulate.verdict import FailOn

TIMELINE = "timeline.json.gz"
REPORT = "report.html"

Fabrics = Callable[[Cluster, Options], Sequence[Alternative]]


def no_fabrics(cluster: Cluster, options: Options) -> Sequence[Alternative]:
    """NCCL alone."""
    return ()


@dataclass(frozen=True, repr=False)
class Run:
    """An emulation: its figures, and its files in ``directory``. A notebook shows its report.

    ``summary`` has the figures, by the names of docs/summary.md. ``result`` has the graphs and arrays behind
    them; None for a run that was read from the store.
    """

    summary: Summary
    result: EmulationResult | None = field(default=None, compare=False)

    def __repr__(self) -> str:
        summary = self.summary
        time, memory = units.seconds(summary.iteration_time_s), units.size(summary.peak_reserved_bytes)
        return f"Run({self.id}: {summary.cluster.name}, {time} an iteration, {memory} reserved)"

    @property
    def id(self) -> str:
        """Of the run in the store."""
        return self.summary.run_id

    @property
    def directory(self) -> Path:
        """The folder with ``summary.json`` and ``events.jsonl``, and, if pictures were asked for,
        ``report.html``, ``timeline.json.gz`` and ``graph/``."""
        return Path(self.summary.directory)

    def timeline(self, ranks: Sequence[int] = ()) -> Timeline:
        """What ``ranks`` do in the last step, queue by queue; by default those of the report.

        Raises:
            UserError: the run was read from the store, and its timeline does not have these ranks.
        """
        path = self.directory / TIMELINE
        if self.result is not None:
            world = self.summary.world_size
            if wrong := [rank for rank in ranks if not 0 <= rank < world]:
                raise UserError(f"timeline: rank {wrong[0]} is not one of 0 to {world - 1}")
            return timeline(self.result.timing, list(ranks) or shown_ranks(self.result))
        if not path.exists():
            raise UserError(f"timeline: run {self.id} was kept without pictures: there is no {path}")
        kept = read_trace(path)
        if missing := sorted(set(ranks) - set(kept.ranks())):
            raise UserError(
                f"timeline: rank {missing[0]} is not in {path}, which has {text.ranks(kept.ranks())}"
            )
        chosen = [track for track in kept.tracks if not ranks or track.rank in ranks]
        return Timeline(chosen, kept.names, kept.kinds)

    def compare(self, *others: Run) -> Comparison:
        """This run beside others: inputs in which they differ, figures, and their ratios to this one's."""
        store = Store.open()
        return compare([store.get(run.id) for run in (self, *others)])

    def _repr_html_(self) -> str:
        """For notebooks: the figures as a table, and the report with its pictures, if it was written."""
        summary = self.summary
        rows = {
            "iteration": units.seconds(summary.iteration_time_s),
            "tokens/s per device": units.count(summary.tokens_per_second_per_device),
            "MFU": units.share(summary.mfu),
            "reserved memory": f"{units.size(summary.peak_reserved_bytes)}, "
            + ("fits" if summary.fits else "does not fit"),
            "run": self.id,
        }
        cells = "".join(
            f"<tr><th>{escape(key)}</th><td>{escape(value)}</td></tr>" for key, value in rows.items()
        )
        title = " ".join([summary.command.script, *summary.command.args])
        head = f"<b>{escape(title)}</b> on {escape(summary.cluster.name)}, emulated"
        path = self.directory / REPORT
        page = ""
        if path.exists():
            page = (
                '<iframe sandbox="allow-scripts" style="width:100%;height:640px;border:1px solid #ccc" '
                f'srcdoc="{escape(path.read_text(encoding="utf-8"))}"></iframe>'
            )
        return f"<div>{head}<table>{cells}</table>{page}</div>"


def emulate(
    program: Program | Callable[..., Any] | Path | str,
    arguments: Sequence[Any] = (),
    cluster: Cluster | str = "h100-sxm:1x8",
    options: Options | None = None,
    *,
    pictures: bool = True,
    timeline_ranks: tuple[int, ...] = (),
    progress: Progress = no_progress,
    take: Capturing | None = None,
    fabrics: Fabrics = no_fabrics,
    fail_on: FailOn | None = None,
    baseline: str | None = None,
) -> Run:
    """Emulate a program on a cluster, and keep the run with its files.

    ``program``: the path of a torchrun-style script, or a function that does what such a script does;
    ``arguments`` are its own. ``cluster``: as `load_cluster` takes it, or one that is loaded. ``pictures``:
    write report.html, the timeline (of ``timeline_ranks``; by default the critical rank and one of some
    classes) and the graph besides summary.json. A run that fails is kept as failed, with the reason.
    ``take``: as in `simulate`. ``fabrics``: gives the alternatives that there are. ``fail_on``:
    what the summary's verdict is to be about; ``baseline``: the run or the file of a summary that it compares
    with.

    Raises:
        UserError: an option, the program or the cluster is wrong, or there is no baseline.
        ScriptError: the program failed, hung, or would deadlock.
    """
    program = program_of(program, arguments)
    program.check()
    options = options or Options()
    if not isinstance(cluster, Cluster):
        cluster = load_cluster(cluster)
    inputs = {
        "script": program.name,
        "args": [str(argument) for argument in program.arguments],
        "cluster": cluster.name,
        "world_size": cluster.world_size,
    } | options.deciding()
    live = check_live(options, cluster)
    fail_on = fail_on or FailOn()
    store = Store.open()
    compared = fail_on.baseline(baseline, inputs, store)
    run = store.begin(CAPABILITY, inputs, options.seed)
    log = EventLog(run.directory / NAME)
    with run.failing(), closing(log):
        result = simulate(program, cluster, options, progress, log, take, fabrics(cluster, options))
        hybrid = None
        if live:
            progress(f"run {len(live)} live", 0.0)
            hybrid = run_live(result, live, run.directory / "live")
        progress("write the report", 0.0)
        summary = replace(summarise(result, run.id, run.directory), live=hybrid)
        summary = replace(summary, verdict=fail_on.judge(summary, compared))
        content = summary.to_json()
        write_operators(run.directory, result)
        if pictures:
            write_pictures(run.directory, result, content, timeline_ranks)
        written = json.dumps(content, indent=1, allow_nan=False) + "\n"
        atomic.replace(run.directory / "summary.json", written)
    run.finish(content)
    return Run(summary, result)


def program_of(given: Program | Callable[..., Any] | Path | str, arguments: Sequence[Any] = ()) -> Program:
    """A path or a function with its arguments as the program that it is; one that is a program already
    stays."""
    if isinstance(given, Script | Module | Function):
        return given
    if isinstance(given, str | Path):
        return Script(Path(given), tuple(str(argument) for argument in arguments))
    return Function(given, tuple(arguments))
