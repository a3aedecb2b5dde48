"""Schemes that keep the job's size: restart from storage, and restart from the memory of peers."""

from __future__ import annotations

import math
from collections.abc import Sequence

from windtunnel.training.checkpoint.model import Copy, Placement, Shard, StoredStep
from windtunnel.training.checkpoint.policy.interval import best_every
from windtunnel.training.checkpoint.policy.restore import plan_restore
from windtunnel.training.elastic.policy.rules import Rules
from windtunnel.training.goodput.twin.simulate import MEMORY, STORAGE, JobModel, PhaseCosts, Setback
from windtunnel.training.goodput.twin.supervisor import TwinSupervisor


def regroup_time(costs: PhaseCosts, hosts: int) -> float:
    """Seconds to form a group of ``hosts``."""
    return costs.regroup + costs.regroup_growth * math.log2(max(1, hosts))


def storage_every(job: JobModel, costs: PhaseCosts, between: float, longest: float = math.inf) -> int:
    """Steps between two checkpoints to storage that waste least, with ``between`` seconds between failures
    that need one; ``longest``: seconds between two at most."""
    return best_every(save_stall(job, costs), between, job.step_time, write_time(job, costs), longest)


def write_time(job: JobModel, costs: PhaseCosts) -> float:
    """Seconds until a checkpoint is in storage."""
    return job.state_bytes / (costs.storage_bandwidth * costs.storage_share)


def save_stall(job: JobModel, costs: PhaseCosts) -> float:
    """Seconds that a checkpoint to storage takes from training."""
    return copy_time(job, costs) if costs.save_stall is None else costs.save_stall


def copy_time(job: JobModel, costs: PhaseCosts) -> float:
    """Seconds in which every host copies its part of the state within its own memory."""
    return job.state_bytes / job.hosts / costs.memory_bandwidth


