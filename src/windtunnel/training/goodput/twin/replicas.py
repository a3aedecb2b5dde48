"""Schemes that go on with what the other pipelines or replicas hold: redundant, rerouted, dropped.

A host that comes starts beside the others; they stop to take it into the group and to give it the state,
which changes with each step. Processes that end on a host that lives come back so, too, a moment later:
the others stop twice, and the little that is slower in between is left out. The work of a step is the same
throughout, divided anew over what is left.
"""

from __future__ import annotations

from collections.abc import Sequence

from windtunnel.training.goodput.twin.model import JobModel, PhaseCosts
from windtunnel.training.goodput.twin.restart import StorageRestart, regroup_time
from windtunnel.training.goodput.twin.simulate import Setback

Phases = tuple[tuple[str, float], ...]


class _Grid:
    """Hosts as replicas x stages: host m is stage ``m % stages`` of replica ``m // stages``.

    Hosts beyond the last whole replica are not used: these schemes have one layout.
    """

    def __init__(self, job: JobModel) -> None:
        self.stages = job.stages
        self.replicas = job.hosts // job.stages
        self.dead: set[int] = set()
        self.dead_of_stage = [0] * self.stages
        self.dead_of_replica = [0] * self.replicas
        self.hurt = 0  # replicas that lost a host, kept since it is asked for at every change

    def lose(self, hosts: Sequence[int]) -> list[int]:
        """Those of ``hosts`` that were in use."""
        used = [m for m in hosts if m < self.stages * self.replicas and m not in self.dead]
        for host in used:
            self._count(host, 1)
        self.dead.update(used)
        return used

    def come(self, host: int) -> bool:
        """Whether ``host`` was missed."""
        if host not in self.dead:
            return False
        self.dead.discard(host)
        self._count(host, -1)
        return True

    def _count(self, host: int, change: int) -> None:
        self.dead_of_stage[host % self.stages] += change
        replica = host // self.stages
        before = self.dead_of_replica[replica] > 0
        self.dead_of_replica[replica] += change
        self.hurt += (self.dead_of_replica[replica] > 0) - before


def _out(job: JobModel, costs: PhaseCosts) -> Phases:
    """Going on without a host."""
    return (("detect", costs.detect), ("regroup", regroup_time(costs, job.hosts)))


def _in(job: JobModel, costs: PhaseCosts, stages: int) -> Phases:
    """Taking in a host that holds so many stages."""
    share = stages * job.state_bytes / job.stages
    return (("join", costs.join), ("load", share / costs.peer_bandwidth))


def _anew(job: JobModel, costs: PhaseCosts, storage: StorageRestart, waited: bool) -> Phases:
    """Every process from storage; while a host was waited for, the loss has long been noticed."""
    return (
        ("detect", 0.0 if waited else costs.detect),
        ("start", costs.start),
        ("regroup", regroup_time(costs, job.hosts)),
        ("load", storage.load),
    )


class _OnGrid:
    """What the schemes of this file share; each says how fast it is and what it does not survive.

    ``holds``: stages of which a host keeps the state.
    """

    holds = 1

    def __init__(self, job: JobModel, costs: PhaseCosts, storage_every: int) -> None:
        self.job, self.costs = job, costs
        self.storage = StorageRestart(job, costs, storage_every)
        self.grid = _Grid(job)

    def lost(self, hosts: Sequence[int], software: bool, steps: float) -> Setback | None:
        used = self.grid.lose(hosts)
        uncovered = self._uncovered()
        if software:
            for host in used:
                self.grid.come(host)
        if not used:
            return None
        if uncovered:
            waits = self._uncovered()
            phases = _anew(self.job, self.costs, self.storage, waits)
            return Setback(phases, self.storage.kept(steps), waits, from_storage=True)
        back = _in(self.job, self.costs, self.holds) if software else ()
        return Setback((*_out(self.job, self.costs), *back))

    def came(self, host: int, running: bool) -> Setback | None:
        if not self.grid.come(host) or self._uncovered():
            return None
        if running:
            taken = self._usable(host)
            return Setback(_in(self.job, self.costs, self.holds)) if taken else None
        return Setback(_anew(self.job, self.costs, self.storage, True), from_storage=True)

    def recovered(self) -> None:
        pass

    def _uncovered(self) -> bool:
        """Whether what is left cannot go on."""
        raise NotImplementedError

    def _usable(self, host: int) -> bool:
        """Whether ``host``, which has just come, is of use before others have."""
        return True


