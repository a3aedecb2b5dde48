"""Queries to replicas: the policy's decisions, carried out by processes of this host.

Each accepted request has one future, which is answered once: a replica that dies gives what it was asked back
to the queue's head, and another takes it; only who outlives `ATTEMPTS` replicas fails, by name. Requests of
*background* jobs stand behind all others, and fill up batches that would run anyway.
"""

from __future__ import annotations

import asyncio
import contextlib
import math
import os
import time
from collections import deque
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import psutil
from numpy.typing import NDArray

from windtunnel.base.errors import UserError
from windtunnel.serving.variants.live.registry import Entry
from windtunnel.serving.variants.live.replica import Died, Failed, Replica, session
from windtunnel.serving.variants.model import Candidate, Held, Host, Query, Variant
from windtunnel.serving.variants.policy import POLICIES, Observation
from windtunnel.serving.variants.policy.scale import Load, Scaling
from windtunnel.serving.variants.policy.select import Asked, Batch, Chosen, Refused, Waiting
from windtunnel.serving.variants.policy.states import Now
from windtunnel.serving.variants.policy.watched import Watched
from windtunnel.store.eventlog import EventLog

ATTEMPTS = 5
HERE = "this host"
NAME = "serving.variants"
TYPES = {
    "tensor(float)": "FP32", "tensor(double)": "FP64", "tensor(float16)": "FP16", "tensor(int64)": "INT64",
    "tensor(int32)": "INT32", "tensor(uint8)": "UINT8", "tensor(int8)": "INT8", "tensor(bool)": "BOOL",
}  # fmt: skip
"""ONNX Runtime's names of types, and the protocol's."""


class Unknown(UserError):
    """No such task, architecture or variant."""


class Infeasible(UserError):
    """No variant does what is asked."""


class Unanswered(Exception):
    """Accepted, and not answered: replicas died of it or refused it."""


@dataclass(frozen=True)
class Tensor:
    """``shape``: -1 where it may be any number."""

    name: str
    datatype: str
    shape: tuple[int, ...]


@dataclass
class _Request:
    query: Query
    inputs: NDArray[Any]
    came: float
    answer: asyncio.Future[NDArray[Any]]
    background: bool
    attempts: int = 0
    alone: bool = False


@dataclass
class _Group(Watched):
    entry: Entry
    inputs: Tensor
    outputs: Tensor
    replicas: list[Replica] = field(default_factory=list)
    idle: list[Replica] = field(default_factory=list)
    loading: list[float] = field(default_factory=list)
    queue: deque[_Request] = field(default_factory=deque)
    answered: int = 0
    requeued: int = 0

    @property
    def variant(self) -> Variant:
        return self.entry.variant

    @property
    def count(self) -> int:
        return len(self.replicas) + len(self.loading)

    @property
    def items(self) -> int:
        return sum(len(one.inputs) for one in self.queue if not one.background)

    def held(self, now: float, used: int) -> tuple[Held, ...]:
        if not self.count:
            return ()
        made = self.as_held(
            self.variant, HERE, ready=len(self.replicas), idle=len(self.idle), waiting=self.items,
            loading=self.loading, now=now, crowd=(used + self.variant.threads) / (os.cpu_count() or 1),
        )  # fmt: skip
        return (made,)