class StorageRestart:
    """Everything starts anew from the last checkpoint in storage, as under torchrun.

    ``every``: steps between two checkpoints. ``saves``: steps between those to memory, of which the first one
    that is due goes to storage.
    """

    name = STORAGE

    def __init__(self, job: JobModel, costs: PhaseCosts, every: int, spares: int = 0, saves: int = 1) -> None:
        self.job, self.costs, self.every, self.saves = job, costs, max(every, saves), saves
        self.supervisor = TwinSupervisor(job.hosts, spares, Rules("restart"))
        self.load = job.state_bytes / costs.storage_bandwidth
        self.write = write_time(job, costs)
        self.stall = save_stall(job, costs)
        self.whole = 0.0  # the newest step that is known to be in storage

    def pace(self) -> tuple[float, float]:
        saving = self.stall / self.every
        return self.job.step_time + saving, saving

    def newest_stored(self, steps: float) -> float:
        """The newest step that was written whole; one that was, still is after the job fell back to it."""
        behind = self.write / self.pace()[0]
        due = math.floor((steps - behind) / self.every)
        saved = self._saved(due)
        self.whole = max(self.whole, saved if saved <= steps - behind else self._saved(due - 1))
        return self.whole

    def _saved(self, number: int) -> float:
        """The step of the checkpoint with that number: of the first one to memory that is not before it."""
        return -(-number * self.every // self.saves) * self.saves

    def lost(self, hosts: Sequence[int], software: bool, steps: float) -> Setback:
        waits = not (self.supervisor.break_off if software else self.supervisor.lose)(hosts)
        return Setback(self._phases(waits), self.newest_stored(steps), waits, from_storage=True)

    def came(self, host: int, running: bool) -> Setback | None:
        if not self.supervisor.come(host) or running:
            return None
        return Setback(self._phases(True), from_storage=True)

    def recovered(self) -> None:
        pass

    def _phases(self, waited: bool) -> tuple[tuple[str, float], ...]:
        # while a host is waited for, the loss has long been noticed
        return (
            ("detect", 0.0 if waited else self.costs.detect),
            ("start", self.costs.start),
            ("regroup", regroup_time(self.costs, self.job.hosts)),
            ("load", self.load),
        )


class PeerMemory:
    """GEMINI: a checkpoint in the memory of peers every few steps, storage for what that does not cover.

    ``placement``: where the copies lie. ``storage_every``: steps between two checkpoints to storage.
    Survivors go on in their processes; only replaced hosts start new ones. A checkpoint is whole at home
    at once, so processes that ended go on from the newest; in the memory of peers it is whole when it is
    replicated, which begins with the next step. Copies that were lost are made again while the job trains;
    they count as there when it runs again.
    """

    def __init__(
        self,
        job: JobModel,
        costs: PhaseCosts,
        placement: Placement,
        storage_every: int,
        spares: int = 0,
        every: int = 1,
        name: str = MEMORY,
    ) -> None:
        self.name = name
        self.job, self.costs, self.placement = job, costs, placement
        self.supervisor = TwinSupervisor(job.hosts, spares, Rules("replace"))
        self.share = job.state_bytes / job.hosts
        self.replicate = (placement.copies - 1) * self.share / costs.peer_bandwidth
        # replication in the background takes as many steps as it takes; a checkpoint begins when it is over
        self.every = max(every, math.ceil(self.replicate / job.step_time))
        self.storage = StorageRestart(job, costs, storage_every, saves=self.every)
        self.stall = copy_time(job, costs)
        self.whole = 0.0  # the newest step that is known to be in memory with all its copies
        self._shards_of: list[list[int]] = [[] for _ in range(job.hosts)]
        for shard, holders in enumerate(placement.holders):
            for holder in holders:
                self._shards_of[holder].append(shard)
        self.gone: set[int] = set()  # places whose memory is empty since the last recovery
        self.fallen = False

    def pace(self) -> tuple[float, float]:
        saving = self.stall / self.every + self.storage.stall / self.storage.every
        return self.job.step_time + saving, saving

    def lost(self, hosts: Sequence[int], software: bool, steps: float) -> Setback:
        waits = not (self.supervisor.break_off if software else self.supervisor.lose)(hosts)
        if not software:
            self.gone.update(hosts)
        # a checkpoint that is still being replicated is not whole, the one before it is
        behind = 0.0 if software else self.replicate / self.pace()[0]
        whole = max(self.whole, math.floor((steps - behind) / self.every) * self.every)
        stored = self.storage.newest_stored(steps)
        if not self.fallen:
            plan = plan_restore(self._copies(whole), [_stored(stored, self._shards())])
            self.fallen = any(copies[0].place is None for copies in plan.sources)
        self.whole = stored if self.fallen else whole
        return Setback(self._phases(waits), self.whole, waits, self.fallen)

    def _shards(self) -> list[int]:
        """Places whose shards lost a copy; of all others there are all."""
        return sorted({place for gone in self.gone for place in self._shards_of[gone]}) or [0]

    def _copies(self, step: float) -> list[Copy]:
        """What the memory that is left would list of those shards."""
        shards = self._shards()
        return [
            Copy(holder, Shard(f"rank{rank}", int(step), len(shards), False, 1, "", int(self.share)))
            for rank, place in enumerate(shards)
            for holder in self.placement.holders[place]
            if holder not in self.gone
        ]

    def came(self, host: int, running: bool) -> Setback | None:
        if not self.supervisor.come(host) or running:
            return None
        return Setback(self._phases(True), from_storage=self.fallen)

    def recovered(self) -> None:
        self.gone.clear()
        self.fallen = False

    def _phases(self, waited: bool) -> tuple[tuple[str, float], ...]:
        costs = self.costs
        load = self.share / (costs.peer_bandwidth if self.gone else costs.memory_bandwidth)
        return (
            ("detect", 0.0 if waited else costs.detect),
            ("start", costs.start),
            ("regroup", regroup_time(costs, self.job.hosts)),
            ("load", self.storage.load if self.fallen else load),
        )


def _stored(step: float, shards: Sequence[int]) -> StoredStep:
    count = len(shards)
    return StoredStep(
        int(step), 0, tuple(Shard(f"rank{rank}", int(step), count, False, 0, "", 0) for rank in range(count))
    )
