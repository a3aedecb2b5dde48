"""The twin at scale: 8,192 hosts for a month and 65,536 for 54 days, every scheme of the advice, each in a
process of its own.

``published.json`` has Oobleck's published simulation (GPT-3 6.7B, 30 hosts; Jang et al., SOSP 2023, arXiv
2309.08125) and what its rules gave when they were replayed here once: a check of logic, and no statement
about either system.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np

from benchmarks.harness.measure import in_new_process, most_resident
from benchmarks.harness.rows import Row, figure
from windtunnel.traces.failures import poisson
from windtunnel.training.goodput.advise import advise
from windtunnel.training.goodput.model import Question
from windtunnel.training.goodput.twin.simulate import JobModel, PhaseCosts

STAGES, LAYERS = 8, 96
STATE_BYTES = 8e12
STEP_TIME = 10.0  # seconds
LOST_A_DAY = 0.015  # of the hosts (GEMINI, Wang et al., SOSP 2023, after the log of OPT-175B)


@dataclass(frozen=True)
class Size:
    """``lost_a_day``: part of the hosts. ``target``: seconds. ``source``: of the rate, in words."""

    hosts: int
    days: float
    lost_a_day: float
    target: float
    source: str

    @property
    def mtbf(self) -> float:
        """Seconds between losses of the whole job."""
        return 86_400.0 / (self.hosts * self.lost_a_day)


MONTH = Size(8192, 30.0, LOST_A_DAY, 15.0, "GEMINI's figure")
LARGE = Size(65_536, 54.0, 419 / 54 / 2048, 60.0, "Llama 3's, 419 in 54 days of 2,048 hosts")
QUICK = Size(512, 30.0, LOST_A_DAY, 15.0, "GEMINI's figure")


def twin_rows(quick: bool) -> Iterator[Row]:
    """Rows of the section."""
    for size in (QUICK,) if quick else (MONTH, LARGE):
        yield from _rows(size, quick)


def _rows(size: Size, quick: bool) -> Iterator[Row]:
    start = time.perf_counter()
    result = in_new_process(advised, size)
    seconds = time.perf_counter() - start
    name = f"{size.hosts:,} hosts x {size.days:g} days"
    note = (
        f"a process from its start to its end, with the advice on copies and intervals; {result['failures']}"
        f" failures, one every {size.mtbf:.0f} s ({size.lost_a_day:.2%} of the hosts a day, {size.source})"
    )
    goal = f"≤ {size.target:g} s"
    yield figure(f"{name}, all schemes", "s", seconds, goal, judged=not quick, note=note)
    yield figure(f"{name}, memory", "bytes", result["memory"], note="most that was resident")
    for scheme, goodput in result["goodput"].items():
        yield figure(f"{name}, goodput: {scheme}", "", emulated=goodput)


def advised(size: Size) -> dict[str, Any]:
    """The goodput of every scheme, the failures, and the memory that this process took."""
    job = JobModel(size.hosts, STEP_TIME, STATE_BYTES, STAGES, 4 * size.hosts, LAYERS)
    horizon, domains = size.days * 86_400, tuple(f"leaf {host // 16}" for host in range(size.hosts))
    question = Question(job, PhaseCosts(), size.mtbf, horizon, 1e12, domains)
    trace = poisson(size.hosts, question.mtbf, horizon, np.random.default_rng(0))
    goodput = {result.scheme: result.goodput for result in advise(question, trace).results}
    return {"failures": len(trace), "goodput": goodput, "memory": most_resident()}
