"""Emulates a user's program, writes what was found into the run's folder, and keeps the run in the store."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from contextlib import closing
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from windtunnel.base import atomic
from windtunnel.cluster.load import load_cluster
from windtunnel.cluster.model import Cluster
from windtunnel.store.eventlog import NAME, EventLog
from windtunnel.store.runs import Store
from windtunnel.training.emulate.emulation import (
    CAPABILITY,
    Capturing,
    EmulationResult,
    Options,
    Progress,
    no_progress,
    simulate,
)
from windtunnel.training.emulate.graph import Alternative
from windtunnel.training.emulate.hybrid import check_live, run_live
from windtunnel.training.emulate.operators import write_operators
from windtunnel.training.emulate.pictures import write_pictures
from windtunnel.training.emulate.program import Function, Module, Program, Script
from windtunnel.training.emulate.summary import Summary, summarise
from windtunnel.training.emulate.verdict import FailOn

Fabrics = Callable[[Cluster, Options], Sequence[Alternative]]


def no_fabrics(cluster: Cluster, options: Options) -> Sequence[Alternative]:
    """NCCL alone."""
    return ()


@dataclass(frozen=True)
class Emulation:
    """An emulation that was done: its figures, its files, and all that was found.

    ``directory`` has ``summary.json`` and ``events.jsonl``, and, if pictures were asked for, ``report.html``,
    ``timeline.json.gz`` and ``graph/``.
    """

    summary: Summary
    directory: Path
    result: EmulationResult


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
) -> Emulation:
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
        "script": program.name, "args": [str(one) for one in program.arguments], "cluster": cluster.name,
        "world_size": cluster.world_size, "ranks": options.ranks, "slow": list(options.slow),
        "jitter": options.jitter, "allocator": options.alloc_conf,
    }  # fmt: skip
    if options.aggregation != "none":
        inputs |= {"aggregation": options.aggregation, "neighbours": options.neighbours}
    if options.confidential != "none":
        inputs["confidential"] = options.confidential
    if options.steps is not None:
        inputs["steps"] = options.steps
    live = check_live(options, cluster)
    if live:
        inputs |= {"live": options.live, "data": options.data}
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
        text = json.dumps(content, indent=1, allow_nan=False) + "\n"
        atomic.replace(run.directory / "summary.json", text)
    run.finish(content)
    return Emulation(summary, run.directory, result)


def program_of(given: Program | Callable[..., Any] | Path | str, arguments: Sequence[Any] = ()) -> Program:
    """A path or a function with its arguments as the program that it is; one that is a program already
    stays."""
    if isinstance(given, Script | Module | Function):
        return given
    if isinstance(given, str | Path):
        return Script(Path(given), tuple(str(one) for one in arguments))
    return Function(given, tuple(arguments))
