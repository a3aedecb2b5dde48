"""Queries to replicas: what the policy's `Desk` says is to be done, done by processes of this host, or by
actors of a Ray cluster.

Each accepted request has one future, which is answered once.
"""

from __future__ import annotations

import asyncio
import math
import os
import time
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil
from numpy.typing import NDArray

from windtunnel.base.errors import UserError
from windtunnel.base.plain import to_plain
from windtunnel.serving.variants.live.cluster import Remote, ReplicaCluster
from windtunnel.serving.variants.live.registry import VariantFile
from windtunnel.serving.variants.live.replica import Died, Failed, Replica, preload
from windtunnel.serving.variants.live.tensors import Arrays, Outputs, TensorSpec, joined, lengths, parted
from windtunnel.serving.variants.model import CPU, Query, Variant
from windtunnel.serving.variants.policy import POLICIES, STYLES, Observation
from windtunnel.serving.variants.policy.desk import (
    ATTEMPTS,
    BatchRun,
    Desk,
    Effect,
    Hosted,
    ReplicaGroup,
    RequestFailure,
    Start,
    Stop,
    VariantRequest,
)
from windtunnel.store.eventlog import EventLog

HERE = "this host"
NAME = "serving.variants"


class Unknown(UserError):
    """No such task, architecture or variant."""


class Infeasible(UserError):
    """No variant does what is asked."""


class Unanswered(Exception):
    """Not answered: replicas died of it or refused it, or it was shed; to ask again ``after`` seconds."""

    def __init__(self, reason: str, after: float = 0.0) -> None:
        super().__init__(reason)
        self.after = after


@dataclass
class Served:
    """A variant here: its ``group`` at the desk, and its processes, of which ``idle`` do nothing."""

    entry: VariantFile
    group: ReplicaGroup
    replicas: list[Replica | Remote] = field(default_factory=list)
    idle: list[Replica | Remote] = field(default_factory=list)

    @property
    def variant(self) -> Variant:
        return self.entry.variant


