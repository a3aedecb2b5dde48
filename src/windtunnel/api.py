"""What ``import windtunnel as wt`` offers for emulations: `emulate`, `sweep`, and the runs that were kept.

The command line is a thin layer over this.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from windtunnel.base.errors import HangError, UserError, VerdictError
from windtunnel.cluster.load import load_cluster
from windtunnel.cluster.model import Cluster
from windtunnel.fabrics import alternatives
from windtunnel.store.runs import Store
from windtunnel.training.emulate import run as emulation
from windtunnel.training.emulate.emulation import CAPABILITY, Progress, no_progress
from windtunnel.training.emulate.options import Options
from windtunnel.training.emulate.policy.search import parse_ranks
from windtunnel.training.emulate.program import Module
from windtunnel.training.emulate.run import FailOn, Run
from windtunnel.training.emulate.summary import Summary

if TYPE_CHECKING:
    from windtunnel.training.emulate.sweep.result import SweepResult
    from windtunnel.training.emulate.sweep.spec import Sweep

Program = Callable[..., Any] | Path | str
DEFAULT = Options()


@dataclass(frozen=True)
class SweepRun:
    """A sweep that was done. ``result``: its points in order, each with its figures and whether it is on the
    Pareto front of time, memory and cost."""

    sweep: Sweep
    result: SweepResult

    @property
    def points(self) -> list[dict[str, Any]]:
        """One row of figures for each point, see docs/sweep.md."""
        return self.result.rows

    @property
    def front(self) -> list[dict[str, Any]]:
        """The points than which none that fits is better in time, memory and cost."""
        return [row for row in self.result.rows if row["pareto"]]


def emulate(
    program: Program,
    *arguments: Any,
    cluster: Cluster | Path | str = "h100-sxm:1x8",
    module: bool = False,
    options: Options = DEFAULT,
    timeline: str = "",
    report: bool = True,
    fail_on: Sequence[str] | str = (),
    baseline: Run | str | None = None,
    progress: Progress = no_progress,
    **other_options: Any,
) -> Run:
    """Run a training program as ranks of a cluster that is not there, and keep what was found in the store.

    ``program``: the path of a torchrun-style script, unmodified, or a function that does what such a script
    does; ``arguments`` are its own; with ``module`` it is the name of a module, as for ``python -m``.
    ``cluster``: a name such as ``h100-sxm:16x8``, a YAML file, or one that `load_cluster` gave. ``options``:
    how to emulate, see `Options`; each of its fields may be given by its name instead, or beside it.
    ``timeline``: ranks in it, as ``0,17``; ``report``: whether to write the report, the timeline and the
    graph. ``fail_on`` is what is to be an error, as in ``("oom", "hang", "slower:10%")``; ``baseline`` the
    run, its id, or the file of a summary than which it must not be slower, by default the last such run in
    the store.

        run = wt.emulate("train.py", "--size", "8b", cluster="h100-sxm:16x8", jitter=0.05)
        print(run.summary.iteration_time_s, run.summary.peak_reserved_bytes)

    Raises:
        UserError: an option, the program or the cluster is wrong, or there is no baseline.
        ScriptError: the program failed, hung, or would deadlock on that cluster.
        VerdictError: what came out is what ``fail_on`` names; its ``run`` is kept in the store.
    """
    where = cluster if isinstance(cluster, Cluster) else load_cluster(cluster)
    options = replace(options, **other_options)
    if options.ranks != "auto":
        parse_ranks(options.ranks, where.world_size)
    ranks = tuple(parse_ranks(timeline, where.world_size, "timeline")) if timeline else ()
    what = Module(str(program), tuple(map(str, arguments))) if module else program
    failing = FailOn.parse(fail_on)
    try:
        run = emulation.emulate(
            what, arguments, where, options, pictures=report, timeline_ranks=ranks, progress=progress,
            fabrics=alternatives, fail_on=failing,
            baseline=baseline.id if isinstance(baseline, Run) else baseline,
        )  # fmt: skip
    except HangError as error:
        if not failing.hang:
            raise
        raise VerdictError(f"`fail_on` hang: {error}", details=error.details) from error
    verdict = run.summary.verdict
    if verdict is not None and not verdict.passed:
        raise VerdictError(f"`fail_on` {','.join(verdict.fail_on)}: {'; '.join(verdict.reasons)}", run)
    return run


def sweep(
    spec: Path | str,
    *,
    jobs: int = 1,
    on: str | None = None,
    resume: bool = True,
    report: bool = True,
    progress: Progress = no_progress,
) -> SweepRun:
    """Emulate a script over a grid of clusters and arguments, as the file ``spec`` says (docs/sweep.md).

    ``jobs``: processes, each with a group of points; ``on``: a Ray cluster instead (`RayCluster`), or the URL
    of a control plane, whose workers have a task for each point; ``resume``: keep what an earlier call has
    done; ``report``: write the report of each run, too.

    Raises:
        UserError: something in the file is wrong, or Ray or the control plane is not there.
        ScriptError: a process ended unexpectedly. Points that fail are in the result, with the reason.
    """
    from windtunnel.linux.hosts import is_ray
    from windtunnel.training.emulate.sweep import load_sweep, result, run_sweep

    what, elsewhere = load_sweep(Path(spec)), None
    if on and is_ray(on):
        from windtunnel.training.emulate.sweep.execute import emulate_on_ray

        elsewhere = partial(emulate_on_ray, on, report, alternatives)
    elif on:
        from windtunnel.tasks import emulate_on_control

        elsewhere = partial(emulate_on_control, on, Path(spec), what, resume, report)
    _, rows = run_sweep(
        what, jobs=jobs, resume=resume, pictures=report, progress=progress, fabrics=alternatives,
        elsewhere=elsewhere,
    )  # fmt: skip
    return SweepRun(what, result(rows))


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
    entry = Store.open().get(name)
    if entry.summary is None or entry.capability != CAPABILITY:
        raise UserError(
            f"run {entry.id} of {entry.capability} is {entry.status}: it has no figures of an emulation"
        )
    return Run(Summary.from_json(entry.summary))


def runs(limit: int | None = None) -> list[Run]:
    """The newest ``limit`` emulations in the store that were done (None: all), newest first."""
    summaries = (run.summary for run in Store.open().list(capability=CAPABILITY) if run.summary is not None)
    return [
        Run(Summary.from_json(summary)) for summary, _ in zip(summaries, range(limit or 10**9), strict=False)
    ]