class Service:
    """Used with ``async with``. ``pinned``: by architecture the variant that the baselines use."""

    def __init__(
        self, entries: Sequence[Entry], *, policy: str = "infaas", log: EventLog | None = None,
        pinned: dict[str, str] | None = None,
    ) -> None:  # fmt: skip
        if policy not in POLICIES:
            raise UserError(
                f"variants serve: --policy {policy!r} is unknown; accepted are {', '.join(POLICIES)}"
            )
        self.policy, self._log, self._pinned = policy, log, pinned or {}
        described = {one.file: _described(one) for one in entries}
        self.groups = {one.variant.name: _Group(one, *described[one.file]) for one in entries}
        self._recent: dict[tuple[object, ...], tuple[str, ...]] = {}
        self._threads = ThreadPoolExecutor(64)
        self._tasks: set[asyncio.Task[None]] = set()
        self.busy = 0.0  # core-seconds of all batches
        self._utilisation = 0.0
        self._number = 0
        self._ending = False

    async def __aenter__(self) -> Service:
        self._spawn(self._rounds())
        return self

    async def __aexit__(self, *_: object) -> None:
        self._ending = True
        for task in self._tasks:
            task.cancel()
        for group in self.groups.values():
            for one in group.replicas:
                one.end()
            for request in group.queue:
                request.answer.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        self._threads.shutdown(wait=False)

    def _spawn(self, work: Any) -> None:
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    def _decide(self, seen: Observation) -> Any:
        made = POLICIES[self.policy](seen)
        if self._log is not None:
            self._log.decision(NAME, self.policy, seen, made)
        return made

    def named(self, name: str) -> list[_Group]:
        """Of a task, an architecture or a variant.

        Raises:
            Unknown: there is no such one.
        """
        found = [
            one for one in self.groups.values()
            if name in (one.variant.name, one.variant.architecture, one.variant.task)
        ]  # fmt: skip
        if not found:
            known = dict.fromkeys(
                name for one in self.groups.values() for name in (one.variant.task, one.variant.architecture)
            )
            raise Unknown(f"model {name!r} is unknown; accepted are {', '.join(known)} and their variants")
        return found

    async def infer(
        self, name: str, inputs: NDArray[Any], *, accuracy: float = 0.0, latency: float = math.inf,
        cost: float = math.inf, background: bool = False,
    ) -> tuple[str, NDArray[Any]]:  # fmt: skip
        """Who answered, and what.

        Raises:
            Unknown: no such model. Infeasible: none does what is asked. Unanswered: none could.
            UserError: the inputs are of another shape or type.
        """
        groups = self.named(name)
        _fitting(groups[0].inputs, inputs)
        self._number += 1
        variant = groups[0].variant
        task = name if name == variant.task else ""
        architecture = name if not task and name == variant.architecture else ""
        query = Query(
            self._number, task, architecture, "" if task or architecture else name, len(inputs), accuracy,
            latency, cost,
        )  # fmt: skip
        chosen = self._choose(query, groups)
        answer: asyncio.Future[NDArray[Any]] = asyncio.get_running_loop().create_future()
        self._queue(
            self.groups[chosen.variant], _Request(query, inputs, time.monotonic(), answer, background)
        )
        return chosen.variant, await answer

    def _choose(self, query: Query, groups: list[_Group]) -> Chosen:
        now = time.monotonic()
        key = (query.task, query.architecture, query.variant, query.accuracy, query.latency)
        recent = self._recent.get(key, ())
        used = sum(one.variant.threads * (len(one.replicas) - len(one.idle)) for one in self.groups.values())
        candidates = tuple(Candidate(one.variant, one.held(now, used)) for one in groups)
        pinned = self._pinned.get(groups[0].variant.architecture, "")
        made = self._decide(Asked(query, candidates, (self._host(),), recent, pinned))
        if isinstance(made, Refused):
            raise Infeasible(made.reason)
        group = self.groups[made.variant]
        if made.load or not group.count:  # a host that is full answers late rather than never
            self._load(group)
        group.late += query.items * made.need
        self._recent[key] = (made.variant, *(one for one in recent if one != made.variant))[:4]
        return made  # type: ignore[no-any-return]

    def _host(self) -> Host:
        used = sum(one.count * one.variant.memory for one in self.groups.values() if one.loading)
        free = max(0, psutil.virtual_memory().available - used)
        return Host(HERE, "cpu", os.cpu_count() or 1, free, self._utilisation)

    def _queue(self, group: _Group, request: _Request) -> None:
        group.came += len(request.inputs)
        if not request.background:
            query = request.query
            group.asked(query)
        group.queue.append(request)
        self._dispatch(group)

    def _load(self, group: _Group) -> None:
        due = time.monotonic() + group.variant.load
        group.loading.append(due)
        self._spawn(self._loaded(group, due))

    async def _loaded(self, group: _Group, due: float) -> None:
        loop = asyncio.get_running_loop()
        made: Replica | None = None
        try:
            made = await loop.run_in_executor(self._threads, Replica, group.entry.file, group.variant.threads)
            await loop.run_in_executor(self._threads, made.loaded)
        except (Died, OSError, asyncio.CancelledError) as fault:
            if made is not None:
                made.end()
            group.loading.remove(due)
            self._give_up(group, f"a replica of {group.variant.name} does not start: {fault}")
            return
        group.loading.remove(due)
        group.replicas.append(made)
        group.idle.append(made)
        group.state = "active" if group.state == "inactive" else group.state
        self._dispatch(group)

    def _give_up(self, group: _Group, words: str) -> None:
        """Who waits where nothing will come has waited for one replica in vain; some attempts are made."""
        for one in [*group.queue] if not group.count and not self._ending else ():
            one.attempts += 1
            if one.attempts >= ATTEMPTS:
                group.queue.remove(one)
                one.answer.set_exception(Unanswered(words))
        if group.queue and not group.count and not self._ending:
            self._load(group)

    def _dispatch(self, group: _Group) -> None:
        while group.idle and (batch := self._batch(group)):
            replica = group.idle.pop()
            group.running += sum(len(one.inputs) for one in batch)
            self._spawn(self._run(group, replica, batch))

    def _batch(self, group: _Group) -> list[_Request]:
        """The next ones, online before background; those whose client went are left out."""
        waiting = [one for one in group.queue if not one.answer.done()]
        if len(waiting) < len(group.queue):
            group.queue = deque(waiting)
        if not waiting:
            return []
        waiting.sort(key=lambda one: one.background)
        first = waiting[: 1 if waiting[0].alone else group.variant.batch]
        now = time.monotonic()
        slack = tuple(
            min(1e9, one.came + one.query.latency - now) if not one.background else 1e9 for one in first
        )
        made: Batch = self._decide(Waiting(group.variant, tuple(len(one.inputs) for one in first), slack))
        for one in first[: made.requests]:
            group.queue.remove(one)
        return first[: made.requests]

    async def _run(self, group: _Group, replica: Replica, batch: list[_Request]) -> None:
        inputs = np.concatenate([one.inputs for one in batch]) if len(batch) > 1 else batch[0].inputs
        loop = asyncio.get_running_loop()
        try:
            made, seconds = await loop.run_in_executor(self._threads, replica.ask, inputs)
        except Died:
            self._lost(group, replica, batch)
        except Failed as fault:
            self._again(group, batch, str(fault))
            group.idle.append(replica)
        else:
            self.busy += seconds * group.variant.threads
            group.batches.append((len(inputs), seconds))
            place = 0
            for one in batch:
                if not one.answer.done():
                    one.answer.set_result(made[place : place + len(one.inputs)])
                place += len(one.inputs)
            group.answered += len(batch)
            if replica in group.replicas:
                group.idle.append(replica)
            else:  # it is no more wanted
                await loop.run_in_executor(self._threads, replica.end)
        finally:
            group.running -= len(inputs)
        if not self._ending:
            self._dispatch(group)

    def _lost(self, group: _Group, replica: Replica, batch: list[_Request]) -> None:
        if replica in group.replicas:
            group.replicas.remove(replica)
        if self._ending:
            return
        replica.end()
        group.requeued += len(batch)
        self._again(group, batch, f"{ATTEMPTS} replicas of {group.variant.name} died of it", alone=False)
        if group.queue and not group.count:
            self._load(group)

    def _again(self, group: _Group, batch: list[_Request], words: str, alone: bool = True) -> None:
        """Each by itself where one of several was refused, so that nobody fails for another's inputs."""
        for one in reversed(batch):
            one.attempts += 1
            if (alone and len(batch) == 1) or one.attempts >= ATTEMPTS:
                if not one.answer.done():
                    one.answer.set_exception(Unanswered(words))
            else:
                one.alone = alone or one.attempts > 1
                group.queue.appendleft(one)

    async def _rounds(self) -> None:
        while True:
            began, busy = time.monotonic(), self.busy
            await asyncio.sleep(1.0)
            spent = (time.monotonic() - began) * (os.cpu_count() or 1)
            self._utilisation = min(1.0, (self.busy - busy) / spent)
            self._look()

    def _look(self) -> None:
        running: dict[str, list[_Group]] = {}
        for group in self.groups.values():
            if not group.count and group.state == "inactive":
                continue
            seen = group.second(group.variant, len(group.replicas), group.items)
            now: Now = self._decide(seen)
            group.state = now.state
            if group.count:
                running.setdefault(group.variant.architecture, []).append(group)
        for architecture, groups in running.items():
            self._scale(architecture, groups)
        for group in self.groups.values():
            group.forget()

    def _scale(self, architecture: str, groups: list[_Group]) -> None:
        others = tuple(
            one.variant for one in self.groups.values()
            if one.variant.architecture == architecture and not one.count
        )  # fmt: skip
        seen = tuple(one.as_running(one.variant, one.count) for one in groups)
        made: Scaling = self._decide(Load(self._host(), seen, others))
        for group, votes in zip(groups, made.votes, strict=True):
            group.votes = votes
        for change in made.changes:
            group = self.groups[change.variant]
            for _ in range(change.replicas):
                self._load(group)
            for _ in range(-change.replicas):
                if group.idle and not (len(group.replicas) == 1 and group.queue):
                    replica = group.idle.pop()
                    group.replicas.remove(replica)
                    self._threads.submit(replica.end)

    def pids(self) -> list[int]:
        """Of the replicas that live."""
        return [
            pid for group in self.groups.values() for one in group.replicas
            if one.process.is_alive() and (pid := one.process.pid) is not None
        ]  # fmt: skip


def _described(entry: Entry) -> tuple[Tensor, Tensor]:
    loaded = session(entry.file, 1)
    first, last = loaded.get_inputs()[0], loaded.get_outputs()[0]

    def tensor(one: Any) -> Tensor:
        shape = (-1, *(size if isinstance(size, int) else -1 for size in one.shape[1:]))
        return Tensor(one.name, TYPES.get(one.type, one.type), shape)

    return tensor(first), tensor(last)


def _fitting(wanted: Tensor, inputs: NDArray[Any]) -> None:
    fits = inputs.ndim == len(wanted.shape) and len(inputs) > 0
    with contextlib.suppress(ValueError):
        fits = fits and all(size in (-1, has) for size, has in zip(wanted.shape, inputs.shape, strict=True))
    if not fits:
        raise UserError(f"input shape {list(inputs.shape)} is not accepted; use {list(wanted.shape)}")
