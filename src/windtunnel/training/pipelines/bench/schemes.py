"""Schemes of the twin for jobs whose pace is known for each number of machines."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from windtunnel.training.elastic.policy.rules import Rules
from windtunnel.training.goodput.twin.hosts import Members
from windtunnel.training.goodput.twin.model import Costs, Job
from windtunnel.training.goodput.twin.restart import StorageRestart
from windtunnel.training.goodput.twin.simulate import Setback


class RestartOnFewer(StorageRestart):
    """Restart from storage at once, on the machines that are left (Varuna; ``shrink-restart``).

    ``step_times``: seconds of a step by the number of machines.
    """

    def __init__(self, job: Job, costs: Costs, every: int, step_times: Mapping[int, float]) -> None:
        super().__init__(job, costs, every)
        self.members = Members(job.machines, 0, Rules("shrink-restart"))
        self.step_times = step_times

    def pace(self) -> tuple[float, float]:
        saving = self.stall / self.every
        return self.step_times[self.job.machines - self.members.missing] + saving, saving


class GoOnOnFewer:
    """Reconfiguration in a given time on the machines that are left, no step lost (Oobleck as published)."""

    name = "reconfiguration"

    def __init__(self, machines: int, seconds: float, step_times: Mapping[int, float]) -> None:
        self.machines, self.seconds, self.step_times = machines, seconds, step_times

    def pace(self) -> tuple[float, float]:
        return self.step_times[self.machines], 0.0

    def lost(self, machines: Sequence[int], software: bool, steps: float) -> Setback:
        self.machines -= len(machines)
        return Setback((("regroup", self.seconds),))

    def came(self, machine: int, running: bool) -> Setback | None:
        return None

    def recovered(self) -> None:
        pass
