"""Oobleck's published simulation (GPT-3 6.7B, 30 hosts), by the rules of the twin.

Source: Jang et al., "Oobleck: Resilient Distributed Training of Large Models Using Pipeline Templates", SOSP
2023 (arXiv 2309.08125), and its artifact: all constants are *published* (``published.json``), none was
measured. The headline of 13.9 times the throughput of a system that restarts is one cell of it, one host lost
every ten minutes; the 29.6 of the revised abstract is none. The cell depends on the artifact's rules (there,
under ``rules``). They were replayed here once, and gave what ``replayed`` says: a check of logic, and no
statement about either system. By the rules of `goodput.twin` the same constants give the restart-based system
no kept step at all in that cell, since restart and one step take longer than ten minutes.

The twin at scale: 8,192 hosts for a month and 65,536 for 54 days, every scheme of the advice, each in a
process of its own.
"""

from __future__ import annotations

import math
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from benchmarks.harness.measure import in_new_process, most_resident
from benchmarks.harness.rows import Row, figure, published
from windtunnel.traces.failures import poisson, regular
from windtunnel.training.elastic.policy.rules import Rules
from windtunnel.training.goodput.advise import advise
from windtunnel.training.goodput.model import Question
from windtunnel.training.goodput.twin.model import JobModel, PhaseCosts, SimulationResult
from windtunnel.training.goodput.twin.restart import StorageRestart
from windtunnel.training.goodput.twin.simulate import Setback, simulate
from windtunnel.training.goodput.twin.supervisor import TwinSupervisor

DATA = published(__file__)


class RestartOnFewer(StorageRestart):
    """Restart from storage at once, on the hosts that are left (Varuna; ``shrink-restart``).

    ``step_times``: seconds of a step by the number of hosts.
    """

    def __init__(self, job: JobModel, costs: PhaseCosts, every: int, step_times: Mapping[int, float]) -> None:
        super().__init__(job, costs, every)
        self.supervisor = TwinSupervisor(job.hosts, 0, Rules("shrink-restart"))
        self.step_times = step_times

    def pace(self) -> tuple[float, float]:
        saving = self.stall / self.every
        return self.step_times[self.job.hosts - len(self.supervisor.missing)] + saving, saving


class GoOnOnFewer:
    """Reconfiguration in a given time on the hosts that are left, no step lost (Oobleck as published)."""

    name = "reconfiguration"

    def __init__(self, hosts: int, seconds: float, step_times: Mapping[int, float]) -> None:
        self.hosts, self.seconds, self.step_times = hosts, seconds, step_times

    def pace(self) -> tuple[float, float]:
        return self.step_times[self.hosts], 0.0

    def lost(self, hosts: Sequence[int], software: bool, steps: float) -> Setback:
        self.hosts -= len(hosts)
        return Setback((("regroup", self.seconds),))

    def came(self, host: int, running: bool) -> Setback | None:
        return None

    def recovered(self) -> None:
        pass


def published_rows(quick: bool) -> Iterator[Row]:
    """Rows of the section; ``quick`` changes nothing, since all of it takes milliseconds."""
    for cell in DATA["cells"]:
        yield _cell(cell)


def _cell(cell: dict[str, Any]) -> Row:
    ours, theirs = twin_runs(cell["every_s"])
    words = (
        f"replayed once by the artifact's rules: {cell['replayed']:.3f}; the twin's: {DATA['restart_s']:g} s"
        f" from a loss to the next step, what was not saved is done again; steps kept: {ours.steps:.0f} and"
        f" {theirs.steps:.0f}"
    )
    every = range(1, DATA["save_every"] + 1)
    best = max((twin_runs(cell["every_s"], steps)[1].steps, -steps) for steps in every)
    if best[0]:
        words += f"; with its best interval ({-best[1]} steps) {ours.steps / best[0]:.3g} times"
    else:
        words += "; no save is ever reached, with any interval"
    return figure(
        f"a loss every {cell['name']}: Oobleck / Varuna, twin's rules", "times",
        emulated=ours.steps / theirs.steps if theirs.steps else None, published=cell["published"],
        source=DATA["source"], note=words,
    )  # fmt: skip


def twin_runs(
    every: float, save_every: int = DATA["save_every"]
) -> tuple[SimulationResult, SimulationResult]:
    """Oobleck's and Varuna's runs by the twin's rules, with a loss every ``every`` seconds."""
    hosts, losses, save = DATA["hosts"], DATA["losses"], DATA["save_s"]
    trace, horizon = regular(hosts, every, losses), every * losses
    oobleck, varuna = (
        {int(hosts): DATA["samples_a_step"] / rate for hosts, rate in DATA[f"{name}_samples_per_s"].items()}
        for name in ("oobleck", "varuna")
    )
    # what is saved takes as long to save as to load, which is a part of the published restart
    costs = PhaseCosts(
        detect=0.0, regroup=0.0, regroup_growth=0.0, start=DATA["restart_s"] - save, replace=math.inf,
        storage_bandwidth=1.0 / save, blocking_save=True,
    )  # fmt: skip
    ours, theirs = JobModel(hosts, oobleck[hosts], 1.0), JobModel(hosts, varuna[hosts], 1.0)
    goes_on = GoOnOnFewer(hosts, DATA["reconfigure_s"], oobleck)
    restarts = RestartOnFewer(theirs, costs, save_every, varuna)
    return simulate(goes_on, ours, costs, trace, horizon), simulate(restarts, theirs, costs, trace, horizon)


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
    told = in_new_process(advised, size)
    seconds = time.perf_counter() - start
    name = f"{size.hosts:,} hosts x {size.days:g} days"
    note = (
        f"a process from its start to its end, with the advice on copies and intervals; {told['failures']}"
        f" failures, one every {size.mtbf:.0f} s ({size.lost_a_day:.2%} of the hosts a day, {size.source})"
    )
    goal = f"≤ {size.target:g} s"
    yield figure(f"{name}, all schemes", "s", seconds, goal, judged=not quick, note=note)
    yield figure(f"{name}, memory", "bytes", told["memory"], note="most that was resident")
    for scheme, goodput in told["goodput"].items():
        yield figure(f"{name}, goodput: {scheme}", "", emulated=goodput)


def advised(size: Size) -> dict[str, Any]:
    """The goodput of every scheme, the failures, and the memory that this process took."""
    job = JobModel(size.hosts, STEP_TIME, STATE_BYTES, STAGES, 4 * size.hosts, LAYERS)
    horizon, domains = size.days * 86_400, tuple(f"leaf {host // 16}" for host in range(size.hosts))
    question = Question(job, PhaseCosts(), size.mtbf, horizon, 1e12, domains)
    trace = poisson(size.hosts, question.mtbf, horizon, np.random.default_rng(0))
    goodput = {result.scheme: result.goodput for result in advise(question, trace).results}
    return {"failures": len(trace), "goodput": goodput, "memory": most_resident()}
