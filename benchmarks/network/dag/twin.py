"""Job completion times under all schedules, emulated."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

import numpy as np

from benchmarks.harness.measure import spread
from benchmarks.harness.rows import Row, figure
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


def one_training(rng: np.random.Generator) -> Case:
    """On four hosts, three iterations of eight layers, of which the last is 0.2 to 5 times the first."""
    size, first = 30e6 * _factor(rng), float(rng.uniform(0.2, 5))
    return [training("j", (0, 1, 2, 3), 8, 3, forward=0.02, nbytes=size, first=first)], hosts(4)


def four_random(rng: np.random.Generator) -> Case:
    """Twelve tasks each, on five hosts; they come within 3 s."""
    return [
        random_graph(f"j{k}", rng, hosts=5, tasks=12, begins=float(rng.uniform(0, 3))) for k in range(4)
    ], hosts(5)


def one_random(rng: np.random.Generator) -> Case:
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
    "4 MapReduces": four_mapreduces, "3 trainings": three_trainings, "1 training": one_training,
    "4 random graphs": four_random, "1 random graph": one_random,
    "uneven graphs": uneven,
}  # fmt: skip


def example_rows(quick: bool) -> Iterator[Row]:
    """The worked example under every schedule."""
    for schedule in SCHEDULES:
        seconds = emulate([EXAMPLE], EXAMPLE_RESOURCES, schedule).mean
        goal = 7.0 if schedule == "mxdag" else 8.0
        name, met = f"two flows behind one task, {schedule}", abs(seconds - goal) < 1e-9
        yield figure(name, "s", goal=f"{goal:g} s", emulated=seconds, met=met)


def jct_rows(quick: bool) -> Iterator[Row]:
    """Mean completion times of a case's jobs under every schedule, over drawn cases."""
    for name, draw in FAMILIES.items():
        seeds = range(5 if quick else 300 if draw is uneven else 40)
        cases = [draw(np.random.default_rng(seed)) for seed in seeds]
        found = {schedule: [emulate(*case, schedule) for case in cases] for schedule in SCHEDULES}
        for schedule, done in found.items():
            means = [one.mean for one in done]
            middle, note = spread(means).median, _range(means, "s")
            yield figure(f"{name}, {schedule}", "s", emulated=middle, note=note)
        for schedule in BASELINES:
            yield _over(
                f"{name}, mxdag", found["mxdag"], schedule, found[schedule], 1.05 * (schedule == "fair")
            )


def _range(values: Sequence[float], unit: str = "") -> str:
    low, high = min(values), max(values)
    return f"{low:.3g} to {high:.3g} {unit}".rstrip() + f" in {len(values)} seeds"


def _over(
    what: str, done: Sequence[GraphResult], base: str, others: Sequence[GraphResult], most: float = 0
) -> Row:
    pairs = list(zip(done, others, strict=True))
    ratios = [one.mean / other.mean for one, other in pairs]
    ties = sum(abs(one - 1) <= TIE for one in ratios)
    longer = sum(one > 1 + TIE for one in ratios)
    jobs = max(took / other.jobs[job] for one, other in pairs for job, took in one.jobs.items())
    goal = f"<= {most:g} in each case" if most else ""
    return figure(
        f"{what} over {base}", "times", goal=goal, emulated=spread(ratios).median, met=max(ratios) <= most,
        note=f"{_range(ratios)}: {ties} ties, {longer} longer; one job up to {jobs:.2f} times",
    )  # fmt: skip


def sizes_rows(quick: bool) -> Iterator[Row]:
    """Sizes that are thought to be off by up to so much, each task's by its own."""
    for name in ("4 MapReduces", "4 random graphs"):
        seeds = range(5 if quick else 20)
        cases = [FAMILIES[name](np.random.default_rng(seed)) for seed in seeds]
        fair = [emulate(*case, "fair") for case in cases]
        for off in (0.1, 0.2, 0.5):
            done = []
            for seed, (jobs, resources) in zip(seeds, cases, strict=True):
                rng = np.random.default_rng((seed, 1))
                keys = [(job.name, task.name) for job in jobs for task in job.tasks]
                believed = {key: 1 + off * rng.uniform(-1, 1) for key in keys}
                done.append(emulate(jobs, resources, "mxdag", believed=believed))
            yield _over(f"{name}, sizes wrong by up to {off:.0%}, mxdag", done, "fair", fair)
