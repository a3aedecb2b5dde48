"""One job, one scheme, one trace of failures: the time from change to change, without a clock; and what that
needs to know, and gives.

Between two changes a job does whole steps at an even pace, so a result costs as much as it has changes, not
as it has steps. A loss takes back the step in flight and what the scheme could not keep; a loss in the
middle of a recovery begins the recovery anew. The scheme says how fast the job is and what it can go on
from, by asking the policies that the supervisor and the trainers ask (`windtunnel.training.elastic.policy`,
`windtunnel.training.checkpoint.policy`, `windtunnel.training.pipelines.policy`).
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Protocol

from windtunnel.traces.failures import HostChange


@dataclass(frozen=True)
class Setback:
    """What a change does to a job.

    ``phases``: what is to be done before the next step, in order, with its seconds; ``waits``: hosts must
    come before any of it. ``keeps``: the newest step that survives. ``from_storage``: memory did not suffice.
    """

    phases: tuple[tuple[str, float], ...]
    keeps: float = math.inf
    waits: bool = False
    from_storage: bool = False


class Scheme(Protocol):
    """A way to go on after losses. It keeps track of the hosts; times and steps are the result's."""

    name: str

    def pace(self) -> tuple[float, float]:
        """Seconds of one step as things stand, and seconds of it that are for checkpoints."""
        ...

    def lost(self, hosts: Sequence[int], software: bool, steps: float) -> Setback | None:
        """Hosts (or only their processes) are gone after ``steps`` steps; None: the job does not
        notice."""
        ...

    def came(self, host: int, running: bool) -> Setback | None:
        """A host has come. None: it is a spare, or still too few have come. ``running``: the job did not
        wait for it; what follows then is done between two steps, or when the recovery under way is over."""
        ...

    def recovered(self) -> None:
        """The job runs again, and its copies are whole."""
        ...


def simulate(
    scheme: Scheme, job: JobModel, costs: PhaseCosts, trace: Sequence[HostChange], horizon: float
) -> SimulationResult:
    """Run ``job`` for ``horizon`` seconds through ``trace``.

    A host that is lost is replaced ``costs.replace`` seconds later, or never where that is infinite.
    """
    result = _Simulation(scheme, job)
    arrivals: list[tuple[float, int]] = []
    alive = set(range(job.hosts))
    for change in (*trace, HostChange(math.inf)):
        while arrivals and arrivals[0][0] <= min(change.time, horizon):
            at, host = heapq.heappop(arrivals)
            result.advance(at)
            alive.add(host)
            result.take_in(host)
        if change.time >= horizon:
            break
        result.advance(change.time)
        lost = [host for host in change.lost if host in alive]
        if lost:
            result.strike(lost, change.software)
        if not change.software:
            alive.difference_update(lost)
            if math.isfinite(costs.replace):
                for host in lost:
                    heapq.heappush(arrivals, (change.time + costs.replace, host))
        for host in change.joined:
            heapq.heappush(arrivals, (change.time, host))
    result.advance(horizon)
    result.spent["redo"] += result.partial
    return SimulationResult(
        scheme.name, horizon, result.spent, result.steps, result.redone, result.failures, result.from_storage
    )


