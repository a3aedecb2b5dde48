"""What a training function sees of the job that it is part of: `Job`."""

from __future__ import annotations

import contextlib
import json
import os
import time
from collections.abc import Callable, Sequence
from operator import index
from pathlib import Path
from typing import Any, TypeVar

from windtunnel.linux.faults import InjectedError, InjectionCounts, inject
from windtunnel.training.elastic.events import unsound
from windtunnel.training.elastic.faults import LAUNCHER, POINTS, PROCESS, Fault, matches, parse
from windtunnel.training.elastic.live.link import AgentLink
from windtunnel.training.elastic.model import Membership
from windtunnel.training.elastic.policy.checkpoints import PENDING, RECORD, STORING
from windtunnel.training.elastic.policy.state import DURABLE

T = TypeVar("T")
_UNTIL_KILLED = 60.0  # seconds that an agent may take to kill this process

LARGEST = 16 << 20
"""Bytes of JSON that a value may have. It goes through the supervisor, as do all signs of life."""


class MembershipChanged(BaseException):
    """The membership changed: unwind to `run`, which calls the training function again.

    Not an `Exception`, so that an ``except Exception`` in the program does not swallow it.
    """


class Injector:
    """The job's faults, which strike at the named points that one trainer and its checkpointer pass.

    What strikes a process is done in it; what strikes a whole host its agent is asked to do. The fault has
    been told before, so the event is on its way to the supervisor before it strikes. What has struck is
    remembered in the run's folder, so that a fault strikes once in a job.
    """

    def __init__(self, texts: list[str], folder: Path, link: AgentLink) -> None:
        self._faults = [parse(text) for text in texts]
        self._counts = InjectionCounts(folder / "faults")
        self._link = link

    def at(self, point: str, step: int | None, rank: int, place: int, generation: int) -> None:
        """Strike with every fault that matches.

        Raises:
            InjectedError: a ``raise:`` did.
        """
        for number, fault in enumerate(self._faults):
            fired = self._counts.count(number)
            now = matches(fault, point, step, rank, place, generation, fired)
            if now and self._counts.claim(number, fired):
                fields = {"fault": fault.text, "place": place, "rank": rank}
                if fault.action == LAUNCHER:
                    fields |= {"place": None, "rank": None, "control": True}
                self._link.event("injected", generation, **fields)
                self._inject(fault)

    def _inject(self, fault: Fault) -> None:
        if fault.action in PROCESS or (fault.action == "kill" and fault.host is None):
            inject(fault.action, fault.text)
        else:
            self._ask_agent(fault)

    def _ask_agent(self, fault: Fault) -> None:
        self._link.call("inject", fault.action, fault.rate)
        if fault.action == "kill":
            time.sleep(_UNTIL_KILLED)
            raise InjectedError(f"{fault.text}: the agent did not do it within {_UNTIL_KILLED:g} s")


