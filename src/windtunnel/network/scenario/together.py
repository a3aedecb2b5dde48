"""Several jobs on one cluster: what each iteration takes alone and together, and who uses which links.

Every job repeats its iteration (`dag.sources`), the first one begun at random, until the slowest has had as
many as were asked for. Sending is fluid (`engines.flows`): a collective is one flow. What jobs get of a
link that is full is the *sharing*:

* ``fifo``: in proportion to the messages that each has under way there, as one queue gives it to many alike
  senders. It is approximated: a flow has one weight, from its fullest link.
* ``fair``: as much for each job, whatever it has under way.
* ``aq``: a rate of its own for each job, by weight, on every link that several use, and what others leave,
  lent by the policy of `network.sharing` every 5 ms. In fluid a rate is one more link, of the job alone.

Within that the *schedule* (`network.dag.policy`) says which collective goes first. Links that are loaded by
the same calls in the same proportions are one link here, so that thousands of ranks stay small.
"""

from __future__ import annotations

import heapq
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from math import inf
from typing import Any

import numpy as np

from windtunnel.engines.flows import World
from windtunnel.network.dag.policy import decide
from windtunnel.network.dag.policy.graph import GraphTask, Observation, PendingTask
from windtunnel.network.dag.sources import Lowered
from windtunnel.network.sharing.policy import SharingTenant
from windtunnel.network.sharing.policy import decide as lend
from windtunnel.network.sharing.policy.meter import PERIOD, RateMeter

SHARINGS = ("fifo", "fair", "aq")
SCHEDULES = ("fair", "fifo", "sebf", "mxdag")
PARTS = ("computing", "latency", "sending", "neighbours")
"""Of an iteration's critical path; ``neighbours``: what sending took longer than alone, also because of the
job's own other collectives."""


@dataclass(frozen=True)
class ScenarioTenant:
    """A job with its ``weight``, and how many ``flows`` carry each of its messages (for ``fifo``)."""

    lowered: Lowered
    weight: float = 1.0
    flows: float = 1.0


@dataclass
class JobTimes:
    """Of one job: ``seconds`` of each iteration after the first; ``path``: seconds of `PARTS`, the mean of
    those iterations; ``lost``: seconds of sending an iteration, by the kind of link that was full; ``spans``:
    (begin, end, call) of its last collectives."""

    seconds: list[float]
    path: dict[str, float]
    lost: dict[str, float]
    spans: list[tuple[float, float, str]]


@dataclass(frozen=True)
class LinkUse:
    """Links that are used alike: ``name`` is one of ``count``; bytes of each job over what they carry."""

    name: str
    count: int
    by: dict[str, float]


@dataclass
class _Iteration:
    """``waits``: for how many each task waits still. ``ready``, ``end``: seconds; ``last_before``:
    (iterations back, task) that ended last of those it waited for."""

    waits: list[int]
    left: int
    ends: int
    ready: list[float]
    end: list[float]
    last_before: list[tuple[int, int]]


class _TenantJob:
    """A tenant as numbers: tasks by place, who waits for whom, loads on classes of links."""

    def __init__(self, tenant: ScenarioTenant, number: int) -> None:
        self.tenant, self.number, low = tenant, number, tenant.lowered
        self.name, self.tasks = low.job.name, low.job.tasks
        place = {task.name: i for i, task in enumerate(self.tasks)}
        self.next: list[list[tuple[int, int]]] = [[] for _ in self.tasks]  # (iterations on, task)
        self.waits = [len(task.after) for task in self.tasks]
        self.carried = [[(place[name], back) for name, back in low.carry.get(t.name, ())] for t in self.tasks]
        for i, task in enumerate(self.tasks):
            for name in task.after:
                self.next[place[name]].append((0, i))
            for source, back in self.carried[i]:
                self.next[source].append((back, i))
        self.ends = {place[name] for name in low.ends}
        self.iterations: dict[int, _Iteration] = {}
        self.over: list[float] = []
        self.paths: list[dict[str, float]] = []
        self.lost: dict[str, float] = defaultdict(float)
        self.spans: list[tuple[float, float, str]] = []
        self.active: dict[int, tuple[int, int]] = {}  # flow: (iteration, task)
        self.alone = [0.0] * len(self.tasks)
        self.loads: list[dict[int, float]] = [{} for _ in self.tasks]
        self.share = [1.0] * len(self.tasks)

    def iteration(self, k: int) -> _Iteration:
        if k not in self.iterations:
            waits = [
                own + sum(back <= k for _, back in before)
                for own, before in zip(self.waits, self.carried, strict=True)
            ]
            n = len(waits)
            self.iterations[k] = _Iteration(
                waits, n, len(self.ends), [0.0] * n, [0.0] * n, [(0, -1)] * n
            )  # fmt: skip
        return self.iterations[k]