class Rerouting(_OnGrid):
    """ReCycle (Gandhi et al., SOSP 2024): peers of the same stage take a lost host's microbatches.

    No state is copied: every replica of the stage has it. With ``n`` microbatches a replica, ``S`` stages and
    ``d`` replicas of which ``l`` lost this stage, its peers have ``n d / (d - l)`` to do; what fits into the
    ``S - 1`` bubbles of the pipeline costs nothing (the most that its split backward and staggered optimizer
    can gain). All replicas of a stage gone: storage.
    """

    name = "rerouting"

    def __init__(self, job: JobModel, costs: PhaseCosts, storage_every: int) -> None:
        super().__init__(job, costs, storage_every)
        self.per_replica = max(1, job.microbatches // self.grid.replicas)

    def pace(self) -> tuple[float, float]:
        worst = max(self.grid.dead_of_stage)
        slots = self.per_replica + self.job.stages - 1
        busy = self.per_replica * self.grid.replicas / max(1, self.grid.replicas - worst)
        used = self.grid.stages * self.grid.replicas / self.job.hosts
        saving = self.storage.stall / self.storage.every
        step = self.job.work / used * max(1.0, busy / slots) + self.job.overhead
        return step + saving, saving

    def _uncovered(self) -> bool:
        return max(self.grid.dead_of_stage) >= self.grid.replicas


class Redundant(_OnGrid):
    """Bamboo (Thorpe et al., NSDI 2023): every host also keeps, and forward computes, its successor's
    stage.

    ``overhead``: the part by which that slows every step, an assumption. A host whose successor is gone
    does both stages, so its pipeline runs at half the pace; the pipelines share the microbatches by their
    pace. Two neighbours gone: all go back to storage. A pipeline needs two stages.
    """

    name = "redundant computation"
    holds = 2

    def __init__(self, job: JobModel, costs: PhaseCosts, storage_every: int, overhead: float = 0.2) -> None:
        super().__init__(job, costs, storage_every)
        self.overhead = overhead

    def pace(self) -> tuple[float, float]:
        used = self.grid.stages * self.grid.replicas / self.job.hosts
        speed = (self.grid.replicas - self.grid.hurt / 2) / self.grid.replicas
        saving = self.storage.stall / self.storage.every
        step = self.job.work * (1.0 + self.overhead) / used / speed + self.job.overhead
        return step + saving, saving

    def _uncovered(self) -> bool:
        for host in self.grid.dead:
            replica, stage = divmod(host, self.grid.stages)
            successor = replica * self.grid.stages + (stage + 1) % self.grid.stages
            if successor in self.grid.dead:
                return True
        return False


class ReplicaDrop(_OnGrid):
    """torchft: a replica that lost a host is left out until it is whole again; the others go on.

    They do its samples, too (torchft's own steps get smaller instead, which is no faster). A replica that
    comes back copies the state of another one, host by host.
    """

    name = "replica drop"

    def pace(self) -> tuple[float, float]:
        left = self.grid.replicas - self.grid.hurt
        used = self.grid.stages * self.grid.replicas / self.job.hosts
        saving = self.storage.stall / self.storage.every
        step = self.job.work / used * self.grid.replicas / max(1, left) + self.job.overhead
        return step + saving, saving

    def _uncovered(self) -> bool:
        return self.grid.hurt == self.grid.replicas

    def _usable(self, host: int) -> bool:
        return self.grid.dead_of_replica[host // self.grid.stages] == 0
