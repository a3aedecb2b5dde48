"""Jobs run: computing tasks as processes, sending ones as TCP flows between hosts that are namespaces.

Whenever a job comes, a task ends, or the last decision asks for it, `decide` is asked, as in the twin, and
what it saw goes into a log beside what it answered. How much of a task is left is measured: bytes that the
receiver has, seconds of CPU that a spin has used (of a command: seconds since it began).

What a decision says of flows becomes rates of HTB: smaller priorities first and equal ones by weight, all
lines are filled up, and what a flow gets there is what its classes have. What one leaves of it others borrow.
HTB's own priorities will not do: the kernel does not take a new one while packets wait.

A host has as many processors as it is said to have; how many this machine has is another matter. A spin that
takes longer than its seconds of CPU lacked one, and `GraphRun.short` says by how much.
"""

from __future__ import annotations

import selectors
import shlex
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass, field, replace
from math import inf

from windtunnel.base.errors import ScriptError, UserError
from windtunnel.linux import network
from windtunnel.network.dag.live.hosts import NamespaceHosts, TaskFlow
from windtunnel.network.dag.policy import (
    Decision,
    GraphJob,
    GraphTask,
    Key,
    Observation,
    PendingTask,
    decide,
    split,
)
from windtunnel.network.dag.policy.forecast import filled
from windtunnel.network.dag.policy.paths import checked, whole

SOONEST = 0.005
"""Seconds: what was done in less is not told apart from noise, so nobody looks again before."""
MOST_HOSTS, MOST_TASKS = 64, 4096


@dataclass
class GraphRun:
    """``jobs``: seconds from each job's begin to its end. ``tasks``: begin and end of each task, by job and
    name, in seconds. ``decisions``: how many; ``deciding``: seconds of the longest, from what ended to the
    last rate set. ``spun``, ``span``: seconds of CPU that spins used, and seconds that they took."""

    jobs: dict[str, float] = field(default_factory=dict)
    tasks: dict[Key, tuple[float, float]] = field(default_factory=dict)
    decisions: int = 0
    deciding: float = 0.0
    spun: float = 0.0
    span: float = 0.0

    @property
    def mean(self) -> float:
        """Seconds of a job, on average."""
        return sum(self.jobs.values()) / len(self.jobs)

    @property
    def short(self) -> float:
        """The part of their time in which spins had no CPU."""
        return 1 - self.spun / self.span if self.span else 0.0


@dataclass
class AppliedDecision:
    """What became of a decision, in order: (job, task, bytes/s) of every flow that is shaped, (job, task) of
    those that were begun, and of computing tasks that were."""

    rates: list[tuple[str, str, float]] = field(default_factory=list)
    sent: list[Key] = field(default_factory=list)
    begun: list[Key] = field(default_factory=list)


@dataclass
class _LiveTask:
    """One that has not ended, of a job that has come. ``open``: numbers of its flows that have not ended, or
    its own."""

    true: GraphTask
    observed: PendingTask
    flows: dict[int, TaskFlow]
    open: set[int]
    began: float | None = None


def run(
    jobs: Iterable[GraphJob], resources: Mapping[str, float], schedule: str, *,
    decided: Callable[[Observation, Decision], None] | None = None,
    did: Callable[[AppliedDecision], object] = lambda _: None,
) -> GraphRun:  # fmt: skip
    """Let all jobs end. ``resources``: of host H the processors (``H``) and the bytes/s of its link
    (``H.out``, ``H.in``). A computing task without a command spins for its seconds of CPU.

    ``decided``: gets every decision beside what it was made of, ``did`` then what became of it; what they
    raise ends the run.

    Raises:
        UserError: jobs that are none, or that cannot be run here; this host has no namespaces or no HTB.
        ScriptError: a command failed. All else was stopped.
        HostError: a host's agent was killed, or the kernel refused.
    """
    if reason := network.missing():
        raise UserError(f"network dag run `real`: {reason}; accepted without is the twin")
    rates = dict(resources)
    coming = sorted(map(split, checked(jobs, rates)), key=lambda job: job.begins)
    flows, numbers = _numbered(coming)
    used = [resource for job in coming for task in job.tasks for resource, _ in task.loads]
    names = list(dict.fromkeys(resource.removesuffix(".out").removesuffix(".in") for resource in used))
    if len(names) > MOST_HOSTS:
        raise UserError(f"network dag run `real`: {len(names)} hosts, accepted are at most {MOST_HOSTS}")
    lines = {name: rates[name] for name in used if name.endswith((".out", ".in"))}
    try:
        hosts = NamespaceHosts(lines, names, flows, sum(map(len, numbers.values())))
    except OSError as error:
        raise UserError(
            f"network dag run `real`: namespaces, links or HTB cannot be had here ({error.strerror});"
            " accepted without is the twin"
        ) from error
    with closing(hosts):
        return _Session(hosts, rates, flows, numbers).run(coming, schedule, decided, did)