class _Shared:
    """All jobs on all links, and the time."""

    def __init__(
        self, tenants: Sequence[ScenarioTenant], rates: Mapping[str, float], sharing: str, schedule: str
    ) -> None:
        self.jobs = [_TenantJob(tenant, number) for number, tenant in enumerate(tenants)]
        self.sharing, self.schedule = sharing, schedule
        self._classes(rates)
        self.world = World(self.rates)
        self.heap: list[tuple[float, int, int, int, int]] = []
        self.turn = 0
        self.carried = np.zeros((len(self.jobs), len(self.rates)))
        self.resource_rates = dict(zip(self.names, self.rates, strict=True))
        self.resource_rates |= {f"{job.name} devices": float(len(job.tasks)) for job in self.jobs}
        self.changed = False
        self.virtual: dict[int, list[tuple[int, int]]] = {}  # class: (job, link)
        self.meters: dict[int, tuple[RateMeter, list[SharingTenant], np.ndarray]] = {}
        self.looks = inf
        if sharing == "aq":
            self._rates_of_their_own()

    def _classes(self, rates: Mapping[str, float]) -> None:
        """Links that the same calls load alike become one."""
        calls: dict[int, tuple[int, tuple[tuple[str, float], ...]]] = {}
        for job in self.jobs:
            for task in job.tasks:
                if task.kind == "network":
                    calls.setdefault(id(task.loads), (len(calls), task.loads))
        loaded: dict[str, list[tuple[int, float]]] = defaultdict(list)
        for number, loads in calls.values():
            for link, times in loads:
                loaded[link].append((number, times))
        kinds: dict[tuple[Any, ...], int] = {}
        self.names, self.rates, self.counts = [], [], []
        place: dict[str, int] = {}
        for link, by in loaded.items():
            key = (rates[link], link.rpartition(" ")[0], *by)
            if key not in kinds:
                kinds[key] = len(kinds)
                self.names.append(link)
                self.rates.append(rates[link])
                self.counts.append(0)
            place[link] = kinds[key]
            self.counts[kinds[key]] += 1
        on = {key: {place[link]: times for link, times in loads} for key, (_, loads) in calls.items()}
        self.users: list[set[int]] = [set() for _ in self.names]
        for job in self.jobs:
            for i, task in enumerate(job.tasks):
                if task.kind == "network":
                    job.loads[i] = dict(on[id(task.loads)])
                    slowest = max(
                        job.loads[i], key=lambda resource: job.loads[i][resource] / self.rates[resource]
                    )
                    job.alone[i] = self.rates[slowest] / job.loads[i][slowest]
                    job.share[i] = 1.0 / job.loads[i][slowest]
                    if self.sharing == "fifo":
                        job.share[i] *= job.tenant.flows * job.tenant.lowered.flows[task.name]
                    for resource in job.loads[i]:
                        self.users[resource].add(job.number)

    def _rates_of_their_own(self) -> None:
        for physical, users in enumerate(self.users):
            if len(users) < 2:
                continue
            who = sorted(users)
            entities = [SharingTenant(self.jobs[j].name, self.jobs[j].tenant.weight) for j in who]
            meter = RateMeter()
            nothing = np.zeros(len(who))
            own = lend(meter.look(0.0, self.rates[physical], entities, nothing, nothing)).own
            links = self.world.add_links(own)
            self.virtual[physical] = list(zip(who, links, strict=True))
            self.meters[physical] = meter, entities, np.zeros(len(who))
            for j, link in self.virtual[physical]:
                for loads in self.jobs[j].loads:
                    if physical in loads:
                        loads[link] = loads[physical]

    def begin(self, job: _TenantJob, at: float) -> None:
        first = job.iteration(0)
        for i, waits in enumerate(first.waits):
            if not waits:
                self._timer(at, job, 0, i, first, at)

    def _timer(self, at: float, job: _TenantJob, k: int, i: int, iteration: _Iteration, ready: float) -> None:
        iteration.ready[i] = ready
        if job.tasks[i].kind == "compute":
            self.turn += 1
            heapq.heappush(self.heap, (at + job.tasks[i].size, self.turn, job.number, k, i))
            return
        task = job.tasks[i]
        # on its own, before others' shares are looked at again
        flow = self.world.start(
            task.size, job.loads[i], weight=job.share[i], after=max(0.0, at - self.world.now)
        )
        job.active[flow] = k, i
        self.changed = True

    def _ended(self, job: _TenantJob, k: int, i: int) -> None:
        now = self.world.now
        iteration = job.iterations[k]
        iteration.end[i] = now
        iteration.left -= 1
        for on, task in job.next[i]:
            later = job.iteration(k + on)
            later.waits[task] -= 1
            if not later.waits[task]:
                later.last_before[task] = on, i
                self._timer(now, job, k + on, task, later, now)
        if i in job.ends:
            iteration.ends -= 1
            if not iteration.ends:
                job.over.append(now)
                if k:
                    job.paths.append(self._path(job, k, i))
                    old = job.iterations.get(k - 3)
                    if old is not None and not old.left:
                        del job.iterations[k - 3]

    def _path(self, job: _TenantJob, k: int, i: int) -> dict[str, float]:
        """What the time between the ends of the last two iterations went to, back along what was last."""
        parts = dict.fromkeys(PARTS, 0.0)
        since = job.over[-2]
        while i >= 0 and k in job.iterations:
            iteration, task = job.iterations[k], job.tasks[i]
            begin = max(iteration.ready[i], since)
            spent = max(0.0, iteration.end[i] - begin)
            if task.kind == "network":
                alone = min(spent, task.size / job.alone[i])
                parts["sending"] += alone
                parts["neighbours"] += spent - alone
            else:
                waits = task.name.startswith("l") or task.name in job.tenant.lowered.calls
                parts["latency" if waits else "computing"] += spent
            if iteration.ready[i] <= since:
                break
            back, i = iteration.last_before[i]
            k -= back
        return parts

    def run(self, iterations: int, most: float = inf) -> None:
        """Until every job has ended so many."""
        while min(len(job.over) for job in self.jobs) < iterations:
            if self.changed:
                self._share()
            before = self.world.now
            losing = self._losing() if len(self.jobs) > 1 else []
            until = min(self.heap[0][0] if self.heap else inf, self.looks)
            if until == inf and not any(job.active for job in self.jobs):
                raise ArithmeticError("nothing is under way, and jobs have not ended")
            ended = self.world.advance(max(until, before))
            now = self.world.now
            for job, kind, part in losing:
                job.lost[kind] += part * (now - before)
            for flow in ended:
                job = next(job for job in self.jobs if flow in job.active)
                k, i = job.active.pop(flow)
                self._carried(job, i, job.tasks[i].size)
                job.spans.append(
                    (job.iterations[k].ready[i], now, job.tenant.lowered.calls[job.tasks[i].name].kind)
                )
                self.changed = True
                self._ended(job, k, i)
            while self.heap and self.heap[0][0] <= now:
                _, _, number, k, i = heapq.heappop(self.heap)
                self._ended(self.jobs[number], k, i)
            if now >= self.looks:
                self._lend()
        for job in self.jobs:
            for flow, (_, i) in job.active.items():
                self._carried(job, i, job.tasks[i].size - self.world.left(flow))

    def _carried(self, job: _TenantJob, i: int, size: float) -> None:
        for link, times in job.loads[i].items():
            if link < len(self.rates):
                self.carried[job.number, link] += size * times

    def _losing(self) -> list[tuple[_TenantJob, str, float]]:
        """Of flows that are slower than alone: job, the kind of link that is full, and the part lost."""
        rates = self.world.rates()
        losing = []
        for job in self.jobs:
            for flow, (_, i) in job.active.items():
                part = 1.0 - rates[flow] / job.alone[i]
                if part > 1e-9:
                    link = self.world.bottleneck(flow)
                    if link is None:
                        kind = "schedule"
                    elif link < len(self.names):
                        kind = self.names[link].rpartition(" ")[0]
                    else:
                        kind = "own rate"
                    losing.append((job, kind, part))
        return losing

    def _share(self) -> None:
        """Weights, priorities and caps of what is under way, after it has changed."""
        self.changed = False
        if self.sharing == "aq" and self.looks == inf and any(job.active for job in self.jobs):
            self.looks = self.world.now + PERIOD
        shares: dict[tuple[str, str], Any] = {}
        if self.schedule != "fair" and self._meet():
            decision = decide(
                Observation(self.world.now, self.resource_rates, self._pending(), self.schedule)
            )
            shares = {(share.job, share.task): share for share in decision.shares}
        for job in self.jobs:
            for flow, (k, i) in job.active.items():
                weight = job.share[i] / (1.0 if self.sharing == "fifo" else len(job.active))
                share = shares.get((job.name, f"{k}:{job.tasks[i].name}"))
                if share is not None:
                    self.world.change(
                        flow, weight=weight * share.weight, cap=share.cap, priority=share.priority
                    )
                elif self.schedule != "fair" or self.sharing != "fifo":
                    self.world.change(flow, weight=weight, cap=inf, priority=0)

    def _meet(self) -> bool:
        """Whether two flows are on one link: else no order matters."""
        used: set[int] = set()
        for job in self.jobs:
            for _, i in job.active.values():
                links = job.loads[i].keys()
                if not used.isdisjoint(links):
                    return True
                used |= links
        return False

    def _pending(self) -> tuple[PendingTask, ...]:
        """What has not ended of every job's iterations under way."""
        pending = []
        for job in self.jobs:
            flows = {where: flow for flow, where in job.active.items()}
            live = sorted(k for k, run in job.iterations.items() if run.left)[:2]
            for k in live:
                iteration = job.iterations[k]
                for i, task in enumerate(job.tasks):
                    if iteration.end[i] or (
                        task.kind == "compute" and not task.size and not iteration.waits[i]
                    ):
                        continue
                    ready = not iteration.waits[i]
                    left = task.size
                    if (k, i) in flows:
                        left = self.world.left(flows[k, i])
                    elif ready:
                        left = max(0.0, iteration.ready[i] + task.size - self.world.now)
                    begun, graph_task = ready and task.kind == "compute", self._shown(job, k, i, live)
                    pending.append(PendingTask(job.name, graph_task, left, ready, begun))
        return tuple(pending)

    def _shown(self, job: _TenantJob, k: int, i: int, live: Sequence[int]) -> GraphTask:
        task = job.tasks[i]
        after = [f"{k}:{name}" for name in task.after]
        after += [
            f"{k - back}:{job.tasks[source].name}" for source, back in job.carried[i] if k - back in live
        ]
        loads = task.loads
        if task.kind == "network":
            loads = tuple(
                (self.names[link], times) for link, times in job.loads[i].items() if link < len(self.names)
            )
        return replace(task, name=f"{k}:{task.name}", after=tuple(after), loads=loads)

    def _lend(self) -> None:
        """What others leave of their rates, until the next look."""
        carried = self.world.carried()
        bottlenecks = {self.world.bottleneck(flow) for job in self.jobs for flow in job.active}
        for physical, (meter, entities, trouble) in self.meters.items():
            links = [link for _, link in self.virtual[physical]]
            trouble += [link in bottlenecks for link in links]
            observation = meter.look(
                self.world.now, self.rates[physical], entities, carried[links], trouble.copy()
            )
            for link, rate in zip(links, lend(observation).lent, strict=True):
                self.world.set_capacity(link, rate)
        self.looks = self.world.now + PERIOD if any(job.active for job in self.jobs) else inf


