"""What ``windtunnel network dag run`` tells: paths of each job, and when all ends by which schedule."""

from __future__ import annotations

from collections.abc import Collection
from contextlib import ExitStack, closing
from pathlib import Path
from typing import Any

from windtunnel.base.errors import UserError
from windtunnel.base.plain import to_plain
from windtunnel.base.strict_yaml import read_mapping
from windtunnel.network.dag import live, twin
from windtunnel.network.dag.policy import SCHEDULES, Decision, Observation
from windtunnel.network.dag.policy.paths import paths
from windtunnel.network.dag.spec import Read, changed, check
from windtunnel.store.eventlog import EventLog


def plan(
    file: Path, schedule: str, what_if: Collection[str] = (), log: Path | None = None, *, real: bool = False
) -> dict[str, Any]:
    """The jobs of ``file`` by a ``schedule`` (or ``all``), emulated, as values of JSON: ``jobs`` with their
    longest paths, and by schedule in ``runs`` completion times and each task's begin and end, seconds;
    ``what_if``: the same with other values. Decisions of ``runs`` go into ``log``. ``real``: ``runs`` are run
    between namespaces, and have beside them what was ``emulated``; errors are those of `live.run`.

    Raises:
        UserError: a file, a schedule or a change that is none.
        LogFailed: the log cannot be written.
    """
    if schedule != "all" and schedule not in SCHEDULES:
        raise UserError(f"`schedule` is {schedule!r}, accepted are {', '.join(SCHEDULES)}, all")
    document = read_mapping(file, "file of jobs")
    jobs_and_resources = check(document, str(file))
    other = check(changed(document, what_if), f"{file} with `what_if`") if what_if else None
    names = SCHEDULES if schedule == "all" else (schedule,)
    with ExitStack() as stack:
        event_log = stack.enter_context(closing(EventLog(log))) if log else None
        return {
            "file": str(file),
            "jobs": {job.name: to_plain(paths(job, jobs_and_resources[1])) for job in jobs_and_resources[0]},
            "runs": {name: _run(jobs_and_resources, name, event_log, real=real) for name in names},
            "what_if": {name: _run(other, name) for name in names} if other else {},
        }


def _run(
    jobs_and_resources: Read, schedule: str, log: EventLog | None = None, *, real: bool = False
) -> dict[str, Any]:
    def log_decision(observation: Observation, decision: Decision) -> None:
        if log is not None:
            log.decision("network.dag", schedule, observation, decision)

    def did(what: live.AppliedDecision) -> None:
        if log is not None:
            log.append("effect", **to_plain(what))

    more: dict[str, float] = {}
    done: twin.GraphResult | live.GraphRun
    if real:
        done = live.run(*jobs_and_resources, schedule, decided=log_decision, did=did)
        emulated = twin.emulate(*jobs_and_resources, schedule).mean
        more = {"emulated": emulated, "short": done.short, "deciding": done.deciding}
    else:
        done = twin.emulate(*jobs_and_resources, schedule, decided=log_decision)
    tasks: dict[str, dict[str, tuple[float, float]]] = {}
    for (job, task), times in done.tasks.items():
        tasks.setdefault(job, {})[task] = times
    return {"mean": done.mean, "jobs": done.jobs, "tasks": tasks, "decisions": done.decisions, **more}
