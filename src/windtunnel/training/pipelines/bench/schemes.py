"""Schemes of the twin for jobs whose pace is known for each number of hosts."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from windtunnel.training.elastic.policy.rules import Rules
from windtunnel.training.goodput.twin.hosts import Members
from windtunnel.training.goodput.twin.model import Costs, Job
from windtunnel.training.goodput.twin.restart import StorageRestart
from windtunnel.training.goodput.twin.simulate import Setback


class RestartOnFewer(StorageRestart):
    """Restart from storage at once, on the hosts that are left (Varuna; ``shrink-restart``).

    ``step_times``: seconds of a step by the number of hosts.
    """

    def __init__(self, job: Job, costs: Costs, every: int, step_times: Mapping[int, float]) -> None:
        super().__init__(job, costs, every)
        self.members = Members(job.hosts, 0, Rules("shrink-restart"))
        self.step_times = step_times

    def pace(self) -> tuple[float, float]:
        saving = self.stall / self.every
        return self.step_times[self.job.hosts - self.members.missing] + saving, saving


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
