"""The twin goes on with schemes that others bring: two that shrink with each loss, by hand."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace

from windtunnel.traces.failures import regular
from windtunnel.training.elastic.policy.rules import Rules
from windtunnel.training.goodput.twin.restart import StorageRestart
from windtunnel.training.goodput.twin.simulate import JobModel, PhaseCosts, Setback, simulate
from windtunnel.training.goodput.twin.supervisor import TwinSupervisor


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


def test_restart_on_fewer_keeps_saved_steps_and_its_pace() -> None:
    costs = PhaseCosts(
        detect=0, regroup=0, regroup_growth=0, start=10, replace=math.inf, storage_bandwidth=1.0
    )
    costs = replace(costs, blocking_save=True)
    job = JobModel(2, 1.0, 0.0)  # saves and loads take no time
    trace = regular(2, 25.5, 1)
    result = simulate(RestartOnFewer(job, costs, 10, {2: 1.0, 1: 2.0}), job, costs, trace, 45.5)
    assert result.steps == 20 + 5 and result.redone == 5
    ours = simulate(GoOnOnFewer(2, 10.0, {2: 1.0, 1: 2.0}), job, costs, trace, 45.5)
    assert ours.steps == 25 + 5 and ours.redone == 0
