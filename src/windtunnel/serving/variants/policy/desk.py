"""Hosts, groups of replicas, and who waits for them: what live and twin both do between two decisions.

A *group* is the replicas of a variant on a host, with a queue of requests and one of background jobs. The
`Desk` is told what happens and when, asks the policy, and answers what is to be done: replicas to `Start` and
to `Stop`, batches to `BatchRun`, requests to `RequestFailure`. Whoever does that, with processes or in
emulated time, tells it what came of it. A request is in one queue, in one batch under way, or has its one
end: a replica that dies gives what it was asked back to the queue's head; only who outlives `ATTEMPTS`
replicas fails.

Background jobs (INFaaS's offline ones) are done with what is left over: a batch of them begins where no
request waits and, unless the host does nothing, on cores that nobody uses. So a request waits for the one
that is under way, at most. They count in no rate, and so bring no replicas and hosts beyond a first.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import islice, takewhile
from math import inf
from typing import Any

from windtunnel.serving.variants.model import (
    HostReplicas,
    Query,
    ReplicaHost,
    State,
    Variant,
    VariantCandidate,
)
from windtunnel.serving.variants.policy.scale import Load, Measured, Running, bounds
from windtunnel.serving.variants.policy.select import Batch, QueryRefused, VariantQuery, Waiting, wait_of

ATTEMPTS = 5
RECENT = 4
"""Variants that are kept of those that answered queries of a kind, of which there are `KINDS` at most."""
KINDS = 4096
STUCK = 0.5
"""Seconds that a batch is under way at least before it counts as slow, if it is beyond the bound, too."""


@dataclass(eq=False, slots=True)
class VariantRequest:
    """``work``: whatever its caller keeps with it; ``kind``: only those of one kind go in one batch;
    ``group``: where it was put last; ``alone``: its batch has no other."""

    query: Query
    came: float
    work: Any = None
    kind: Any = None
    group: ReplicaGroup | None = None
    attempts: int = 0
    alone: bool = False


@dataclass(frozen=True, slots=True)
class Start:
    """Load a replica, which should be ready at ``due``."""

    group: ReplicaGroup
    due: float


@dataclass(frozen=True, slots=True)
class Stop:
    """End one that does nothing."""

    group: ReplicaGroup


@dataclass(frozen=True, slots=True)
class BatchRun:
    """Have a replica that does nothing answer these."""

    group: ReplicaGroup
    batch: list[VariantRequest]


@dataclass(frozen=True, slots=True)
class RequestFailure:
    """``refused``: no variant does what is asked; ``shed``: it would be late, seconds to ask again after."""

    request: VariantRequest
    reason: str
    refused: bool = False
    shed: float = 0.0


Effect = Start | Stop | BatchRun | RequestFailure


@dataclass(eq=False, kw_only=True)
class Hosted:
    """A host and its groups, by variant. ``used``: cores that batches run on; ``background``: requests of
    background jobs that wait here."""

    name: str
    hardware: str
    cores: int
    free: int
    owner: str = ""
    utilisation: float = 0.0
    used: int = 0
    background: int = 0
    groups: dict[str, ReplicaGroup] = field(default_factory=dict)

    def observed(self) -> ReplicaHost:
        return ReplicaHost(self.name, self.hardware, self.cores, self.free, self.utilisation, self.owner)


@dataclass(eq=False)
class ReplicaGroup:
    """``loading``: when each replica that is on its way should be ready. ``waiting``: items of requests;
    ``begun``: each batch under way, and since when. Of this second: ``came`` and ``late`` (sent here though
    it would be late), items; ``batches``: (items, seconds) of those that ended; ``hardest``: the least
    latency and the greatest accuracy asked for. ``rate``: items a second, averaged over seconds; ``slow``:
    what the quickest batch of the last second took, in times of the profile; ``stuck``: batches that were
    under way for too long when it ended. Ever: ``answered`` requests, of them those that ``missed`` their
    latency, and ``requeued`` ones."""

    variant: Variant
    host: Hosted
    state: State = "inactive"
    ready: int = 0
    loading: list[float] = field(default_factory=list)
    queue: deque[VariantRequest] = field(default_factory=deque)
    background: deque[VariantRequest] = field(default_factory=deque)
    waiting: int = 0
    votes: int = 0
    came: int = 0
    late: int = 0
    rate: float = 0.0
    slow: float = 1.0
    stuck: int = 0
    batches: list[tuple[int, float]] = field(default_factory=list)
    hardest: tuple[float, float] = (inf, 0.0)
    begun: dict[int, tuple[list[VariantRequest], float]] = field(default_factory=dict)
    answered: int = 0
    missed: int = 0
    requeued: int = 0

    @property
    def count(self) -> int:
        """Replicas, with those that load."""
        return self.ready + len(self.loading)

    @property
    def idle(self) -> int:
        return self.ready - len(self.begun)

    @property
    def behind(self) -> int:
        """Items that lack a replica: sent here in this second though they would be late; all that wait, where
        every replica hangs and none is on its way."""
        hung = self.stuck >= self.ready and not self.loading
        return max(self.late, self.waiting if hung else 0)

    def put(self, request: VariantRequest, first: bool = False) -> None:
        queue = self.background if request.query.background else self.queue
        queue.appendleft(request) if first else queue.append(request)
        self._counted(request, 1)

    def _counted(self, request: VariantRequest, sign: int) -> None:
        if request.query.background:
            self.host.background += sign
        else:
            self.waiting += sign * request.query.items

    def take(self, request: VariantRequest) -> None:
        """Out of its queue, where it is in it."""
        queue = self.background if request.query.background else self.queue
        if request in queue:  # mostly the first
            queue.remove(request)
            self._counted(request, -1)

    def observed(self, now: float) -> HostReplicas:
        """As selection sees it."""
        variant, slow = self.variant, self.taking()
        due = self.loading if not self.ready else [
            at + variant.latency(_items(batch)) * slow for batch, at in self.begun.values()
        ]  # fmt: skip
        free = [0.0] * self.idle + sorted(max(0.0, moment - now) for moment in due)
        wait = wait_of(variant, self.waiting, free, slow)
        state = "active" if self.state == "inactive" else self.state
        return HostReplicas(
            self.host.name, state, self.count, self.rate, wait, slow, len(self.background),
            self.waiting % variant.batch,
        )  # fmt: skip

    def taking(self) -> float:
        """What a batch will take, in times of the profile: by those of late, and by what runs on the host."""
        used = self.host.used + (self.variant.threads if self.idle else 0)
        return max(1.0, self.slow, used / self.host.cores)

    def measured(self, now: float) -> Measured:
        """What the second was like, taken into the averages; a replica that hangs ends no batch, so those
        that are under way for far too long count with the time that they took until now."""
        variant = self.variant
        bound = bounds(variant, self.ready).latency
        stuck = [
            (_items(batch), now - at) for batch, at in self.begun.values()
            if now - at > max(STUCK, bound * variant.latency(_items(batch)))
        ]  # fmt: skip
        self.stuck = len(stuck)
        self.batches += stuck
        count = max(1, len(self.batches))
        items = sum(items_of_batch for items_of_batch, _ in self.batches) / count
        took = sum(seconds for _, seconds in self.batches) / count
        self.rate = 0.5 * self.rate + 0.5 * self.came
        if self.batches:  # the quickest: what held the others up is often over, and nobody is shed for that
            self.slow = min(
                seconds / variant.latency(items_of_batch) for items_of_batch, seconds in self.batches
            )
        elif not self.begun:  # nobody is shed for long for what was once
            self.slow = 0.5 * self.slow + 0.5
        running = sum(_items(batch) for batch, _ in self.begun.values() if not batch[0].query.background)
        return Measured(
            variant, self.state, self.ready, float(self.came), took, max(1.0, items), self.waiting + running,
            self.stuck,
        )  # fmt: skip

    def forget(self) -> None:
        """The second is over."""
        self.came, self.late, self.batches, self.hardest = 0, 0, [], (inf, 0.0)


class Desk:
    """``pinned``: by architecture the variant that the baselines use; ``grows``: hosts may come."""

    def __init__(
        self, variants: Sequence[Variant], decide: Callable[[Any], Any], *,
        pinned: Mapping[str, str] | None = None, grows: bool = True,
    ) -> None:  # fmt: skip
        self._decide, self._pinned, self._grows = decide, pinned or {}, grows
        self.variants = {entry.name: entry for entry in variants}
        self.named: dict[str, list[Variant]] = {}
        """By task, architecture and name."""
        for variant in variants:
            for name in dict.fromkeys((variant.name, variant.architecture, variant.task)):
                self.named.setdefault(name, []).append(variant)
        self.hosts: dict[str, Hosted] = {}
        self.needs: set[tuple[str, str]] = set()
        """Hardware and owner of hosts that would help."""
        self.homeless: list[VariantRequest] = []
        """Nobody has what they need, and nowhere is room for it; they are asked anew each second."""
        self.shed: Counter[str] = Counter()
        """Requests, by the variant that they would have waited for."""
        self._groups: dict[str, list[ReplicaGroup]] = {name: [] for name in self.variants}
        self._recent: dict[tuple[object, ...], tuple[str, ...]] = {}

    def group(self, variant: str, host: str) -> ReplicaGroup:
        """The replicas of it there."""
        group = self.hosts[host].groups.get(variant)
        if group is None:
            group = self.hosts[host].groups[variant] = ReplicaGroup(self.variants[variant], self.hosts[host])
            self._groups[variant].append(group)
        return group

    def remove(self, host: str) -> Hosted:
        """The host goes, and all that it has."""
        for name, group in self.hosts[host].groups.items():
            self._groups[name].remove(group)
        return self.hosts.pop(host)

    def start(self, group: ReplicaGroup, now: float) -> Start:
        """One replica more."""
        group.loading.append(now + group.variant.load)
        group.host.free -= group.variant.memory
        return Start(group, group.loading[-1])

    def ask(self, request: VariantRequest, now: float) -> list[Effect]:
        """A request comes."""
        query = request.query
        named = self.named[query.name]
        groups = self._groups
        candidates = tuple(
            VariantCandidate(
                variant, tuple(group.observed(now) for group in groups[variant.name] if group.count)
            )
            for variant in named
        )
        key = (query.name, query.accuracy, query.latency, query.background)
        recent = self._recent.get(key, ())
        hosts = tuple(host.observed() for host in self.hosts.values())
        pinned = self._pinned.get(named[0].architecture, "")
        waiting = len(self.homeless) + sum(
            len(group.queue) for variant in named for group in groups[variant.name]
        )
        decision = self._decide(
            VariantQuery(query, candidates, hosts, recent, pinned, self._grows, waiting, now - request.came)
        )
        if isinstance(decision, QueryRefused):
            return [RequestFailure(request, decision.reason, refused=True)]
        if decision.need:
            self.needs.add((decision.hardware, decision.owner))
        shed: list[Effect] = (
            [RequestFailure(request, decision.reason, shed=decision.shed)] if decision.shed else []
        )
        self.shed[decision.variant] += bool(shed)
        if not decision.host:
            self.homeless += [] if shed else [request]
            return shed
        group = self.group(decision.variant, decision.host)
        if not query.background:
            group.came += query.items
            group.late += query.items * decision.need
            group.hardest = min(group.hardest[0], query.latency), max(group.hardest[1], query.accuracy)
        begun: list[Effect] = [self.start(group, now)] if decision.load else []
        if shed:
            return begun + shed
        if key not in self._recent and len(self._recent) >= KINDS:
            self._recent.clear()
        self._recent[key] = (decision.variant, *(name for name in recent if name != decision.variant))[
            :RECENT
        ]
        request.group = group
        group.put(request)
        return begun + self._next(group, now)

    def leave(self, request: VariantRequest) -> None:
        """Nobody waits for its answer any more."""
        request.attempts = ATTEMPTS  # a batch that is under way with it does not come back
        if request.group is not None:
            request.group.take(request)
        elif request in self.homeless:
            self.homeless.remove(request)

    def loaded(self, group: ReplicaGroup, due: float, now: float) -> list[Effect]:
        """A replica is ready."""
        group.loading.remove(due)
        group.ready += 1
        group.state = "active" if group.state == "inactive" else group.state
        return self._next(group, now)

    def unloadable(self, group: ReplicaGroup, due: float, why: str, now: float) -> list[Effect]:
        """A replica does not start. Who waits where nothing else will come has waited for one in vain."""
        group.loading.remove(due)
        group.host.free += group.variant.memory
        waiting = [*group.queue, *group.background] if not group.count else []
        failed: list[Effect] = []
        for request in waiting:
            request.attempts += 1
            if request.attempts >= ATTEMPTS:
                self.leave(request)
                failed.append(RequestFailure(request, why))
        return failed + self._next(group, now)

    def answered(
        self, group: ReplicaGroup, batch: list[VariantRequest], seconds: float, now: float
    ) -> list[Effect]:
        """A batch is done, after so many seconds."""
        group.answered += len(batch)
        group.missed += sum(
            now - request.came > request.query.latency for request in batch if not request.query.background
        )
        group.batches.append((_items(batch), seconds))
        return self._over(group, batch, now)

    def died(self, group: ReplicaGroup, batch: list[VariantRequest], why: str, now: float) -> list[Effect]:
        """A replica went while it was asked these: another is asked."""
        group.ready -= 1
        group.host.free += group.variant.memory
        group.requeued += len(batch)
        return self._again(group, batch, why, alone=False) + self._over(group, batch, now)

    def refused(self, group: ReplicaGroup, batch: list[VariantRequest], why: str, now: float) -> list[Effect]:
        """A replica says that it cannot answer these. Each of several is asked by itself: nobody fails for
        another's inputs."""
        return self._again(group, batch, why, alone=True) + self._over(group, batch, now)

    def second(self, now: float, utilisation: Mapping[str, float]) -> list[Effect]:
        """A second is over, in which so much of each host was used."""
        effects: list[Effect] = []
        for name, part in utilisation.items():
            self.hosts[name].utilisation = part
        for host in self.hosts.values():
            architectures: dict[str, list[ReplicaGroup]] = {}
            for group in host.groups.values():
                if group.count or group.state != "inactive":
                    group.state = self._decide(group.measured(now)).state
                if group.count:
                    architectures.setdefault(group.variant.architecture, []).append(group)
            for groups in architectures.values():
                effects += self._scale(host, groups, now)
            for group in host.groups.values():
                group.forget()
                if group.queue:  # none may be begun for long, where replicas hang
                    effects += self._shed(group, [*group.queue], self._gather(group, [*group.queue], now))
        waiting, self.homeless = self.homeless, []
        for request in waiting:
            effects += self.ask(request, now)
        return effects

    def _scale(self, host: Hosted, groups: list[ReplicaGroup], now: float) -> list[Effect]:
        here = {group.variant.name for group in groups}
        others = tuple(
            variant for variant in self.named[groups[0].variant.architecture]
            if variant.hardware == host.hardware and variant.architecture == groups[0].variant.architecture
            and variant.name not in here
        )  # fmt: skip
        running = tuple(
            Running(
                group.variant, group.count, group.rate, group.behind, group.state, *group.hardest, group.votes
            )
            for group in groups
        )
        elsewhere = tuple(
            peer.observed() for peer in self.hosts.values()
            if peer is not host and (peer.hardware, peer.owner) == (host.hardware, host.owner)
        )  # fmt: skip
        decision = self._decide(Load(host.observed(), running, others, elsewhere))
        for group, votes in zip(groups, decision.votes, strict=True):
            group.votes = votes
        if decision.need:
            self.needs.add((host.hardware, host.owner))
        effects: list[Effect] = []
        for change in decision.changes:
            group = self.group(change.variant, change.host or host.name)
            effects += [self.start(group, now) for _ in range(change.replicas)]
            for _ in range(-change.replicas):
                last = group.ready == 1 and (group.queue or group.background)
                if group.idle and not last:
                    group.ready -= 1
                    group.host.free += group.variant.memory
                    effects.append(Stop(group))
        return effects

    def _again(self, group: ReplicaGroup, batch: list[VariantRequest], why: str, alone: bool) -> list[Effect]:
        failed: list[Effect] = []
        for request in reversed(batch):
            request.attempts += 1
            if (alone and len(batch) == 1) or request.attempts >= ATTEMPTS:
                failed.append(RequestFailure(request, why))
            else:
                request.alone = alone or request.attempts > 1
                group.put(request, first=True)
        return failed

    def _over(self, group: ReplicaGroup, batch: list[VariantRequest], now: float) -> list[Effect]:
        group.host.used -= group.variant.threads
        del group.begun[id(batch)]
        return self._next(group, now)

    def _next(self, group: ReplicaGroup, now: float) -> list[Effect]:
        """What begins now, and a first replica where somebody waits for none."""
        effects: list[Effect] = [*self._batches(group, group.queue, now)]
        for other in group.host.groups.values() if group.host.background else ():
            effects += self._batches(other, other.background, now)
        if not group.count and (group.queue or group.background):
            effects.append(self.start(group, now))
        return effects

    def _batches(self, group: ReplicaGroup, queue: deque[VariantRequest], now: float) -> list[Effect]:
        effects: list[Effect] = []
        while queue and group.idle:
            oldest = islice(queue, group.variant.batch)
            alike = takewhile(lambda request: request.kind == queue[0].kind and not request.alone, oldest)
            first = [*alike] or [queue[0]]
            decision = self._gather(group, first, now)
            effects += self._shed(group, first, decision)
            batch = [request for place, request in enumerate(first) if place not in decision.shed][
                : decision.requests
            ]
            if not batch and not decision.shed:
                break
            for member in batch:
                group.take(member)
            if batch:
                group.begun[id(batch)] = (batch, now)
                group.host.used += group.variant.threads
                effects.append(BatchRun(group, batch))
        return effects

    def _gather(self, group: ReplicaGroup, first: list[VariantRequest], now: float) -> Any:
        later, host = first[0].query.background, group.host
        slack = tuple(inf if later else request.query.latency - (now - request.came) for request in first)
        items, busy = tuple(request.query.items for request in first), not group.idle
        return self._decide(
            Waiting(group.variant, items, slack, later, host.used, host.cores, group.taking(), busy)
        )

    def _shed(self, group: ReplicaGroup, first: list[VariantRequest], batch: Batch) -> list[Effect]:
        """Those who would be late by now, though that was not to be foreseen when they came."""
        words = f"{group.variant.name}: shed, since by now the answer would be late; ask again in 1 s"
        for place in batch.shed:
            group.take(first[place])
        self.shed[group.variant.name] += len(batch.shed)
        return [RequestFailure(first[place], words, shed=1.0) for place in batch.shed]


def _items(batch: list[VariantRequest]) -> int:
    return sum(request.query.items for request in batch)
