"""Job completion times under all schedules, emulated.

Job completion times under all schedules between namespaces of this host, and the twin's forecast of each.

Lines are of 200 Mb/s. Computing tasks are ``sleep``, as of a host that waits for an accelerator: more of them
are under way at once than a small machine has processors. What one takes longer is counted as lack of CPU.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial

import numpy as np

from benchmarks.harness.measure import in_turn, ratios
from benchmarks.harness.rows import Row, figure, left_out, need
from windtunnel.linux import network
from windtunnel.network.dag import live, twin
from windtunnel.network.dag.generate import hosts, mapreduce, random_graph, training
from windtunnel.network.dag.policy import SCHEDULES, GraphJob, GraphTask
from windtunnel.network.dag.twin import GraphResult, emulate

EXAMPLE = GraphJob(
    "example",
    (
        GraphTask("A", "compute", 1.0, (("a", 1.0),)),
        GraphTask("f1", "network", 1e9, (("a.out", 1.0), ("b.in", 1.0)), ("A",), coflow="f"),
        GraphTask("f2", "network", 1e9, (("a.out", 1.0), ("c.in", 1.0)), ("A",), coflow="f"),
        GraphTask("B", "compute", 5.0, (("b", 1.0),), ("f1",)),
        GraphTask("C", "compute", 1.0, (("c", 1.0),), ("f2",)),
    ),
)
"""A task sends two flows over one NIC; behind the first are 5 s of computing, behind the second 1 s."""
EXAMPLE_RESOURCES = {"a": 1.0, "b": 1.0, "c": 1.0, "a.out": 1e9, "b.in": 1e9, "c.in": 1e9}

BASELINES = SCHEDULES[:-1]
TIE = 1e-3
"""Means this near to each other, relatively, are one."""
Case = tuple[list[GraphJob], dict[str, float]]


def _factor(rng: np.random.Generator, powers: float = 1.0) -> float:
    return float(np.exp2(rng.uniform(-powers, powers)))


def four_mapreduces(rng: np.random.Generator) -> Case:
    """On six hosts of two processors, 10 Gb/s; they come within 5 s."""
    return [
        mapreduce(
            f"j{k}", rng, hosts=6, seconds=4 * _factor(rng), nbytes=1e9 * _factor(rng, 2),
            begins=rng.uniform(0, 5),
        )
        for k in range(4)
    ], hosts(6, 2)  # fmt: skip


def three_trainings(rng: np.random.Generator) -> Case:
    """Each on four of six hosts, two iterations of five layers of 15 to 60 MB; they come within 0.3 s."""
    return [
        training(
            f"j{k}", tuple(sorted(rng.choice(6, 4, replace=False).tolist())), 5, 2,
            forward=0.02 * _factor(rng), nbytes=30e6 * _factor(rng), begins=rng.uniform(0, 0.3),
        )
        for k in range(3)
    ], hosts(6, 3)  # fmt: skip


def single_training(rng: np.random.Generator) -> Case:
    """On four hosts, three iterations of eight layers, of which the last is 0.2 to 5 times the first."""
    size, first = 30e6 * _factor(rng), float(rng.uniform(0.2, 5))
    return [training("j", (0, 1, 2, 3), 8, 3, forward=0.02, nbytes=size, first=first)], hosts(4)


def four_random(rng: np.random.Generator) -> Case:
    """Twelve tasks each, on five hosts; they come within 3 s."""
    return [
        random_graph(f"j{k}", rng, hosts=5, tasks=12, begins=float(rng.uniform(0, 3))) for k in range(4)
    ], hosts(5)


def single_random(rng: np.random.Generator) -> Case:
    """Twenty tasks on four hosts of two processors."""
    return [random_graph("j", rng, hosts=4, tasks=20, degree=2.0)], hosts(4, 2)


def uneven(rng: np.random.Generator) -> Case:
    """One to four of one to eight tasks on two hosts, of 0.1 to 10 s a task from job to job."""
    return [
        random_graph(
            f"j{k}", rng, hosts=2, tasks=int(rng.integers(1, 9)), seconds=float(10 ** rng.uniform(-1, 1)),
            begins=float(rng.uniform(0, 3)),
        )
        for k in range(rng.integers(1, 5))
    ], hosts(2)  # fmt: skip


FAMILIES: dict[str, Callable[[np.random.Generator], Case]] = {
    "4 MapReduces": four_mapreduces, "3 trainings": three_trainings, "1 training": single_training,
    "4 random graphs": four_random, "1 random graph": single_random,
    "uneven graphs": uneven,
}  # fmt: skip


def jct_rows(quick: bool) -> Iterator[Row]:
    """Mean completion times of a case's jobs under every schedule, over drawn cases."""
    for name, draw in FAMILIES.items():
        seeds = range(5 if quick else 300 if draw is uneven else 40)
        cases = [draw(np.random.default_rng(seed)) for seed in seeds]
        results = {schedule: [emulate(*case, schedule) for case in cases] for schedule in SCHEDULES}
        for schedule, done in results.items():
            yield figure(f"{name}, {schedule}", "s", emulated=[result.mean for result in done])
        for schedule in BASELINES:
            most = 1.05 * (schedule == "fair")
            yield _over(f"{name}, mxdag", results["mxdag"], schedule, results[schedule], most)


