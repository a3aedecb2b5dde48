"""Emulates a user's program, writes what was found into the run's folder, and keeps the run in the store.

What an emulation must not come to, for CI, is `FailOn`: ``--fail-on oom``, ``hang``, ``slower:10%``. A run
that is done is held against what was asked; what it fails is said in one sentence each. *Slower* needs
something to be slower than: a run or a summary that the user names, else the last run of the same script,
arguments, cluster and options in the store that did not fail its own verdict, so that a job that got slow is
not what the next one is compared with. Where there is none that is an error, never a pass.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass, field, replace
from html import escape
from pathlib import Path
from typing import TYPE_CHECKING, Any

from windtunnel.base import atomic, units
from windtunnel.base.errors import UserError
from windtunnel.cluster.load import load_cluster
from windtunnel.cluster.model import Cluster
from windtunnel.report import text
from windtunnel.store.eventlog import NAME, EventLog
from windtunnel.store.runs import Store, StoredRun
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
from windtunnel.training.emulate.summary import BaselineFacts, Summary, VerdictFacts

if TYPE_CHECKING:
    from windtunnel.store.compare import RunComparison


Fabrics = Callable[[Cluster, Options], Sequence[Alternative]]


def no_fabrics(cluster: Cluster, options: Options) -> Sequence[Alternative]:
    """NCCL alone."""
    return ()


@dataclass(frozen=True, repr=False)
class Run:
    """An emulation: its figures, and its files in ``directory``. A notebook shows its report.

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

    def compare(self, *others: Run) -> RunComparison:
        """This run beside others: inputs in which they differ, figures, and their ratios to this one's."""
        from windtunnel.store.compare import compare

        store = Store.open()
        return compare([store.get(run.id) for run in (self, *others)])

    def _repr_html_(self) -> str | None:
        """For notebooks: the report, if it was written."""
        path = self.directory / "report.html"
        if not path.exists():
            return None
        return (
            '<iframe sandbox="allow-scripts" style="width:100%;height:640px;border:1px solid #ccc" '
            f'srcdoc="{escape(path.read_text(encoding="utf-8"))}"></iframe>'
        )


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
    live: list[int] = []
    if options.live or options.attach:
        from windtunnel.training.emulate.hybrid import check_live, run_live

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


ACCEPTED = "accepted are oom, hang and slower:10%"
COMPARED = (
    "script", "args", "cluster", "slow", "jitter", "alloc_conf", "profile", "aggregation", "neighbours",
    "confidential",
)  # fmt: skip
"""Inputs of a run in which the default baseline is the same: all that times depend on."""


@dataclass(frozen=True)
class FailOn:
    """What fails a run. ``words``: as they were given. ``slower``: the share by which an iteration may be
    longer than the baseline's, None where that does not matter."""

    words: tuple[str, ...] = ()
    slower: float | None = None

    @classmethod
    def parse(cls, conditions: Sequence[str] | str) -> FailOn:
        """From the words of ``--fail-on``, each alone or several between commas.

        Raises:
            UserError: a word is not known, or two limits of slowness are given.
        """
        texts = [conditions] if isinstance(conditions, str) else conditions
        words = dict.fromkeys(word.strip() for text in texts for word in text.split(","))
        limits = []
        for word in words:
            share = re.fullmatch(r"slower:(\d+(?:\.\d+)?)\s*%", word)
            if share is not None:
                limits.append(float(share[1]) / 100)
            elif word not in ("oom", "hang"):
                raise UserError(f"`fail_on`: {word!r} is not known; {ACCEPTED}")
        if len(limits) > 1:
            raise UserError("`fail_on`: slower is given twice, give one limit")
        return cls(tuple(words), limits[0] if limits else None)

    @property
    def hang(self) -> bool:
        return "hang" in self.words

    def baseline(self, named: str | None, inputs: Mapping[str, Any], store: Store) -> BaselineFacts | None:
        """What the run is compared with; None where nothing is. ``named``: a run of ``store`` or the file of
        a summary; ``inputs``: of the run that is about to be.

        Raises:
            UserError: there is no baseline, or what was named is none, or nothing would be compared with it.
        """
        if self.slower is None:
            if named is not None:
                raise UserError("`baseline`: nothing is compared with it, ask for it by `fail_on` slower:10%")
            return None
        if named is None:
            alike_inputs = [inputs.get(name) for name in COMPARED]

            def alike(run: StoredRun) -> bool:
                verdict = (run.summary or {}).get("verdict")
                return [run.inputs.get(name) for name in COMPARED] == alike_inputs and (
                    verdict is None or bool(verdict["passed"])
                )

            earlier = store.newest("training.emulate", alike)
            if earlier is None:
                raise UserError(
                    "`fail_on` slower: the store has no run of this script with these arguments on this "
                    "cluster to compare with, give one by `baseline`, a run or a SUMMARY.json"
                )
            return _facts(earlier.summary, earlier.id, f"run {earlier.id}")
        file = Path(named)
        if file.suffix == ".json" or file.is_file():
            return _facts(_read_summary(file), str(file), str(file))
        run = store.get(named)
        return _facts(run.summary, run.id, f"run {run.id}")

    def judge(self, summary: Summary, baseline: BaselineFacts | None) -> VerdictFacts | None:
        """Whether the run passes, and why not; None where nothing was asked."""
        if not self.words:
            return None
        reasons = []
        if "oom" in self.words and not summary.fits:
            reasons.append(text.worst_out_of_memory(summary.to_json()))
        if self.slower is not None and baseline is not None:
            ratio = summary.iteration_time_s / baseline.iteration_time_s
            if ratio > 1 + self.slower:
                reasons.append(
                    f"an iteration takes {units.seconds(summary.iteration_time_s)}, "
                    f"{units.share(ratio - 1)} longer than the {units.seconds(baseline.iteration_time_s)} of "
                    f"{baseline.name}, where {units.share(self.slower)} is allowed"
                )
        return VerdictFacts(fail_on=self.words, passed=not reasons, reasons=tuple(reasons), baseline=baseline)


def _read_summary(file: Path) -> Any:
    try:
        return json.loads(file.read_text(encoding="utf-8"))
    except OSError as error:
        raise UserError(f"`baseline`: {str(file)!r} cannot be read ({error.strerror})") from None
    except ValueError as error:
        raise UserError(f"`baseline`: {str(file)!r} is not JSON ({error})") from None


def _facts(summary: Any, name: str, words: str) -> BaselineFacts:
    seconds = summary.get("iteration_time_s") if isinstance(summary, Mapping) else None
    if not isinstance(seconds, int | float) or isinstance(seconds, bool) or not seconds > 0:
        raise UserError(f"`baseline`: {words} has no time of an iteration, as an emulation that is done has")
    return BaselineFacts(name, float(seconds))