class VariantsService:
    """Used with ``async with``. ``pinned``: by architecture the variant that the baselines use. ``log`` gets
    every decision, what came of it, and what else the desk was told; ``second``: how long one is."""

    def __init__(
        self, entries: Sequence[VariantFile], *, policy: str = "cheapest", log: EventLog | None = None,
        pinned: dict[str, str] | None = None, cluster: ReplicaCluster | None = None, second: float = 1.0,
    ) -> None:  # fmt: skip
        # no host here is one architecture's own
        live = [name for name, style in STYLES.items() if not style.own and (pinned or not style.pinned)]
        if policy not in live:
            raise UserError(f"variants serve: `policy` {policy!r} is not accepted; use {', '.join(live)}")
        self.policy, self._log, self._second = policy, log, second
        self.desk = Desk([entry.variant for entry in entries], self._decide, pinned=pinned, grows=False)
        self._start: Callable[[Path, int], Replica | Remote] = cluster.replica if cluster else Replica
        self._free = cluster.free if cluster else _free
        cores = cluster.cores if cluster else os.cpu_count()
        host = Hosted(name=HERE, hardware=CPU, cores=cores or 1, free=self._free())
        self.desk.hosts[HERE] = self._host = host
        variants = [to_plain(entry.variant) for entry in entries]
        self._note("service", variants=variants, cores=host.cores, free=host.free, pinned=pinned)
        preload(*(entry.variant.framework for entry in entries))
        self.groups = {
            entry.variant.name: Served(entry, self.desk.group(entry.variant.name, HERE)) for entry in entries
        }
        self._threads = ThreadPoolExecutor(64)
        self._tasks: set[asyncio.Task[None]] = set()
        self.busy = 0.0  # core-seconds of all batches
        self._open: set[asyncio.Future[Outputs]] = set()
        self._number = 0
        self._ending = False
        self.failing: Callable[[BaseException], object] = lambda fault: None

    async def __aenter__(self) -> VariantsService:
        self._spawn(self._seconds())
        return self

    async def __aexit__(self, *_: object) -> None:
        self._ending = True
        for task in self._tasks:
            task.cancel()
        for group in self.groups.values():
            for replica in group.replicas:
                replica.end()
        for answer in self._open:
            answer.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        self._threads.shutdown(wait=False)

    def _spawn(self, work: Any) -> None:
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._ended)

    def _ended(self, task: asyncio.Task[None]) -> None:
        """A task that failed, as where the log cannot be written, was to answer somebody, or bring replicas:
        nobody waits for that in vain, and whoever serves is told (``failing``), to end."""
        self._tasks.discard(task)
        if not task.cancelled() and (fault := task.exception()) is not None:
            for answer in [answer for answer in self._open if not answer.done()]:
                answer.set_exception(Unanswered(str(fault)))
            self.failing(fault)

    def _decide(self, observation: Observation) -> Any:
        decision = POLICIES[self.policy](observation)
        if self._log is not None:
            self._log.decision(NAME, self.policy, observation, decision)
        return decision

    def _note(self, kind: str, **fields: Any) -> None:
        if self._log is not None:
            self._log.append(kind, **fields)

    def _log_event(
        self, kind: str, served: Served, batch: Sequence[VariantRequest] = (), **fields: Any
    ) -> float:
        """The desk will be told this of a variant, now: the time."""
        now = time.monotonic()
        self._note(kind, variant=served.variant.name, now=now, requests=_numbers(batch), **fields)
        return now

    def named(self, name: str) -> list[Served]:
        """Of a task, an architecture or a variant.

        Raises:
            Unknown: there is no such one.
        """
        if name not in self.desk.named:
            variants = self.desk.variants.values()
            models = dict.fromkeys(
                name for variant in variants for name in (variant.task, variant.architecture)
            )
            raise Unknown(f"model {name!r} is unknown; accepted are {', '.join(models)} and their variants")
        return [self.groups[variant.name] for variant in self.desk.named[name]]

    async def infer(
        self, name: str, inputs: Arrays, *, requested: Sequence[str] = (), accuracy: float = 0.0,
        latency: float = math.inf, cost: float = math.inf, background: bool = False,
    ) -> tuple[str, list[tuple[TensorSpec, NDArray[Any]]]]:  # fmt: skip
        """Who answered, and the ``requested`` outputs (all, where none is). ``inputs``: as `checked` gives
        them.

        Raises:
            Unknown: no such model.
            Infeasible: no variant meets the needs.
            Unanswered: no variant could answer, or not in time.
            UserError: an output is requested twice, or there is none of that name.
        """
        first = self.named(name)[0]
        signature = first.entry.signature
        names = [output.name for output in signature.outputs]
        if len(set(map(str, requested))) < len(requested) or any(
            output_name not in names for output_name in requested
        ):
            words = f"field outputs: {str([*requested])[:200]} is not accepted;"
            words += f" use some of {', '.join(names)} once"
            raise UserError(words)
        self._number += 1
        query = Query(self._number, name, signature.items(inputs), accuracy, latency, cost, background)
        answer: asyncio.Future[Outputs] = asyncio.get_running_loop().create_future()
        request = VariantRequest(query, time.monotonic(), (inputs, answer), lengths(inputs))
        self._open.add(answer)
        self._note("arrives", query=to_plain(query), now=request.came, alike=request.kind)
        self._do(self.desk.ask(request, request.came))
        try:
            outputs = await answer
        except asyncio.CancelledError:
            self._note("leaves", request=query.id)
            self.desk.leave(request)
            raise
        finally:
            self._open.discard(answer)
        assert request.group is not None
        group = self.groups[request.group.variant.name]
        self._note("responds", request=query.id, variant=group.variant.name)
        by_name = dict(zip(names, zip(group.entry.signature.outputs, outputs, strict=True), strict=True))
        return group.variant.name, [by_name[output_name] for output_name in requested or names]

    def _do(self, effects: Iterable[Effect]) -> None:
        for effect in () if self._ending else effects:
            match effect:
                case Start(group, due):
                    self._spawn(self._load(self.groups[group.variant.name], due))
                case Stop(group):
                    here = self.groups[group.variant.name]
                    replica = here.idle.pop()
                    here.replicas.remove(replica)
                    self._note("stops", variant=here.variant.name)
                    self._threads.submit(replica.end)
                case BatchRun(group, batch):
                    here = self.groups[group.variant.name]
                    self._spawn(self._run(here, here.idle.pop(), batch))
                case RequestFailure(request, reason, refused, after):
                    if not request.work[1].done():
                        fault = Infeasible(reason) if refused else Unanswered(reason, after)
                        request.work[1].set_exception(fault)
                        after, kind = getattr(fault, "after", 0.0), type(fault).__name__
                        self._note("fails", request=request.query.id, error=kind, after=after)

    async def _load(self, served: Served, due: float) -> None:
        loop = asyncio.get_running_loop()
        replica: Replica | Remote | None = None
        self._note("loads", variant=served.variant.name, due=due)
        try:
            file, threads = served.entry.file, served.variant.threads
            replica = begun = await loop.run_in_executor(self._threads, self._start, file, threads)
            await loop.run_in_executor(self._threads, begun.loaded)
        except (Died, OSError, asyncio.CancelledError) as fault:
            if replica is not None:
                replica.end()
            why = f"a replica of {served.variant.name} does not start: {fault}"
            now = self._log_event("unloadable", served, due=due, why=why)
            self._do(self.desk.unloadable(served.group, due, why, now))
            return
        served.replicas.append(begun)
        served.idle.append(begun)
        self._do(self.desk.loaded(served.group, due, self._log_event("loaded", served, due=due)))

    async def _run(self, served: Served, replica: Replica | Remote, batch: list[VariantRequest]) -> None:
        group = served.group
        self._note("runs", variant=served.variant.name, requests=_numbers(batch))
        inputs = joined([request.work[0] for request in batch])
        try:
            outputs, seconds = await asyncio.get_running_loop().run_in_executor(
                self._threads, replica.ask, inputs
            )
        except Died:
            served.replicas.remove(replica)
            replica.end()
            words = f"{ATTEMPTS} replicas of {served.variant.name} died of it"
            self._do(self.desk.died(group, batch, words, self._log_event("died", served, batch, why=words)))
        except Failed as fault:
            served.idle.append(replica)
            now = self._log_event("refused", served, batch, why=str(fault))
            self._do(self.desk.refused(group, batch, str(fault), now))
        else:
            served.idle.append(replica)
            self.busy += seconds * served.variant.threads
            parts = parted(outputs, [request.query.items for request in batch])
            for request, part in zip(batch, parts, strict=True):
                if not request.work[1].done():
                    request.work[1].set_result(part)
            now = self._log_event("answered", served, batch, seconds=seconds)
            self._do(self.desk.answered(group, batch, seconds, now))

    async def _seconds(self) -> None:
        while True:
            began, busy = time.monotonic(), self.busy
            await asyncio.sleep(self._second)
            now = time.monotonic()
            loading = sum(
                len(group.group.loading) * group.variant.memory for group in self.groups.values()
            )  # not taken yet
            self._host.free = max(0, self._free() - loading)
            used = min(1.0, (self.busy - busy) / ((now - began) * self._host.cores))
            self._note("second", now=now, free=self._host.free, used=used)
            self._do(self.desk.second(now, {HERE: used}))


def _numbers(batch: Sequence[VariantRequest]) -> list[int]:
    return [request.query.id for request in batch]


def _free() -> int:
    return int(psutil.virtual_memory().available)
