"""Emulates a user's program, writes what was found into the run's folder, and keeps the run in the store.

What an emulation must not come to, for CI, is `FailOn`: ``--fail-on oom``, ``hang``.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from contextlib import closing
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from windtunnel.base import atomic, units
from windtunnel.base.errors import UserError
from windtunnel.cluster.load import load_cluster
from windtunnel.cluster.model import Cluster
from windtunnel.report import text
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
from windtunnel.training.emulate.exports import write_operators
from windtunnel.training.emulate.graph import Alternative
from windtunnel.training.emulate.options import Options
from windtunnel.training.emulate.program import Function, Module, Program, Script
from windtunnel.training.emulate.summarise import summarise
from windtunnel.training.emulate.summary import Summary, VerdictFacts

if TYPE_CHECKING:
    pass


Fabrics = Callable[[Cluster, Options], Sequence[Alternative]]


def no_fabrics(cluster: Cluster, options: Options) -> Sequence[Alternative]:
    """NCCL alone."""
    return ()


@dataclass(frozen=True, repr=False)
class Run:
    """An emulation: its figures, and its files in ``directory``.

    ``summary`` has the figures, by the names of `Summary`. ``result`` has the graphs and arrays behind
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
) -> Run:
    """Emulate a program on a cluster, and keep the run with its files.

    ``program``: the path of a torchrun-style script, or a function that does what such a script does;
    ``arguments`` are its own. ``cluster``: as `load_cluster` takes it, or one that is loaded. ``pictures``:
    write report.html, the timeline (of ``timeline_ranks``; by default the critical rank and one of some
    classes) and the graph besides summary.json. A run that fails is kept as failed, with the reason.
    ``take``: as in `simulate`. ``fabrics``: gives the alternatives that there are. ``fail_on``: what the
    summary's verdict is to be about.

    Raises:
        UserError: an option, the program or the cluster is wrong.
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
    live: list[int] = []
    if options.live or options.attach:
        from windtunnel.training.emulate.hybrid import check_live, run_live

        live = check_live(options, cluster)
    fail_on = fail_on or FailOn()
    store = Store.open()
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
        summary = replace(summary, verdict=fail_on.judge(summary))
        content = summary.to_json()
        write_operators(run.directory, result)
        if pictures:
            from windtunnel.training.emulate.pictures import write_pictures

            write_pictures(run.directory, result, content, timeline_ranks)
        written = json.dumps(content, indent=1, allow_nan=False) + "\n"
        atomic.replace(run.directory / "summary.json", written)
    run.finish(content)
    return Run(summary, result)


def program_of(program: Program | Callable[..., Any] | Path | str, arguments: Sequence[Any] = ()) -> Program:
    """A path or a function with its arguments as the program that it is; one that is a program already
    stays."""
    if isinstance(program, Script | Module | Function):
        return program
    if isinstance(program, str | Path):
        return Script(Path(program), tuple(str(argument) for argument in arguments))
    return Function(program, tuple(arguments))


ACCEPTED = ("oom", "hang")


@dataclass(frozen=True)
class FailOn:
    """What fails a run. ``words``: as they were given."""

    words: tuple[str, ...] = ()

    @classmethod
    def parse(cls, conditions: Sequence[str] | str) -> FailOn:
        """From the words of ``--fail-on``, each alone or several between commas.

        Raises:
            UserError: a word is not known.
        """
        texts = [conditions] if isinstance(conditions, str) else conditions
        words = dict.fromkeys(word.strip() for text in texts for word in text.split(","))
        for word in words:
            if word not in ACCEPTED:
                raise UserError(f"`fail_on`: {word!r} is not known; accepted are {' and '.join(ACCEPTED)}")
        return cls(tuple(words))

    @property
    def hang(self) -> bool:
        return "hang" in self.words

    def judge(self, summary: Summary) -> VerdictFacts | None:
        """Whether the run passes, and why not; None where nothing was asked."""
        if not self.words:
            return None
        reasons = []
        if "oom" in self.words and not summary.fits:
            reasons.append(text.worst_out_of_memory(summary.to_json()))
        return VerdictFacts(fail_on=self.words, passed=not reasons, reasons=tuple(reasons))
