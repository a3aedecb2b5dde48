"""Job completion times under all schedules between namespaces of this host, and the twin's forecast of each.

Lines are of 200 Mb/s. Computing tasks are ``sleep``, as of a host that waits for an accelerator: more of them
are under way at once than a small machine has processors. What one takes longer is counted as lack of CPU.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial

import numpy as np

from benchmarks.harness.measure import in_turn, spread
from benchmarks.harness.rows import Row, figure, left_out, need
from benchmarks.network.dag.twin import EXAMPLE, EXAMPLE_RESOURCES, Case, four_mapreduces
from windtunnel.linux import network
from windtunnel.network.dag import live, twin
from windtunnel.network.dag.policy import SCHEDULES

LINE = 25e6
SHORT = 0.05
"""Of the time of computing tasks, what they may be late for want of a CPU before a run is not counted."""


EXAMPLE_CASE = "two flows behind one task"
CASES: dict[str, Callable[[int], Case]] = {
    EXAMPLE_CASE: lambda seed: _scaled(([EXAMPLE], EXAMPLE_RESOURCES), 0.5),
    "4 MapReduces": lambda seed: _scaled(four_mapreduces(np.random.default_rng(seed)), 0.1),
}


def _scaled(case: Case, seconds: float) -> Case:
    """At `LINE`, and so many times as long."""
    jobs, resources = case
    lines = max(resources.values())
    made = []
    for job in jobs:
        tasks = []
        for task in job.tasks:
            size = task.size * seconds * (1.0 if task.kind == "compute" else LINE / lines)
            command = ("sleep", f"{size:.4f}") if task.kind == "compute" else ()
            tasks.append(replace(task, size=size, command=command))
        made.append(replace(job, tasks=tuple(tasks), begins=job.begins * seconds))
    return made, {name: LINE if one == lines else one for name, one in resources.items()}


def live_rows(quick: bool) -> Iterator[Row]:
    """Every case under every schedule, another one in every round."""
    need(network.missing())
    rounds = 1 if quick else 5
    for name, case in CASES.items():
        cases = [case(seed) for seed in range(rounds)]
        arms = {one: partial(_once, one, iter(cases)) for one in SCHEDULES}
        found = in_turn(arms, rounds)
        for schedule, runs in found.items():
            good = [one for one in runs if _counts(one)]
            if not good:
                yield left_out(f"{name}, {schedule}", _counted(good, rounds))
                continue
            took, off, forecast = (
                spread(getattr(one, what) for one in good) for what in ("took", "off", "forecast")
            )
            yield figure(
                f"{name}, {schedule}: mean completion", "s", took.median, emulated=forecast.median,
                note=f"longest {took.p95:.3f} s; twin off by {off.median:.1%}, {off.p95:.1%} at most;"
                f" {_counted(good, rounds)}",
            )  # fmt: skip
        for other in SCHEDULES[:-1]:
            pairs = [pair for pair in zip(found["mxdag"], found[other], strict=True) if _counts(*pair)]
            part = spread(mine.took / theirs.took for mine, theirs in pairs)
            # of the worked example ideally 7/8
            goal = ("<= 90%" if name == EXAMPLE_CASE else "<= 105%") if other == "fair" and pairs else ""
            yield figure(
                f"{name}, mxdag: of the time of {other}", "", part.median if pairs else None, goal,
                note=_counted(pairs, rounds),
            )  # fmt: skip


def _counts(*runs: _Round) -> bool:
    return all(one.short <= SHORT for one in runs)


def _counted(good: Sequence[object], rounds: int) -> str:
    lost = rounds - len(good)
    return f"{lost} of {rounds} rounds SHORT OF CPU: left out" if lost else f"{rounds} rounds"


@dataclass(frozen=True)
class _Round:
    """Seconds of a job on average, and by the twin; the part of their time in which tasks had no CPU."""

    took: float
    forecast: float
    short: float

    @property
    def off(self) -> float:
        return abs(self.forecast / self.took - 1)


def _once(schedule: str, cases: Iterator[Case]) -> _Round:
    jobs, resources = next(cases)
    done = live.run(jobs, resources, schedule)
    computing = {
        (job.name, task.name): task.size for job in jobs for task in job.tasks if task.kind == "compute"
    }
    span = sum(end - begin for begin, end in map(done.tasks.__getitem__, computing))
    forecast = twin.emulate(jobs, resources, schedule).mean
    return _Round(done.mean, forecast, 1 - sum(computing.values()) / span)