def _numbered(jobs: Iterable[GraphJob]) -> tuple[list[TaskFlow], dict[Key, list[int]]]:
    """All flows, and of each task the numbers of its flows, or its own, which come behind those."""
    flows: list[TaskFlow] = []
    numbers: dict[Key, list[int]] = {}
    computing = []
    for job in jobs:
        for task in job.tasks:
            where = f"network dag run `real`: {job.name}: task {task.name}"
            if task.kind == "compute":
                computing.append((job.name, task.name))
                if task.command and task.name != whole(task.name):
                    raise UserError(f"{where} is a piece of a command, accepted is a command of one unit")
                continue
            task_flows = _flows(task, where)
            numbers[job.name, task.name] = list(range(len(flows), len(flows) + len(task_flows)))
            flows += task_flows
    if len(flows) + len(computing) > MOST_TASKS:
        raise UserError(
            f"network dag run `real`: {len(flows) + len(computing)} flows and processes, accepted are at most"
            f" {MOST_TASKS}"
        )
    for number, key in enumerate(computing, len(flows)):
        numbers[key] = [number]
    return flows, numbers


def _flows(task: GraphTask, where: str) -> list[TaskFlow]:
    """From one host to another, or round a ring of hosts that all send and receive as much."""
    ends = [name.rpartition(".")[2] for name, _ in task.loads]
    times = {times for _, times in task.loads}
    out, into = (
        [name.rpartition(".")[0] for name, _ in task.loads if name.endswith(end)] for end in (".out", ".in")
    )
    if len(out) + len(into) == len(ends) and len(times) == 1:
        if len(out) == len(into) == 1 and out != into:
            return [TaskFlow(out[0], into[0], times.pop())]
        if len(out) > 1 and sorted(out) == sorted(into):
            return [TaskFlow(*pair, max(times)) for pair in zip(out, [*out[1:], out[0]], strict=True)]
    raise UserError(
        f"{where} loads {', '.join(name for name, _ in task.loads)}; accepted are one HOST.out and another's"
        " HOST.in, or both of some hosts (a ring), each as many times"
    )


