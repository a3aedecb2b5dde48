"""Oobleck's published simulation (GPT-3 6.7B, 30 hosts), by the rules of the twin.

Source: Jang et al., "Oobleck: Resilient Distributed Training of Large Models Using Pipeline Templates", SOSP
2023 (arXiv 2309.08125), and its artifact: all constants are *published* (``published.json``), none was
measured. The headline of 13.9 times the throughput of a system that restarts is one cell of it, one host lost
every ten minutes; the 29.6 of the revised abstract is none. The cell depends on the artifact's rules (there,
under ``rules``). They were replayed here once, and gave what ``replayed`` says: a check of logic, and no
statement about either system. By the rules of `goodput.twin` the same constants give the restart-based system
no kept step at all in that cell, since restart and one step take longer than ten minutes.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from benchmarks.harness.rows import Row, figure, published
from windtunnel.traces.failures import regular
from windtunnel.training.elastic.policy.rules import Rules
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