def _over(
    title: str, done: Sequence[GraphResult], base: str, others: Sequence[GraphResult], most: float = 0
) -> Row:
    over = ratios((result.mean for result in done), (result.mean for result in others))
    ties, longer = sum(abs(ratio - 1) <= TIE for ratio in over), sum(ratio > 1 + TIE for ratio in over)
    pairs = zip(done, others, strict=True)
    jobs = max(took / other.jobs[job] for own, other in pairs for job, took in own.jobs.items())
    goal = f"<= {most:g} in each case" if most else ""
    note = f"{ties} ties, {longer} longer; one job up to {jobs:.2f} times"
    return figure(
        f"{title} over {base}", "times", goal=goal, emulated=over, passed=max(over) <= most, note=note
    )


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
    scaled = []
    for job in jobs:
        tasks = []
        for task in job.tasks:
            size = task.size * seconds * (1.0 if task.kind == "compute" else LINE / lines)
            command = ("sleep", f"{size:.4f}") if task.kind == "compute" else ()
            tasks.append(replace(task, size=size, command=command))
        scaled.append(replace(job, tasks=tuple(tasks), begins=job.begins * seconds))
    return scaled, {name: LINE if capacity == lines else capacity for name, capacity in resources.items()}


def live_rows(quick: bool) -> Iterator[Row]:
    """Every case under every schedule, another one in every round."""
    need(network.missing())
    rounds = 1 if quick else 5
    for name, case in CASES.items():
        cases = [case(seed) for seed in range(rounds)]
        arms = {schedule: partial(_once, schedule, iter(cases)) for schedule in SCHEDULES}
        results = in_turn(arms, rounds)
        for schedule, runs in results.items():
            good = [run for run in runs if _counts(run)]
            if not good:
                yield left_out(f"{name}, {schedule}", _counted(good, rounds))
                continue
            note = f"twin off by {max(run.off for run in good):.1%} at most; {_counted(good, rounds)}"
            yield figure(
                f"{name}, {schedule}: mean completion", "s", (run.took for run in good), note=note,
                emulated=(run.forecast for run in good),
            )  # fmt: skip
        for other in SCHEDULES[:-1]:
            pairs = [pair for pair in zip(results["mxdag"], results[other], strict=True) if _counts(*pair)]
            part = [mine.took / theirs.took for mine, theirs in pairs]
            # of the worked example ideally 7/8
            goal = ("<= 90%" if name == EXAMPLE_CASE else "<= 105%") if other == "fair" and pairs else ""
            words = f"{name}, mxdag: of the time of {other}"
            yield figure(words, "", part, goal, note=_counted(pairs, rounds))


def _counts(*runs: _Round) -> bool:
    return all(run.short <= SHORT for run in runs)


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