def together(
    tenants: Sequence[ScenarioTenant], rates: Mapping[str, float], iterations: int, *, sharing: str = "fair",
    schedule: str = "fair", begins: Sequence[float] = (),
) -> tuple[list[JobTimes], list[LinkUse]]:  # fmt: skip
    """All ``tenants`` on links of ``rates`` (bytes/s) until each has ended ``iterations`` and the first."""
    shared = _Shared(tenants, rates, sharing, schedule)
    for job, at in zip(shared.jobs, begins or [0.0] * len(tenants), strict=True):
        shared.begin(job, at)
    shared.run(iterations + 1)
    now = shared.world.now
    ran = []
    for job in shared.jobs:
        count = max(1, len(job.paths))
        path = {name: sum(path[name] for path in job.paths) / count for name in PARTS}
        lost = {kind: seconds / max(1, len(job.over)) for kind, seconds in sorted(job.lost.items())}
        ran.append(JobTimes(np.diff(job.over).tolist(), path, lost, job.spans))
    uses = []
    for link, (name, rate, count) in enumerate(zip(shared.names, shared.rates, shared.counts, strict=True)):
        by = {job.name: float(shared.carried[job.number, link] / (rate * now)) for job in shared.jobs}
        uses.append(LinkUse(name, count, by))
    return ran, uses