class Job:
    """One generation of the job, for one rank.

    ``rank``, ``world``, ``local_rank``: as in torch.distributed. ``place``: position of this host in the
    job, ``host``: its id. ``memory``: address of this host's memory service, None where there is no
    supervisor. ``folder``: the run's folder. ``supervised``: False in a plain torchrun or single process,
    where agreements go through torch.distributed and there is nothing to regroup.
    """

    def __init__(
        self,
        rank: int,
        world: int,
        local_rank: int,
        *,
        timeout: float,
        process_state: dict[str, Any],
        place: int = 0,
        membership: Membership | None = None,
        link: AgentLink | None = None,
        injector: Injector | None = None,
    ) -> None:
        self.rank = rank
        self.world = world
        self.local_rank = local_rank
        self.place = place
        self.membership = membership
        self.generation = membership.generation if membership else 1
        self.supervised = link is not None
        self.host = link.host if link else place
        self.memory = link.memory if link else None
        self.folder = Path(os.environ.get("WINDTUNNEL_RUN", "."))
        self.timeout = timeout
        self._process_state = process_state
        self._link = link
        self._injector = injector
        self._endings: list[Callable[[], object]] = []

    def agree(self, key: str, value: Any = None, timeout: float | None = None) -> dict[int, Any]:
        """The values that all ranks give for ``key``, by rank; a barrier, too. Values are those of JSON.

        It goes over the control plane, so it works also while the process group is cut. A ``key`` is used
        once in a generation. One that begins with "commit/" is on disk before anybody sees it decided.

        Raises:
            MembershipChanged: a newer generation came.
            TimeoutError: not all ranks came within ``timeout`` (s; the timeout of `run` by default).
            TypeError: ``value`` is not one of JSON, or larger than `LARGEST`.
        """
        value = plain(f"the value for {key!r}", value)
        if self._link is None:
            values = _gathered(value, self.world)
            if key.startswith(DURABLE):
                self._process_state.setdefault(DURABLE, {})[key] = values
            return values
        limit = self.timeout if timeout is None else timeout
        decided = self._link.agree(self.generation, key, value, limit)
        if decided is None:
            raise MembershipChanged(f"superseded while agreeing on {key!r}")
        return decided

    def decided(self, key: str) -> dict[int, Any] | None:
        """What was agreed for a "commit/…" key in this or an earlier generation, None if it was not.

        Raises:
            TimeoutError: the supervisor does not answer.
        """
        if self._link is None:
            return self._process_state.get(DURABLE, {}).get(key)
        values: dict[int, Any] | None = self._link.call("ask", key, self.timeout)
        return values

    def checkpoints(self) -> dict[str, Any] | None:
        """What the run's log says of checkpoints (values of `checkpoint.model.Log`); None where there is no
        supervisor.

        Raises:
            TimeoutError: the supervisor does not answer.
        """
        if self._link is None:
            return None
        values = self._link.call("ask", RECORD, self.timeout)
        assert values is not None
        return dict(values[0])

    def stored(self, step: int) -> str:
        """What the run's log says of a step that is to go to storage (`Checkpoints.stored`): still pending
        while nobody answers, too."""
        with contextlib.suppress(TimeoutError):
            values = self._link.call("ask", f"{STORING}{step}", self.timeout) if self._link else None
            return str(values[0]) if values is not None else PENDING
        return PENDING

    def check(self) -> None:
        """Come here now and then in long work outside the process group.

        Raises:
            MembershipChanged: a newer generation is known.
        """
        if self._link is not None and self._link.newer(self.generation):
            raise MembershipChanged("a newer generation is known")

    def keep(self, name: str, make: Callable[[], T]) -> T:
        """The object called ``name``, made by ``make`` when first asked for; it lives as long as the process.

        For what is costly and does not depend on the process group: a tokenizer, mapped data. Never a module
        wrapped in DDP or FSDP: it holds the dead group.
        """
        if name not in self._process_state:
            self._process_state[name] = make()
        return self._process_state[name]

    def at_end(self, call: Callable[[], object]) -> None:
        """Have ``call`` called when the training function has returned, before the job may end."""
        self._endings.append(call)

    def ending(self) -> None:
        """The training function has returned: what was registered for this is done, in order."""
        for call in self._endings:
            call()

    def at(self, point: str, step: int | None = None) -> None:
        """This rank passes a named point (`faults.POINTS`): the fault injector may strike here.

        Raises:
            InjectedError: it did, by an exception.
            ValueError: there is no such point.
        """
        if point not in POINTS:
            raise ValueError(f"unknown point {point!r}; known: {', '.join(POINTS)}")
        if self._injector is not None:
            self._injector.at(point, step, self.rank, self.place, self.generation)

    def step(self, step: int, **fields: Any) -> None:
        """``step`` is finished. Rank 0's ``fields`` (the loss, …; values of JSON) go into the run's events.

        Raises:
            MembershipChanged: a newer generation is known.
        """
        if self.rank == 0:
            self.event("step", **{**fields, "step": index(step)})
        self.at("step", step)
        self.check()

    def guarantee(self, doubts: Sequence[str] = (), *, any_world: bool = False) -> None:
        """Say in the run's events that a failure from now on changes no bit of the results, but for
        ``doubts`` (sentences) and for what can be seen of this process. Rank 0 says so, each reason once,
        whenever it is called.

        ``any_world``: it holds when the number of ranks changes, too.
        """
        if self.rank or self._link is None:
            return
        from windtunnel.training.elastic.live import exactness  # it needs torch

        reported: list[str] = self.keep("guarantee", list)
        new = [doubt for doubt in (*doubts, *exactness.doubts()) if doubt not in reported]
        if new or not reported:
            reported.extend(["", *new])
            self.event("guarantee", doubts=new, any_world=any_world)

    def event(self, kind: str, /, **fields: Any) -> None:
        """A line in the run's events (dropped where there is no supervisor).

        Raises:
            TypeError: a field is not a value of JSON, or too large, or not what that kind has (`events`).
        """
        fields = {"rank": self.rank, **plain(f"a field of the event {kind!r}", fields)}
        if why := unsound(kind, fields):
            raise TypeError(f"the event {kind!r}: {why}")
        if self._link is not None:
            self._link.event(kind, self.generation, **fields)


def plain(what: str, value: Any) -> Any:
    """``value`` as its reader will see it: lists for tuples, texts for the keys of objects."""
    accepted = "None, bool, int, float, str, and lists and dicts of them"
    try:
        text = json.dumps(value)
    except (TypeError, ValueError) as error:
        raise TypeError(f"{what}: {error}; accepted: {accepted}") from None
    if len(text) > LARGEST:
        raise TypeError(f"{what}: {len(text):,} bytes of JSON; accepted: {LARGEST:,}, files for more")
    return json.loads(text)


def _gathered(value: Any, world: int) -> dict[int, Any]:
    import torch.distributed as dist

    if not dist.is_initialized():
        return {0: value}
    values: list[Any] = [None] * world
    dist.all_gather_object(values, value)
    return dict(enumerate(values))
