"""A master's workers: who is there, how many there should be, and their starts and ends.

How many there should be the policy says once a period, of what workers made and trainers took in it. What is
missing is started, what is too much is drained: it ends once it sends nothing. A worker that is silent for
its lease, or whose process has ended, is gone.
"""

from __future__ import annotations

import contextlib
import os
import time
from collections import Counter
from dataclasses import dataclass, field
from typing import Any

from windtunnel.base.processes import Adopted, Identity
from windtunnel.data.ingest import policy
from windtunnel.data.ingest.live.calls import MasterSettings
from windtunnel.data.ingest.live.pool import WorkerLauncher
from windtunnel.data.ingest.policy import (
    DrainWorkers,
    GiveUpSplit,
    PoolLoad,
    PoolSize,
    SplitFault,
    WorkerSurplus,
)
from windtunnel.data.ingest.policy.autoscaler import Autoscaler
from windtunnel.store.eventlog import EventLog

CAPABILITY = "data.ingest"


@dataclass
class RegisteredWorker:
    address: str
    process: str
    last_message: float
    rows: int = 0
    busy: float = 0.0
    cpu: float = 0.0
    drain: bool = False

    def end(self) -> None:
        """Also one that an earlier master of this host started."""
        with contextlib.suppress(ValueError, OSError):
            process = Identity.parse(self.process)
            if process.pid != os.getpid():
                Adopted(process).kill()


@dataclass
class _Period:
    """What is added up until the next decision on the number of workers."""

    began: float
    consumed: int = 0
    stalled: float = 0.0
    fills: list[float] = field(default_factory=list)
    rows: int = 0
    busy: float = 0.0


class WorkerPool:
    """``there``: by name, all that serve. ``scaler``: how many there should be. ``batches``: those taken,
    ``cpu``: seconds of workers, in all. ``again``: workers of a master before may come yet."""

    def __init__(
        self, settings: MasterSettings, pool: WorkerLauncher | None, log: EventLog, *, again: bool
    ) -> None:
        now = time.monotonic()
        self.settings, self._pool, self._log = settings, pool, log
        self.there: dict[str, RegisteredWorker] = {}
        self.starting: set[str] = set()
        self._false_starts = self._started = 0
        self._decide = policy.POLICIES[settings.policy]
        target = settings.scaling.least if settings.workers is None else settings.workers
        self.scaler = Autoscaler(settings.scaling, target, now, self._decide, self._scaled)
        self._grace = now + (2 * settings.every + 0.5 if again else 0.0)
        self._period = _Period(now)
        self.batches, self.cpu = 0, 0.0
        self._begun = False
        """A batch has been taken: until then trainers wait for what starts, which says nothing of demand."""

    @property
    def ready(self) -> int:
        return sum(not worker.drain for worker in self.there.values())

    def came(self, message: dict[str, Any]) -> None:
        """A worker registers."""
        name = message["name"]
        self.starting.discard(name)
        self._false_starts = 0
        self.there[name] = RegisteredWorker(message["address"], message["process"], time.monotonic())
        self._log.append("worker", name=name, address=message["address"])

    def heartbeat(self, message: dict[str, Any]) -> dict[str, Any]:
        """A worker is there: the answer."""
        worker = self.there.get(message["name"])
        if worker is None:
            return {"unknown": True}
        worker.last_message = time.monotonic()
        self._period.rows += max(0, message["produced"] - worker.rows)
        self._period.busy += max(0.0, message["busy"] - worker.busy)
        self.cpu += max(0.0, message["cpu"] - worker.cpu)
        worker.rows, worker.busy, worker.cpu = message["produced"], message["busy"], message["cpu"]
        if message["asked"]:
            self._log.append("asked", worker=message["name"], splits=message["asked"])
        return {"drain": worker.drain}

    def count_batches(self, batches: int, stalled: float, fill: float) -> None:
        """A client has taken so many more, and waited so many seconds more; ``fill``: of its buffers."""
        batches, now = max(0, batches), time.monotonic()
        self._period.consumed += batches
        self.batches += batches
        if self._begun:
            self._period.stalled += min(max(0.0, stalled), 2 * self.settings.period)
        elif batches:
            self._begun, self._period = True, _Period(now)
            self.scaler.up = now - self.settings.scaling.start
        self._period.fills.append(fill)

    def gone(self, now: float) -> list[str]:
        """Who is, since this was asked last."""
        lease, reasons = self.settings.worker_lease, {}
        for name, worker in self.there.items():
            why = self._pool.ended(name) if self._pool else None
            if why is None and now - worker.last_message > lease:
                why = f"silent for {lease:g} s"
                if self._pool is not None:  # it does not answer: it ends, where this host can end it
                    self._pool.kill(name)
                    worker.end()
            if why is not None:
                reasons[name] = why
        for name, why in reasons.items():
            del self.there[name]
            self._log.append("worker gone", name=name, why=why)
        return list(reasons)

    def fill(self, now: float, load: Counter[str], address: str, *, failed: bool) -> str:
        """Start what is missing for the master at ``address``, unless it has failed, and let go what is too
        much. The answer is why that is in vain, if it is."""
        pool, why, target = self._pool, None, self.scaler.target
        if pool is None or now < self._grace:
            return ""
        for name in list(self.starting):
            if (why := pool.ended(name)) is not None:
                self.starting.remove(name)
                self._false_starts += 1
                self._log.append("worker gone", name=name, why=why)
                given_up = isinstance(
                    self._decided(SplitFault("fail", False, self._false_starts)), GiveUpSplit
                )
                if given_up and not failed:
                    return f"{self._false_starts} workers in a row did not start: {why}"
        there = [
            policy.SplitWorker(name, load[name]) for name, worker in self.there.items() if not worker.drain
        ]
        if len(there) > max(0, target - len(self.starting)):
            decision = self._decided(WorkerSurplus(tuple(there), target - len(self.starting)))
            assert isinstance(decision, DrainWorkers)
            for name in decision.workers:
                self.there[name].drain = True
                self._log.append("worker leaves", name=name)
        for _ in range(0 if failed else target - len(there) - len(self.starting)):
            self._started += 1
            name = f"w{self._started}-{int(time.time()) % 100_000}"
            self.starting.add(name)
            pool.start(name, address)
            self._log.append("worker starts", name=name)
        return ""

    def scale(self, now: float, clients: int) -> None:
        """Once a period: how many there should be for so many ``clients``."""
        period, length = self._period, now - self._period.began
        if length < self.settings.period:
            return
        self._period = _Period(now)
        if self.settings.workers is not None or not clients:
            return
        self.scaler.period(
            now, length, consumed=period.consumed, stalled=min(1.0, period.stalled / (length * clients)),
            buffered=sum(period.fills) / max(len(period.fills), 1), produced=period.rows, busy=period.busy,
            ready=self.ready,
        )  # fmt: skip

    def _scaled(self, now: float, load: PoolLoad, scale: PoolSize) -> None:
        self._log.decision(CAPABILITY, self.settings.policy, load, scale, now=now)

    def _decided(self, observation: policy.Observation) -> policy.Decision:
        decision = self._decide(observation)
        self._log.decision(CAPABILITY, self.settings.policy, observation, decision)
        return decision

    def end(self) -> None:
        """All of them."""
        if self._pool is None:
            return
        for name in [*self.there, *self.starting]:
            self._pool.kill(name)
        for worker in self.there.values():
            worker.end()