@dataclass
class _Session:
    """One run: what is under way on which host."""

    hosts: NamespaceHosts
    rates: dict[str, float]
    flows: Sequence[TaskFlow]
    numbers: Mapping[Key, Sequence[int]]
    here: dict[Key, _LiveTask] = field(default_factory=dict)
    outcome: GraphRun = field(default_factory=GraphRun)
    origin: float = field(default_factory=time.monotonic)

    def now(self) -> float:
        return time.monotonic() - self.origin

    def run(
        self, coming: list[GraphJob], schedule: str, decided: Callable[[Observation, Decision], None] | None,
        did: Callable[[AppliedDecision], object],
    ) -> GraphRun:  # fmt: skip
        """Until all jobs have ended."""
        keys = {number: key for key, own in self.numbers.items() for number in own}
        began, woken = {job.name: job.begins for job in coming}, self.now()
        with selectors.DefaultSelector() as poll:
            for name, control in self.hosts.controls.items():
                poll.register(control, selectors.EVENT_READ, name)
            while coming or self.here:
                while coming and coming[0].begins <= self.now():
                    self._come(coming.pop(0))
                until = coming[0].begins if coming else inf
                if self.here:
                    pending = tuple(self._pending(key, task) for key, task in self.here.items())
                    observation = Observation(self.now(), self.rates, pending, schedule)
                    decision = decide(observation)
                    if decided is not None:
                        decided(observation, decision)
                    did(self._apply(decision))
                    self.outcome.decisions += 1
                    self.outcome.deciding = max(self.outcome.deciding, self.now() - woken)
                    until = min(until, max(decision.until, self.now() + SOONEST))
                ready = poll.select(None if until == inf else max(0.0, until - self.now()))
                woken = self.now()
                for descriptor, _ in ready:
                    number, *rest = self.hosts.receive(descriptor.data)
                    (self._computed if rest else self._received)(keys[number], number, *rest)
        for (job, _), (_, end) in self.outcome.tasks.items():
            self.outcome.jobs[job] = max(self.outcome.jobs.get(job, 0.0), end - began[job])
        return self.outcome

    def _come(self, job: GraphJob) -> None:
        for task in job.tasks:
            key = job.name, task.name
            pending = PendingTask(job.name, task, task.size, ready=not task.after)
            open_ = set(self.numbers[key])
            flows = {number: self.flows[number] for number in open_} if task.kind == "network" else {}
            self.here[key] = _LiveTask(task, pending, flows, open_)

    def _pending(self, key: Key, task: _LiveTask) -> PendingTask:
        """What is seen of a task."""
        pending = task.observed
        if task.began is None:
            if not pending.ready and not any((key[0], name) in self.here for name in pending.task.after):
                task.observed = replace(pending, ready=True)
            return task.observed
        if task.flows:
            done = min(self.hosts.counts[number] / flow.times for number, flow in task.flows.items())
        elif task.true.command:
            done = self.now() - task.began
        else:
            done = self.hosts.counts[min(task.open)] * 1e-9
        return pending.under_way(done)

    def _apply(self, decision: Decision) -> AppliedDecision:
        """Flows first: they can be late by less."""
        did = AppliedDecision()
        loads = {key: task.true.loads for key, task in self.here.items()}
        rates, shapes, begin = filled(decision.shares, loads, self.rates), {}, []
        for share in decision.shares:
            key, state = (share.job, share.task), self.here[share.job, share.task]
            for number, flow in state.flows.items():
                shapes[number] = rates[key] * flow.times, share.cap * flow.times
                did.rates.append((*key, shapes[number][0]))
                if state.began is None:
                    begin.append((key, number, _bytes(state.true, flow)))
            state.began = self.now() if state.began is None else state.began
        self.hosts.shape(shapes)
        for key, number, size in begin:
            self.hosts.send(number, size)
            did.sent.append(key)
        for key in decision.begin:
            state = self.here[key]
            host, number, state.began = state.true.loads[0][0], min(state.open), self.now()
            if state.true.command:
                variables = {"WINDTUNNEL_JOB": key[0], "WINDTUNNEL_TASK": key[1], "WINDTUNNEL_HOST": host}
                self.hosts.ask(host, "run", number, state.true.command, variables)
            else:
                self.hosts.ask(host, "spin", number, state.true.size)
            did.begun.append(key)
        return did

    def _received(self, key: Key, number: int) -> None:
        task = self.here[key]
        flow = task.flows[number]
        if self.hosts.counts[number] != _bytes(task.true, flow):
            raise self.hosts.ended(flow.source)
        task.open.remove(number)
        if not task.open:
            self._end(key)

    def _computed(self, key: Key, number: int, status: int, used: float) -> None:
        task = self.here[key]
        assert task.began is not None
        if status:
            what = shlex.join(task.true.command) or "its spin"
            how = f"ended with status {status}" if status > 0 else f"was killed by signal {-status}"
            raise ScriptError(
                f"network dag run: {key[0]}: task {key[1]} on {task.true.loads[0][0]}: {what} {how}; all else"
                " was stopped"
            )
        if not task.true.command:
            self.outcome.spun += used
            self.outcome.span += self.now() - task.began
        self._end(key)

    def _end(self, key: Key) -> None:
        job, own = key[0], whole(key[1])
        began = self.here.pop(key).began
        assert began is not None
        self.outcome.tasks[job, own] = self.outcome.tasks.get((job, own), (began,))[0], self.now()


def _bytes(task: GraphTask, flow: TaskFlow) -> int:
    return max(1, round(task.size * flow.times))