class _Simulation:
    """A job on its way: what it has done, and what it has to do before it runs again (``plan``)."""

    def __init__(self, scheme: Scheme, job: JobModel) -> None:
        self.scheme = scheme
        self.job = job
        self.spent = dict.fromkeys(PHASES, 0.0)
        self.now = self.steps = self.redone = 0.0
        self.partial = 0.0  # seconds into the step in flight
        self.failures = self.from_storage = 0
        self.plan: list[tuple[str, float]] = []
        self.waits = False

    def advance(self, until: float) -> None:
        """Let time pass, in the phase or at the pace that the job is in."""
        if self.waits:
            self.spent["wait"] += until - self.now
            self.now = until
        while self.plan and self.now < until:
            phase, left = self.plan[0]
            passed = min(left, until - self.now)
            self.spent[phase] += passed
            self.now = until if passed < left else self.now + passed
            self.plan[0] = (phase, left - passed)
            if passed == left:
                self.plan.pop(0)
                if not self.plan:
                    self.scheme.recovered()
        if self.now < until:
            step, saving = self.scheme.pace()
            whole = math.floor((self.partial + until - self.now) / step)
            self.partial += until - self.now - whole * step
            self.steps += whole
            self.spent["useful"] += whole * min(self.job.step_time, step - saving)
            self.spent["slow"] += whole * max(0.0, step - saving - self.job.step_time)
            self.spent["checkpoint"] += whole * saving
            self.now = until

    def strike(self, lost: Sequence[int], software: bool) -> None:
        """Take back what a loss takes, and begin the recovery."""
        setback = self.scheme.lost(lost, software, self.steps)
        if setback is None:
            return
        self.failures += 1
        self.from_storage += setback.from_storage
        self.spent["redo"] += self.partial
        self.partial = 0.0
        gone = self.steps - min(self.steps, setback.keeps)
        if gone:
            # what each kept step cost on average, since the result does not remember them one by one
            share = gone / self.steps
            for name in ("useful", "slow", "checkpoint"):
                self.spent["redo"] += self.spent[name] * share
                self.spent[name] *= 1.0 - share
            self.steps -= gone
            self.redone += gone
        self._begin(setback)

    def take_in(self, host: int) -> None:
        """A host came: the job that waited for it recovers, one that runs pauses between two steps, one
        that recovers takes it in afterwards."""
        setback = self.scheme.came(host, not self.waits)
        if setback is not None:
            if not self.waits:
                setback = replace(setback, phases=(*self.plan, *setback.phases))
            self._begin(setback)

    def _begin(self, setback: Setback) -> None:
        self.plan = [item for item in setback.phases if item[1] > 0]
        self.waits = setback.waits
        if not self.plan and not self.waits:
            self.scheme.recovered()


STORAGE = "restart from storage"
MEMORY = "peer memory"
WITH_SPARE = "peer memory, a spare"
TEMPLATES = "templates"
"""The schemes, all of which ``windtunnel train`` runs."""

# Where the time of a job goes. "useful": steps that were kept, at the speed of the whole, healthy job.
PHASES = ("useful", "slow", "checkpoint", "redo", "detect", "wait", "start", "regroup", "load", "join")


@dataclass(frozen=True)
class JobModel:
    """A training job.

    ``step_time``: seconds a step takes on all ``hosts`` without checkpoints. ``state_bytes``: all that
    must be kept of it (parameters and optimizer). ``stages``: hosts of one pipeline, or of one
    data-parallel replica. ``microbatches``: of all pipelines together in one step. ``layers``: of the model.
    """

    hosts: int
    step_time: float
    state_bytes: float
    stages: int = 1
    microbatches: int = 0
    layers: int = 96


@dataclass(frozen=True)
class PhaseCosts:
    """What each phase of a recovery takes. Seconds, bytes/s.

    ``detect``: from the loss until it is known. ``regroup``: to form the process group; ``regroup_growth``:
    more for every doubling of the ranks. ``start``: a new process, until it could form a group (0: warm).
    ``replace``: until a host comes for one that was lost. ``memory_bandwidth``: of one host to its own
    memory. ``peer_bandwidth``: between two hosts. ``storage_bandwidth``: of the storage, for all hosts;
    ``storage_share``: the part of it that saving may take. ``save_stall``: that a checkpoint to storage
    takes from training, None for the copy into memory alone. ``join``: a pause to take a host in.
    """

    detect: float = 1.0
    regroup: float = 1.0
    regroup_growth: float = 0.5
    start: float = 30.0
    replace: float = 300.0
    memory_bandwidth: float = 10e9
    peer_bandwidth: float = 25e9
    storage_bandwidth: float = 10e9
    storage_share: float = 1.0
    save_stall: float | None = None
    join: float = 2.0


@dataclass(frozen=True)
class SimulationResult:
    """How a job fared under one scheme. All of it emulated.

    ``phases``: seconds by name (`PHASES`); they add up to ``horizon``. ``steps``: kept. ``redone``: steps
    that were done and lost. ``failures``: losses that stopped or slowed the job; ``from_storage``:
    recoveries for which memory did not suffice.
    """

    scheme: str
    horizon: float
    phases: Mapping[str, float]
    steps: float
    redone: float
    failures: int
    from_storage: int

    @property
    def goodput(self) -> float:
        """Useful time over all time, 0 to 1 (effective training time ratio)."""
        return self.phases["useful"] / self.horizon
