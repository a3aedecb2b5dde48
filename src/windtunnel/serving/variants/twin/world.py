"""Hosts, replicas and queries in emulated time.

A host is shared by what runs on it (`engines.events.Shared`): a batch on t threads uses t of its cores for
the seconds of its profile, longer where others want them, too; so replicas interfere. Requests wait in one
queue for each variant and host. Every decision is the policy's; what is here is what follows from it.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Generator, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import numpy as np
from numpy.typing import NDArray

from windtunnel.engines.events import Environment, Shared, at
from windtunnel.serving.variants.model import Candidate, Held, Host, Query, Variant
from windtunnel.serving.variants.policy import Decision, Observation
from windtunnel.serving.variants.policy.scale import Change, Fleet, Load, Resize, Scaling
from windtunnel.serving.variants.policy.select import Asked, Batch, Chosen, Waiting
from windtunnel.serving.variants.policy.states import Now
from windtunnel.serving.variants.policy.watched import Watched
from windtunnel.serving.variants.twin.catalogue import KINDS
from windtunnel.traces.rates import arrivals

STARTS = 30.0
"""Seconds until a host that was asked for is there."""
RECENT = 4


@dataclass(frozen=True)
class Setting:
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
class Outcome:
    """Of the counted seconds: requests that came, that were late (or never answered), and that no variant can
    do; ``price`` of all hosts; ``changes`` of replicas and of hosts."""

    seconds: float
    came: int = 0
    late: int = 0
    refused: int = 0
    price: float = 0.0
    latencies: list[float] = field(default_factory=list)
    changes: int = 0
    hosts: int = 0


def queries(
    counts: NDArray[np.float64], variants: Sequence[Variant], rng: np.random.Generator, *,
    bounds: Sequence[float] = (0.1, 0.3, 1.0), skew: float = 1.0, by: str = "architecture",
) -> Iterator[tuple[float, Query]]:  # fmt: skip
    """Queries and their times: architectures by Zipf's law, of each as accurate as it is in the worst
    precision; ``by`` task: whatever else is as accurate does, too."""
    times = arrivals(counts, rng)
    least: dict[str, float] = {}
    for one in variants:
        least[one.architecture] = min(one.accuracy, least.get(one.architecture, 1.0))
    names = list(least)
    weights = np.arange(1, len(names) + 1) ** -skew
    order = rng.permutation(len(names))
    chosen = order[rng.choice(len(names), len(times), p=weights / weights.sum())]
    limits = rng.choice(np.array(bounds), len(times))
    for place, (time, which, limit) in enumerate(zip(times.tolist(), chosen, limits.tolist(), strict=True)):
        name = names[which]
        asked = {"architecture": name} if by == "architecture" else {"task": variants[0].task}
        yield time, Query(place, **asked, accuracy=least[name], latency=limit)  # type: ignore[arg-type]


@dataclass
class _Request:
    query: Query
    came: float


@dataclass
class _Group(Watched):
    """A variant on a host."""

    variant: Variant
    host: _Host
    ready: int = 0
    loading: list[float] = field(default_factory=list)
    busy: int = 0
    queue: deque[_Request] = field(default_factory=deque)
    items: int = 0

    @property
    def replicas(self) -> int:
        return self.ready + len(self.loading)

    def held(self, now: float) -> Held:
        return self.as_held(
            self.variant, self.host.name, ready=self.ready, idle=self.ready - self.busy, waiting=self.items,
            loading=self.loading, now=now,
            crowd=(self.host.shared.present + self.variant.threads) / self.host.kind.cores,
        )  # fmt: skip


class _Host:
    def __init__(self, env: Environment, name: str, hardware: str, owner: str) -> None:
        kind = KINDS[hardware]
        self.name, self.kind, self.owner = name, kind, owner
        self.shared = Shared(env, float(kind.cores), 1.0)
        self.groups: dict[str, _Group] = {}
        self.used = self.utilisation = 0.0
        self.free = kind.memory
        self.since = env.now

    def seen(self) -> Host:
        kind = self.kind
        return Host(self.name, kind.hardware, kind.cores, self.free, self.utilisation, self.owner)


def simulate(
    asked: Iterator[tuple[float, Query]], seconds: float, setting: Setting,
    policy: Callable[[Observation], Decision],
) -> Outcome:  # fmt: skip
    """What became of the queries under the policy."""
    world = _World(setting, policy, seconds)
    world.env.process(world.arrive(asked))
    world.env.process(world.rounds())
    world.env.run(seconds)
    return world.ended()


class _World:
    def __init__(self, setting: Setting, policy: Callable[[Observation], Any], seconds: float) -> None:
        self.env, self.setting, self.policy = Environment(), setting, policy
        self.variants = {one.name: one for one in setting.variants}
        self.outcome = Outcome(seconds - setting.warm)
        self.hosts: dict[str, _Host] = {}
        self.starting: dict[tuple[str, str], int] = {}
        self.needs: set[tuple[str, str]] = set()
        self.pools: dict[tuple[str, str], tuple[int, int, int]] = {}
        """Hosts at first, rounds since a change, and of low load, by hardware and owner."""
        self.recent: dict[tuple[str, str, float, float], tuple[str, ...]] = {}
        self.by_name: dict[str, list[Variant]] = {}
        for one in setting.variants:
            self.by_name.setdefault(one.architecture, []).append(one)
            self.by_name.setdefault(one.task, []).append(one)
        self.where: dict[str, dict[str, _Group]] = {name: {} for name in self.variants}
        self.homeless: list[_Request] = []
        self.count = 0
        self._begin()

    def _begin(self) -> None:
        for hardware, count in self.setting.first.items() if not self.setting.own else ():
            for _ in range(count):
                self._host(hardware, "")
            self.pools[hardware, ""] = (count, 0, 0)
        for architecture, name in self.setting.pinned.items() if self.setting.own else ():
            variant = self.variants[name]
            kind = KINDS[variant.hardware]
            wanted = math.ceil(self.setting.peak.get(architecture, 0.0) / (0.7 * variant.rate)) or 1
            each = max(1, kind.cores // variant.threads)
            hosts = math.ceil(wanted / each)
            for _ in range(hosts):
                host = self._host(variant.hardware, architecture)
                for _ in range(min(each, wanted)):
                    self._load(variant, host, 0.0)
            self.pools[variant.hardware, architecture] = (hosts, 0, 0)

    def _host(self, hardware: str, owner: str) -> _Host:
        self.count += 1
        made = _Host(self.env, f"{KINDS[hardware].name}-{self.count}", hardware, owner)
        self.hosts[made.name] = made
        self.outcome.hosts = max(self.outcome.hosts, len(self.hosts))
        return made

    def _load(self, variant: Variant, host: _Host, seconds: float) -> None:
        group = host.groups.get(variant.name)
        if group is None:
            group = host.groups[variant.name] = self.where[variant.name][host.name] = _Group(variant, host)
        due = self.env.now + seconds
        group.loading.append(due)
        host.free -= variant.memory

        def loaded() -> None:
            if due in group.loading:  # it may have been given up
                group.loading.remove(due)
                group.ready += 1
                group.state = "active" if group.state == "inactive" else group.state
                self._dispatch(group)

        at(self.env, due, loaded)

    def arrive(self, asked: Iterator[tuple[float, Query]]) -> Generator[Any, Any, None]:
        for time, query in asked:
            if time > self.env.now:
                yield self.env.timeout(time - self.env.now)
            if time >= self.setting.warm:
                self.outcome.came += 1
            self._ask(_Request(query, time))

    def _ask(self, request: _Request) -> None:
        query, now = request.query, self.env.now
        names = self.by_name[query.architecture or query.task]
        candidates = tuple(
            Candidate(
                one, tuple(group.held(now) for group in self.where[one.name].values() if group.replicas)
            )
            for one in names
        )
        key = (query.architecture, query.task, query.accuracy, query.latency)
        recent = self.recent.get(key, ())
        hosts = tuple(one.seen() for one in self.hosts.values())
        pinned = self.setting.pinned.get(query.architecture, "")
        made = self.policy(Asked(query, candidates, hosts, recent, pinned))
        if not isinstance(made, Chosen):
            self._late(request, refused=True)
            return
        if made.need:
            self.needs.add((made.hardware, made.owner))
        if not made.host:
            self.homeless.append(request)
            return
        if made.load:
            self._load(self.variants[made.variant], self.hosts[made.host], self.variants[made.variant].load)
        self.recent[key] = (made.variant, *(one for one in recent if one != made.variant))[:RECENT]
        group = self.hosts[made.host].groups[made.variant]
        group.queue.append(request)
        group.items += query.items
        group.came += query.items
        group.late += query.items * made.need
        group.asked(query)
        self._dispatch(group)

    def _dispatch(self, group: _Group) -> None:
        while group.queue and group.busy < group.ready:
            first = [group.queue[place] for place in range(min(len(group.queue), group.variant.batch))]
            slack = tuple(one.came + one.query.latency - self.env.now for one in first)
            made = self.policy(Waiting(group.variant, tuple(one.query.items for one in first), slack))
            assert isinstance(made, Batch)
            batch = [group.queue.popleft() for _ in range(made.requests)]
            group.busy += 1
            self.env.process(self._run(group, batch))

    def _run(self, group: _Group, batch: list[_Request]) -> Generator[Any, Any, None]:
        items = sum(one.query.items for one in batch)
        group.items -= items
        group.running += items
        began, took = self.env.now, group.variant.latency(items)
        yield from [group.host.shared.use(took) for _ in range(group.variant.threads)]
        now = self.env.now
        group.busy -= 1
        group.running -= items
        group.batches.append((items, now - began))
        for one in batch:
            if one.came >= self.setting.warm:
                self.outcome.latencies.append(now - one.came)
            if now - one.came > one.query.latency:
                self._late(one)
        self._dispatch(group)

    def _late(self, request: _Request, refused: bool = False) -> None:
        if request.came >= self.setting.warm:
            self.outcome.late += 1
            self.outcome.refused += refused

    def rounds(self) -> Generator[Any, Any, None]:
        for second in range(1, 10**9):
            yield self.env.timeout(1.0)
            for host in [*self.hosts.values()]:
                host.shared._advance()
                served, host.used = host.shared.served - host.used, host.shared.served
                host.utilisation = served / host.kind.cores
                self._look(host)
            waiting, self.homeless = self.homeless, []
            for one in waiting:
                self._ask(one)
            if second % 2 == 0:
                self._fleets()

    def _look(self, host: _Host) -> None:
        architectures: dict[str, list[_Group]] = {}
        for group in host.groups.values():
            measured = group.second(group.variant, group.ready, group.items)
            made = self.policy(measured)
            assert isinstance(made, Now)
            group.state = made.state
            if group.replicas:
                architectures.setdefault(group.variant.architecture, []).append(group)
        for architecture, groups in architectures.items():
            self._scale(host, architecture, groups)
        for group in host.groups.values():
            group.forget()

    def _scale(self, host: _Host, architecture: str, groups: list[_Group]) -> None:
        here = {one.variant.name for one in groups}
        others = tuple(
            one for one in self.by_name[architecture]
            if one.hardware == host.kind.hardware and one.name not in here
        )  # fmt: skip
        running = tuple(one.as_running(one.variant, one.replicas) for one in groups)
        elsewhere = tuple(
            one.seen() for one in self.hosts.values()
            if one is not host and (one.kind, one.owner) == (host.kind, host.owner)
        )  # fmt: skip
        made = self.policy(Load(host.seen(), running, others, elsewhere))
        assert isinstance(made, Scaling)
        for group, votes in zip(groups, made.votes, strict=True):
            group.votes = votes
        if made.need:
            self.needs.add((host.kind.hardware, host.owner))
        for change in made.changes:
            self._change(self.hosts.get(change.host, host), change)

    def _change(self, host: _Host, change: Change) -> None:
        self.outcome.changes += 1
        variant = self.variants[change.variant]
        for _ in range(change.replicas):
            self._load(variant, host, variant.load)
        for _ in range(-change.replicas):
            group = host.groups[change.variant]
            if group.loading:
                group.loading.remove(max(group.loading))
            elif group.ready > 1 or not (group.queue or group.busy):
                group.ready -= 1
            else:
                continue
            host.free += variant.memory

    def _fleets(self) -> None:
        for pool in {*self.pools, *self.needs}:
            hardware, owner = pool
            first, since, low = self.pools.get(pool, (0, 10**6, 0))
            hosts = tuple(
                one.seen() for one in self.hosts.values()
                if (one.kind.hardware, one.owner) == pool
            )  # fmt: skip
            starting = self.starting.get(pool, 0)
            made = self.policy(Fleet(hardware, hosts, first, pool in self.needs, since, low, starting, owner))
            assert isinstance(made, Resize)
            changed = False
            for _ in range(0 if self.setting.fixed else made.add):
                self.starting[pool] = self.starting.get(pool, 0) + 1
                at(self.env, self.env.now + STARTS, partial(self._started, pool, self.env.now))
                changed = True
            if made.remove and self._empty(self.hosts[made.remove]):
                self._gone(self.hosts.pop(made.remove))
                changed = True
            self.outcome.changes += changed
            self.pools[pool] = (first, 0 if changed else since + 1, made.low)
        self.needs.clear()

    def _started(self, pool: tuple[str, str], began: float) -> None:
        self.starting[pool] -= 1
        host = self._host(*pool)
        host.since = began  # it is paid for from then on
        if pool[1]:
            variant = self.variants[self.setting.pinned[pool[1]]]
            for _ in range(max(1, host.kind.cores // variant.threads)):
                self._load(variant, host, variant.load)

    def _empty(self, host: _Host) -> bool:
        return not any(one.queue or one.busy for one in host.groups.values())

    def _gone(self, host: _Host) -> None:
        for name in host.groups:
            del self.where[name][host.name]
        begin = max(host.since, self.setting.warm)
        self.outcome.price += max(0.0, self.env.now - begin) * host.kind.price / 3600

    def ended(self) -> Outcome:
        for host in self.hosts.values():
            self._gone(host)
            for group in host.groups.values():
                for one in group.queue:
                    if self.env.now - one.came > one.query.latency:
                        self._late(one)
        for one in self.homeless:
            self._late(one)
        return self.outcome


def pin(variants: Sequence[Variant], bound: float, accuracy: float) -> dict[str, str]:
    """For each architecture what its owner would deploy who may have one variant: the cheapest host that
    answers within the bound, and the variant that does most on it; the fastest where none does."""
    chosen = {}
    for name in dict.fromkeys(one.architecture for one in variants):
        mine = [one for one in variants if one.architecture == name and one.accuracy >= accuracy]
        fit = [one for one in mine if one.latency() <= bound] or [min(mine, key=lambda one: one.latency())]
        chosen[name] = min(fit, key=lambda one: (KINDS[one.hardware].price, -one.rate)).name
    return chosen
