"""What ``import windtunnel as wt`` offers for emulations: `emulate`, `sweep`, and the runs that were kept.

The command line is a thin layer over this. Names of figures are those of docs/summary.md without their unit:
times are seconds, memory is bytes, shares are from 0 to 1.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from html import escape
from pathlib import Path
from typing import Any

from windtunnel.base import units
from windtunnel.base.errors import HangError, UserError, VerdictError
from windtunnel.cluster.load import load_cluster
from windtunnel.cluster.model import Cluster
from windtunnel.fabrics import alternatives
from windtunnel.report import text
from windtunnel.report.timeline import Timeline, read_trace
from windtunnel.store.compare import Comparison, compare
from windtunnel.store.database import hidden
from windtunnel.store.runs import Store
from windtunnel.training.emulate import run as emulation
from windtunnel.training.emulate.emulation import CAPABILITY, EmulationResult, Options, Progress, no_progress
from windtunnel.training.emulate.policy.search import parse_ranks
from windtunnel.training.emulate.program import Module
from windtunnel.training.emulate.summary import CollectiveFacts, OperatorFacts, RankFacts, Summary, WaitFacts
from windtunnel.training.emulate.sweep.execute import run_sweep
from windtunnel.training.emulate.sweep.plan import Sweep, load_sweep
from windtunnel.training.emulate.sweep.result import SweepResult, result, write_page
from windtunnel.training.emulate.twin.job import Slow
from windtunnel.training.emulate.verdict import FailOn

Program = Callable[..., Any] | Path | str
TIMELINE = "timeline.json.gz"
REPORT = "report.html"
DEFAULT = Options()


@dataclass(frozen=True, repr=False)
class Run:
    """An emulation: its figures, its ranks, and its files in ``directory``. A notebook shows its report.

    ``summary`` has everything, by the names of docs/summary.md. ``result`` has the graphs and arrays behind
    it; None for a run that was read from the store.
    """

    summary: Summary
    result: EmulationResult | None = field(default=None, compare=False)

    def __repr__(self) -> str:
        time, memory = units.seconds(self.iteration_time), units.size(self.peak_reserved)
        return f"Run({self.id}: {self.summary.cluster.name}, {time} an iteration, {memory} reserved)"

    @property
    def id(self) -> str:
        """Of the run in the store."""
        return self.summary.run_id

    @property
    def directory(self) -> Path:
        """The folder with summary.json, events.jsonl, and the pictures if they were asked for."""
        return Path(self.summary.directory)

    @property
    def iteration_time(self) -> float:
        """Seconds of a steady iteration of the whole job, emulated."""
        return self.summary.iteration_time_s

    @property
    def first_iteration_time(self) -> float:
        """Seconds up to the end of the first iteration, set-up on the device included."""
        return self.summary.first_iteration_time_s

    @property
    def tokens_per_second(self) -> float | None:
        """Of each device; None where tokens could not be counted."""
        return self.summary.tokens_per_second_per_device

    @property
    def mfu(self) -> float:
        """Model FLOPs utilisation, from 0 to 1."""
        return self.summary.mfu

    @property
    def hfu(self) -> float:
        """Hardware FLOPs utilisation, recomputation included, from 0 to 1."""
        return self.summary.hfu

    @property
    def peak_reserved(self) -> int:
        """Bytes that the allocator holds at most, on the rank that needs most."""
        return self.summary.peak_reserved_bytes

    @property
    def peak_allocated(self) -> int:
        """Bytes of tensors at most, on the rank that needs most."""
        return max(one.peak_allocated_bytes for one in self.ranks)

    @property
    def fits(self) -> bool:
        """Whether no rank runs out of memory."""
        return self.summary.fits

    @property
    def ranks(self) -> tuple[RankFacts, ...]:
        """Classes of ranks that do the same, with the memory and the times of each of their ranks."""
        return self.summary.ranks

    @property
    def critical_path(self) -> dict[str, float]:
        """Where the iteration goes: seconds of the critical rank, by what it does or waits for."""
        return self.summary.critical_path

    @property
    def waits(self) -> tuple[WaitFacts, ...]:
        """The largest waits, with a remedy for each."""
        return self.summary.waits

    @property
    def collectives(self) -> tuple[CollectiveFacts, ...]:
        """Distinct collectives and messages."""
        return self.summary.collectives

    @property
    def operators(self) -> tuple[OperatorFacts, ...]:
        """The operators of an iteration that take longest."""
        return self.summary.operators

    def timeline(self, ranks: Sequence[int] = ()) -> Timeline:
        """What ``ranks`` do in the last step, queue by queue; by default those of the report.

        Raises:
            UserError: the run was read from the store, and its timeline does not have these ranks.
        """
        path = self.directory / TIMELINE
        if self.result is not None:
            from windtunnel.training.emulate.pictures import shown_ranks, timeline

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
        return compare([store.get(one.id) for one in (self, *others)])

    def _repr_html_(self) -> str:
        """For notebooks: the figures as a table, and the report with its pictures, if it was written."""
        one = self.summary
        rows = {
            "iteration": units.seconds(self.iteration_time),
            "tokens/s per device": units.count(self.tokens_per_second),
            "MFU": units.share(self.mfu),
            "reserved memory": f"{units.size(self.peak_reserved)}, {'fits' if self.fits else 'does not fit'}",
            "run": self.id,
        }
        cells = "".join(
            f"<tr><th>{escape(key)}</th><td>{escape(value)}</td></tr>" for key, value in rows.items()
        )
        title = " ".join([one.command.script, *one.command.args])
        head = f"<b>{escape(title)}</b> on {escape(one.cluster.name)}, emulated"
        path = self.directory / REPORT
        page = ""
        if path.exists():
            page = (
                '<iframe sandbox="allow-scripts" style="width:100%;height:640px;border:1px solid #ccc" '
                f'srcdoc="{escape(path.read_text(encoding="utf-8"))}"></iframe>'
            )
        return f"<div>{head}<table>{cells}</table>{page}</div>"


@dataclass(frozen=True)
class SweepRun:
    """A sweep that was done. ``result``: its points in order, each with its figures and whether it is on the
    Pareto front of time, memory and cost. ``page``: the picture of it, one HTML file."""

    sweep: Sweep
    result: SweepResult
    page: Path

    @property
    def points(self) -> list[dict[str, Any]]:
        """One row of figures for each point, see docs/sweep.md."""
        return self.result.rows

    @property
    def front(self) -> list[dict[str, Any]]:
        """The points than which none that fits is better in time, memory and cost."""
        return [row for row in self.result.rows if row["pareto"]]

    def _repr_html_(self) -> str:
        page = escape(self.page.read_text(encoding="utf-8"))
        return f'<iframe sandbox="allow-scripts" style="width:100%;height:640px" srcdoc="{page}"></iframe>'


def emulate(
    program: Program,
    *arguments: Any,
    cluster: Cluster | Path | str = "h100-sxm:1x8",
    module: bool = False,
    ranks: str = "auto",
    options: Options = DEFAULT,
    slow: Sequence[str | Slow] | str | Slow = (),
    jitter: float = 0.0,
    seed: int = 0,
    alloc_conf: str = "",
    max_split_size: int | None = None,
    tokens: int | None = None,
    timeline: str = "",
    jobs: int = 2,
    timeout: float = 900.0,
    steps: int | None = None,
    reserve: float | None = None,
    profile: str | None = None,
    aggregation: str = "none",
    neighbours: int = 0,
    confidential: str = "none",
    live: Sequence[int] | str = "",
    data: str = "uniform",
    attach: int | None = None,
    report: bool = True,
    fail_on: Sequence[str] | str = (),
    baseline: Run | str | None = None,
    progress: Progress = no_progress,
) -> Run:
    """Run a training program as ranks of a cluster that is not there, and keep what was found in the store.

    ``program``: the path of a torchrun-style script, unmodified, or a function that does what such a script
    does; ``arguments`` are its own; with ``module`` it is the name of a module, as for ``python -m``.
    ``cluster``: a name such as ``h100-sxm:16x8``, a YAML file, or one that
    `load_cluster` gave. The other arguments are the options of ``windtunnel emulate``: ``ranks`` to capture
    (``auto``, ``all`` or ``0,17``), ``slow`` hosts, devices or links (`Slow`, or ``host=3:1.3``),
    ``jitter`` of operator times with its ``seed``, the allocator's ``alloc_conf`` and ``max_split_size``
    (MiB), ``tokens`` of a step, ranks in the ``timeline``, ``jobs`` captured at once, ``timeout`` in seconds,
    ``steps`` to run at most for a sequence that repeats,
    device memory in ``reserve`` that no tensor can have (bytes), a measured ``profile``, switches that add by
    a policy of ``aggregation`` beside so many ``neighbours``, what protects all that leaves a GPU
    (``confidential``: ``hix``, ``graviton`` or ``h100-cc``), ranks that run ``live`` beside the others, the
    rule of their ``data`` and the step to ``attach`` a debugger before (docs/hybrid.md), and whether to write
    the ``report``.
    ``options`` has several of these in one object, `Options`; what is given beside it is taken instead.
    ``fail_on`` is what is to be an error, as in ``("oom", "hang", "slower:10%")``; ``baseline`` the run, its
    id, or the file of a summary than which it must not be slower, by default the last such run in the store.

        run = wt.emulate("train.py", "--size", "8b", cluster="h100-sxm:16x8")
        print(run.iteration_time, run.peak_reserved)

    Raises:
        UserError: an option, the program or the cluster is wrong, or there is no baseline.
        ScriptError: the program failed, hung, or would deadlock on that cluster.
        VerdictError: what came out is what ``fail_on`` names; its ``run`` is kept in the store.
    """
    where = cluster if isinstance(cluster, Cluster) else load_cluster(cluster)
    alloc_conf = alloc_conf or options.alloc_conf
    if max_split_size is not None:
        if "max_split_size_mb" in alloc_conf:
            raise UserError(
                "`max_split_size` and max_split_size_mb of `alloc_conf` are one setting: give one of them"
            )
        alloc_conf = ",".join(part for part in (alloc_conf, f"max_split_size_mb:{max_split_size}") if part)
    given: dict[str, Any] = {
        "ranks": ranks, "slow": slow, "jitter": jitter, "seed": seed, "alloc_conf": alloc_conf,
        "tokens": tokens, "jobs": jobs, "timeout": timeout, "steps": steps, "profile": profile,
        "aggregation": aggregation, "neighbours": neighbours, "confidential": confidential,
        "data": data, "attach": attach,
        "live": live if isinstance(live, str) else ",".join(map(str, live)),
        "reserve": DEFAULT.reserve if reserve is None else reserve,
    }  # fmt: skip
    beside = {name: value for name, value in given.items() if value != getattr(DEFAULT, name)}
    options = replace(options, **beside)
    if options.ranks != "auto":
        parse_ranks(options.ranks, where.world_size)
    shown = tuple(parse_ranks(timeline, where.world_size)) if timeline else ()
    what = Module(str(program), tuple(map(str, arguments))) if module else program
    failing = FailOn.parse(fail_on)
    try:
        done = emulation.emulate(
            what, arguments, where, options, pictures=report, timeline_ranks=shown, progress=progress,
            fabrics=alternatives, fail_on=failing,
            baseline=baseline.id if isinstance(baseline, Run) else baseline,
        )  # fmt: skip
    except HangError as error:
        if not failing.hang:
            raise
        raise VerdictError(f"`fail_on` hang: {error}", details=error.details) from error
    run = Run(done.summary, done.result)
    verdict = done.summary.verdict
    if verdict is not None and not verdict.passed:
        raise VerdictError(f"`fail_on` {','.join(verdict.fail_on)}: {'; '.join(verdict.reasons)}", run)
    return run


def sweep(
    spec: Path | str,
    *,
    jobs: int = 1,
    ray: str | None = None,
    on: str | None = None,
    resume: bool = True,
    report: bool = True,
    progress: Progress = no_progress,
) -> SweepRun:
    """Emulate a script over a grid of clusters and arguments, as the file ``spec`` says (docs/sweep.md).

    ``jobs``: processes, each with a group of points; ``ray``: the address of a Ray cluster instead; ``on``:
    the URL of a control plane, whose workers have a task for each point; ``resume``: keep what an earlier
    call has done; ``report``: write the report of each run, too.

    Raises:
        UserError: something in the file is wrong, or Ray or the control plane is not there.
        ScriptError: a process ended unexpectedly. Points that fail are in the result, with the reason.
    """
    if on and ray:
        raise UserError(f"sweep: `on` is {hidden(on)!r} and `ray` is {ray!r}, accepted is one of them")
    what, elsewhere = load_sweep(Path(spec)), None
    if on:
        from windtunnel.tasks import emulate_on_control

        elsewhere = partial(emulate_on_control, on, Path(spec), what, resume, report)
    folder, rows = run_sweep(
        what, jobs=jobs, ray=ray, resume=resume, pictures=report, progress=progress, fabrics=alternatives,
        elsewhere=elsewhere,
    )  # fmt: skip
    found, page = result(rows), folder / "sweep.html"
    write_page(page, found, f"Sweep {what.name}")
    return SweepRun(what, found, page)


def load_run(name: str = "last") -> Run:
    """An emulation from the store: by its id, the beginning of one, or ``last``.

    Raises:
        UserError: there is no such run, or it is none of an emulation that was done.
    """
    if name == "last":
        newest = runs(1)
        if not newest:
            raise UserError("the store has no emulation that was done")
        return newest[0]
    found = Store.open().get(name)
    if found.summary is None or found.capability != CAPABILITY:
        raise UserError(
            f"run {found.id} of {found.capability} is {found.status}: it has no figures of an emulation"
        )
    return Run(Summary.from_json(found.summary))


def runs(limit: int | None = None) -> list[Run]:
    """The newest ``limit`` emulations in the store that were done (None: all), newest first."""
    kept = (run.summary for run in Store.open().list(capability=CAPABILITY) if run.summary is not None)
    return [Run(Summary.from_json(summary)) for summary, _ in zip(kept, range(limit or 10**9), strict=False)]
