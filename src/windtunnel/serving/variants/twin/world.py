"""Hosts, replicas and queries in emulated time.

A host is shared by what runs on it (`engines.events.SharedResource`): a batch on t threads uses t of its
cores for the seconds of its profile, longer where others want them, too; so replicas interfere. Who waits
where is the policy's `Desk`, and every decision is the policy's; what is here is how long things take, and
hosts that come and go.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import numpy as np
from numpy.typing import NDArray

from windtunnel.engines.events import Environment, SharedResource, at
from windtunnel.serving.variants.model import Query, Variant
from windtunnel.serving.variants.policy import Decision, Observation
from windtunnel.serving.variants.policy.desk import (
    BatchRun,
    Desk,
    Effect,
    Hosted,
    ReplicaGroup,
    RequestFailure,
    Start,
    VariantRequest,
)
from windtunnel.serving.variants.policy.scale import Fleet
from windtunnel.serving.variants.twin.catalogue import KINDS, Kind
from windtunnel.traces.rates import arrivals

STARTS = 30.0
"""Seconds until a host that was asked for is there."""


@dataclass(frozen=True)
class VariantsSetting:
    """``first``: shared hosts by hardware that are there at first; ``fixed``: no others come;
    ``own``: each architecture has a host of its own for its ``pinned`` variant at first, or as many as its
    ``peak`` of items a second needs; ``warm``: seconds that are not counted."""

    variants: tuple[Variant, ...]
    first: dict[str, int]
    fixed: bool = False
    pinned: dict[str, str] = field(default_factory=dict)
    own: bool = False
    peak: dict[str, float] = field(default_factory=dict)
    warm: float = 60.0


@dataclass
class VariantsOutcome:
    """Of the counted seconds: requests that came, that were answered late (or never), and that were shed;
    ``price`` of all hosts. Of all seconds: answered requests of ``background`` jobs."""

    seconds: float
    came: int = 0
    late: int = 0
    shed: int = 0
    price: float = 0.0
    latencies: list[float] = field(default_factory=list)
    background: int = 0


def queries(
    counts: NDArray[np.float64], variants: Sequence[Variant], rng: np.random.Generator, *,
    bounds: Sequence[float] = (0.1, 0.3, 1.0), skew: float = 1.0,
) -> Iterator[tuple[float, Query]]:  # fmt: skip
    """Queries and their times: architectures by Zipf's law, of each as accurate as it is in the worst
    precision."""
    times = arrivals(counts, rng)
    least: dict[str, float] = {}
    for variant in variants:
        least[variant.architecture] = min(variant.accuracy, least.get(variant.architecture, 1.0))
    names = list(least)
    weights = np.arange(1, len(names) + 1) ** -skew
    order = rng.permutation(len(names))
    chosen = order[rng.choice(len(names), len(times), p=weights / weights.sum())]
    limits = rng.choice(np.array(bounds), len(times))
    for place, (time, which, limit) in enumerate(zip(times.tolist(), chosen, limits.tolist(), strict=True)):
        name = names[which]
        yield time, Query(place, name, accuracy=least[name], latency=limit)


def simulate(
    queries: Iterable[tuple[float, Query]], seconds: float, setting: VariantsSetting,
    policy: Callable[[Observation], Decision],
) -> VariantsOutcome:  # fmt: skip
    """What became of the queries under the policy."""
    world = _World(setting, policy, seconds)
    world.env.process(world.arrive(queries))
    world.env.process(world.rounds())
    world.env.run(seconds)
    return world.ended()


@dataclass
class _Machine:
    """What a host is in emulated time: its cores, what they did until the last second, and since when it is
    paid for."""

    shared: SharedResource
    kind: Kind
    since: float
    served: float = 0.0


@dataclass
class _Pool:
    """Hosts of one hardware and owner: at first, rounds since a change, rounds of low load, on their way."""

    first: int = 0
    since: int = 10**6
    low: int = 0
    starting: int = 0


class _World:
    def __init__(
        self, setting: VariantsSetting, policy: Callable[[Observation], Any], seconds: float
    ) -> None:
        self.env, self.setting, self.policy = Environment(), setting, policy
        self.outcome = VariantsOutcome(seconds - setting.warm)
        self.desk = Desk(setting.variants, policy, pinned=setting.pinned, grows=not setting.fixed)
        self.machines: dict[str, _Machine] = {}
        self.pools: dict[tuple[str, str], _Pool] = {}
        self.count = 0
        self._begin()

    def _begin(self) -> None:
        for hardware, count in self.setting.first.items() if not self.setting.own else ():
            for _ in range(count):
                self._host(hardware, "")
            self.pools[hardware, ""] = _Pool(count, 0)
        for architecture, name in self.setting.pinned.items() if self.setting.own else ():
            variant = self.desk.variants[name]
            replicas = math.ceil(self.setting.peak.get(architecture, 0.0) / (0.7 * variant.rate)) or 1
            each = max(1, KINDS[variant.hardware].cores // variant.threads)
            hosts = math.ceil(replicas / each)
            for _ in range(hosts):
                self._filled(self._host(variant.hardware, architecture), name, min(each, replicas))
            self.pools[variant.hardware, architecture] = _Pool(hosts, 0)

    def _host(self, hardware: str, owner: str) -> Hosted:
        self.count += 1
        kind = KINDS[hardware]
        name = f"{kind.name}-{self.count}"
        hosted = Hosted(name=name, hardware=hardware, cores=kind.cores, free=kind.memory, owner=owner)
        self.desk.hosts[name] = hosted
        self.machines[name] = _Machine(SharedResource(self.env, float(kind.cores), 1.0), kind, self.env.now)
        return hosted

    def _filled(self, host: Hosted, variant: str, replicas: int) -> None:
        self._do(
            [self.desk.start(self.desk.group(variant, host.name), self.env.now) for _ in range(replicas)]
        )

    def arrive(self, queries: Iterable[tuple[float, Query]]) -> Generator[Any, Any, None]:
        for time, query in queries:
            if time > self.env.now:
                yield self.env.timeout(time - self.env.now)
            if time >= self.setting.warm and not query.background:
                self.outcome.came += 1
            self._do(self.desk.ask(VariantRequest(query, time), time))

    def _do(self, effects: Iterable[Effect]) -> None:
        for effect in effects:
            match effect:
                case Start(group, due):
                    at(self.env, due, partial(self._loaded, group, due))
                case BatchRun(group, batch):
                    self.env.process(self._run(group, batch))
                case RequestFailure(request):
                    self._missed(request, effect.shed > 0)

    def _loaded(self, group: ReplicaGroup, due: float) -> None:
        if group.host.name in self.machines:  # it may have gone meanwhile
            self._do(self.desk.loaded(group, due, self.env.now))

    def _run(self, group: ReplicaGroup, batch: list[VariantRequest]) -> Generator[Any, Any, None]:
        began, took = self.env.now, group.variant.latency(sum(member.query.items for member in batch))
        shared = self.machines[group.host.name].shared
        yield from [shared.use(took) for _ in range(group.variant.threads)]
        now = self.env.now
        for request in batch:
            if request.query.background:
                self.outcome.background += 1
                continue
            if request.came >= self.setting.warm:
                self.outcome.latencies.append(now - request.came)
            if now - request.came > request.query.latency:
                self._missed(request)
        self._do(self.desk.answered(group, batch, now - began, now))

    def _missed(self, request: VariantRequest, shed: bool = False) -> None:
        if request.came >= self.setting.warm and not request.query.background:
            self.outcome.late += not shed
            self.outcome.shed += shed

    def rounds(self) -> Generator[Any, Any, None]:
        for second in range(1, 10**9):
            yield self.env.timeout(1.0)
            used = {}
            for name, machine in self.machines.items():
                machine.shared.advance()
                used[name] = (machine.shared.served - machine.served) / machine.kind.cores
                machine.served = machine.shared.served
            self._do(self.desk.second(self.env.now, used))
            if second % 2 == 0:
                self._fleets()

    def _fleets(self) -> None:
        for hardware, owner in sorted({*self.pools, *self.desk.needs}):
            pool = self.pools.setdefault((hardware, owner), _Pool())
            hosts = tuple(
                host.observed() for host in self.desk.hosts.values()
                if (host.hardware, host.owner) == (hardware, owner)
            )  # fmt: skip
            need = (hardware, owner) in self.desk.needs
            decision = self.policy(
                Fleet(hardware, hosts, pool.first, need, pool.since, pool.low, pool.starting, owner)
            )
            changed = False
            for _ in range(0 if self.setting.fixed else decision.add):
                pool.starting += 1
                started = partial(self._started, pool, hardware, owner, self.env.now)
                at(self.env, self.env.now + STARTS, started)
                changed = True
            if decision.remove and not self._used(self.desk.hosts[decision.remove]):
                self._gone(decision.remove)
                changed = True
            pool.since, pool.low = 0 if changed else pool.since + 1, decision.low
        self.desk.needs.clear()

    def _started(self, pool: _Pool, hardware: str, owner: str, began: float) -> None:
        pool.starting -= 1
        host = self._host(hardware, owner)
        self.machines[host.name].since = began  # it is paid for from then on
        if owner:
            name = self.setting.pinned[owner]
            self._filled(host, name, max(1, host.cores // self.desk.variants[name].threads))

    def _used(self, host: Hosted) -> bool:
        return any(group.queue or group.background or group.begun for group in host.groups.values())

    def _gone(self, name: str) -> None:
        host, machine = self.desk.remove(name), self.machines.pop(name)
        begin = max(machine.since, self.setting.warm)
        self.outcome.price += max(0.0, self.env.now - begin) * machine.kind.price / 3600
        for group in host.groups.values():
            for request in group.queue:
                if self.env.now - request.came > request.query.latency:
                    self._missed(request)

    def ended(self) -> VariantsOutcome:
        for name in [*self.machines]:
            self._gone(name)
        for request in self.desk.homeless:
            self._missed(request)
        return self.outcome
