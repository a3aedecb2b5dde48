"""Hosts full of sandboxes that play their sessions, checkpoint while the model thinks, and lose their hosts.

A sandbox runs a turn's command on the shared CPUs of its host, decides, hands a checkpoint to the engine,
and waits for the model's reply; with the reply it waits for the checkpoint, if that is still under way (the
gate). The engine hands jobs to free workers in the order that the live queues give.
A checkpoint is a frozen part and the rest; of each, what is CPU goes to the CPUs, what is not to the disk.
The checkpoint of a session's last turn is made, but nobody waits for it.

What is kept is what the policy says of the effects since the last checkpoint. A turn whose need no checkpoint
has covered is lost with the host, and so is every turn after it: a checkpoint of files alone does not hold a
process that was started before.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import partial

from windtunnel.agents.sandbox.costs import OperationCost, SandboxCosts
from windtunnel.agents.sandbox.model import TurnClass, TurnEffects
from windtunnel.agents.sandbox.policy import (
    POLICIES,
    READS_EFFECTS,
    CheckpointPlan,
    CheckpointRequest,
    Endangered,
    Notice,
    Occasion,
    PolicyName,
    SaveOrder,
)
from windtunnel.agents.sandbox.policy.queues import Queues, picked
from windtunnel.agents.sandbox.twin import Session, merged, uncovered
from windtunnel.engines.events import (
    Environment,
    Process,
    ProcessGenerator,
    SharedResource,
    at,
    kill,
    run_through,
)


@dataclass(frozen=True)
class EmulatedHost:
    """One host of the emulation; all are alike. Bytes, and bytes a second. ``workers``: None: one a core.
    ``images``: processes can be kept."""

    cores: int = 32
    memory: float = 256e9
    disk: float = 1e9
    workers: int | None = None
    images: bool = True

    @property
    def lanes(self) -> int:
        return self.workers or self.cores


@dataclass(frozen=True)
class Loss:
    """One sandbox that lost its host: turns done, turns that come back, and seconds that are done again: the
    lost turns with the thinking between them, and the command under way. A reply under way is asked for
    again, and not counted."""

    turns: int
    covered: int
    seconds: float


@dataclass(frozen=True)
class EmulatedCheckpoint:
    """One checkpoint that exists: when, seconds frozen, and bytes written."""

    turn_class: TurnClass
    at: float
    freeze: float
    written: float


@dataclass
class SessionsOutcome:
    """What happened in a run. ``gates``: for each turn but the last of a session, seconds that the reply
    waited for the checkpoint. ``awaited`` and ``hidden``: checkpoints of those turns, and how many were safe
    when the reply came. ``ends``: seconds that each session took. ``decided``: what the policy said of each
    turn's end, with the sandbox and the turn."""

    ends: list[float]
    gates: list[float] = field(default_factory=list)
    awaited: int = 0
    hidden: int = 0
    checkpoints: list[EmulatedCheckpoint] = field(default_factory=list)
    losses: list[Loss] = field(default_factory=list)
    cpu_served: float = 0.0
    decided: list[tuple[int, int, CheckpointPlan]] = field(default_factory=list)


class CheckpointJob:
    """A checkpoint that waits for a worker, runs or is done; ``done`` is for whoever needs its end, which
    comes too when it is taken out of the queue."""

    def __init__(self, env: Environment, name: str, activity: ProcessGenerator) -> None:
        self.name = name
        self.activity = activity
        self.done = env.event()
        self.process: Process | None = None


class TwinHost:
    """One host: what its sandboxes share, and the engine, which hands jobs to free workers in the order that
    the live queues give. ``draining``: it was told that it goes."""

    def __init__(self, env: Environment, machine: EmulatedHost, costs: SandboxCosts) -> None:
        self.cpu = SharedResource(env, machine.cores, 1.0)
        self.disk = SharedResource(env, costs.disk_lanes, 1.0)
        self.draining = False
        self._env = env
        self._free = machine.lanes
        self._queues = Queues()
        self._jobs: dict[str, CheckpointJob] = {}

    def submit(self, job: CheckpointJob, *, urgent: bool = False) -> None:
        self._jobs[job.name] = job
        self._queues.add(job.name, urgent=urgent)
        self._hand_out()

    def promote(self, job: CheckpointJob) -> None:
        """Somebody waits for the job now."""
        self._queues.promote(job.name)

    def drop(self, job: CheckpointJob) -> bool:
        """Take a job that has not begun out of the queue; whoever waits for it goes on."""
        if not self._queues.remove(job.name):
            return False
        del self._jobs[job.name]
        job.done.succeed()
        return True

    def _hand_out(self) -> None:
        while self._free and (queued := self._queues.queued()) is not None:
            self._free -= 1
            job = self._jobs.pop(self._queues.take(picked(queued)))
            job.process = self._env.process(self._work(job))

    def _work(self, job: CheckpointJob) -> ProcessGenerator:
        yield from job.activity
        self._free += 1
        job.done.succeed()
        self._hand_out()


@dataclass
class _Box:
    """A sandbox. ``at``: turns whose command has ended, the last of them at ``ended``; ``began``: when the
    newest command did. ``needs``: turns that no checkpoint covers yet, with what they need. ``dirty``,
    ``files``, ``effects``: since the last checkpoint of each part. ``has_image``: the newest one has."""

    number: int
    session: Session
    host: TwinHost
    start: float
    has_image: bool
    at: int = 0
    ended: float = 0.0
    in_command: bool = False
    began: float = 0.0
    needs: dict[int, TurnClass] = field(default_factory=dict)
    dirty: float = 0.0
    files: float = 0.0
    effects: TurnEffects = field(default_factory=TurnEffects)
    planned: TurnClass | None = None
    life: Process | None = None
    jobs: list[CheckpointJob] = field(default_factory=list)
    turn_ends: list[float] = field(default_factory=list)

    @property
    def covered(self) -> int:
        """Turns that a restore brings back."""
        return min(self.needs) - 1 if self.needs else self.at


class SandboxWorld:
    """Sandboxes spread over hosts in turn. Give it deaths and notices before ``run``."""

    def __init__(
        self, machine: EmulatedHost, costs: SandboxCosts, policy: PolicyName, sessions: Sequence[Session],
        starts: Sequence[float], *, hosts: int = 1,
    ) -> None:  # fmt: skip
        self.env = Environment()
        self.machine, self.costs, self.policy = machine, costs, policy
        self.outcome = SessionsOutcome(ends=[0.0] * len(sessions))
        self.hosts = [TwinHost(self.env, machine, costs) for _ in range(hosts)]
        self.boxes = [
            _Box(number, session, self.hosts[number % hosts], start, machine.images)
            for number, (session, start) in enumerate(zip(sessions, starts, strict=True))
        ]
        for box in self.boxes:
            at(self.env, box.start, partial(self._begin, box))

    def run(self, until: float = float("inf")) -> SessionsOutcome:
        """Let it happen; what is under way at ``until`` is left out."""
        run_through(self.env, until)
        self.outcome.cpu_served = sum(host.cpu.served for host in self.hosts)
        return self.outcome

    def kill(self, place: int, when: float) -> None:
        """Host number ``place`` dies at that time, with what runs on it."""
        at(self.env, when, partial(self._die, self.hosts[place]))

    def notice(self, place: int, when: float, seconds: float) -> None:
        """Host number ``place`` is told at that time that it goes in so many seconds: no further command
        starts, and what is not covered is saved in the order of the policy."""
        at(self.env, when, partial(self._drain, self.hosts[place], seconds))

    # --- a sandbox's life

    def _begin(self, box: _Box) -> None:
        box.life = self.env.process(self._life(box))

    def _life(self, box: _Box) -> ProcessGenerator:
        outcome, env, host = self.outcome, self.env, box.host
        while box.at < len(box.session):
            if host.draining:
                return
            load = box.session[box.at]
            box.in_command, box.began = True, env.now
            yield host.cpu.use(load.run_cpu)
            # what used several CPUs has more seconds of them than of time
            yield env.timeout(max(0.0, load.run_wall - load.run_cpu))
            if self.policy in READS_EFFECTS:
                yield host.cpu.use(self.costs.decide)
            box.in_command = False
            box.at += 1
            box.ended = env.now
            box.turn_ends.append(env.now)
            box.dirty += load.dirty
            box.files += load.files
            box.effects = load.effects if load.cumulative else merged(box.effects, load.effects)
            if load.turn_class > TurnClass.NONE:
                box.needs[box.at] = load.turn_class
            job = self._end_turn(box)
            yield env.timeout(load.think)
            if box.at < len(box.session):
                reply = env.now
                if job is not None and not job.done.triggered:
                    host.promote(job)
                    yield job.done
                outcome.gates.append(env.now - reply)
                outcome.awaited += job is not None
                outcome.hidden += job is not None and env.now == reply
        outcome.ends[box.number] = env.now - box.start

    def _end_turn(self, box: _Box) -> CheckpointJob | None:
        if box.host.draining:
            return self._save(box, box.planned) if box.planned is not None and box.needs else None
        plan = self._decide(box, Occasion.TURN)
        self.outcome.decided.append((box.number, box.at, plan))
        return self._submit(box, plan)

    def _decide(self, box: _Box, occasion: Occasion, most: TurnClass = TurnClass.FULL) -> CheckpointPlan:
        load = box.session[max(0, box.at - 1)]
        request = CheckpointRequest(
            occasion, box.effects, load.references, has_image=box.has_image, most=most,
            images_possible=self.machine.images, memory=int(load.memory), processes=load.processes,
        )  # fmt: skip
        plan = POLICIES[self.policy](request)
        assert isinstance(plan, CheckpointPlan)
        return plan

    # --- checkpoints

    def _submit(self, box: _Box, plan: CheckpointPlan, *, urgent: bool = False) -> CheckpointJob | None:
        if plan.content is TurnClass.NONE:
            return None
        job = CheckpointJob(self.env, f"{box.number}/{box.at}", self._checkpoint(box, plan))
        box.jobs = [*(other for other in box.jobs if not other.done.triggered), job]
        box.host.submit(job, urgent=urgent)
        return job

    def _checkpoint(self, box: _Box, plan: CheckpointPlan) -> ProcessGenerator:
        host, env, turn, chosen = box.host, self.env, box.at, plan.content
        work = self.work_of(box, chosen)
        if chosen is TurnClass.FULL:
            box.dirty = 0.0
        if chosen >= TurnClass.FILES:
            box.files = 0.0
        box.effects = uncovered(box.effects, chosen)
        box.has_image = chosen is TurnClass.FULL or (box.has_image and plan.image)
        began = env.now
        yield host.cpu.use(work.freeze * work.cpu)
        yield host.disk.use(work.freeze * (1 - work.cpu))
        freeze = env.now - began
        yield host.cpu.use(work.after * work.cpu)
        yield host.disk.use(work.after * (1 - work.cpu) + work.written / self.machine.disk)
        box.needs = {number: need for number, need in box.needs.items() if number > turn or need > chosen}
        self.outcome.checkpoints.append(EmulatedCheckpoint(chosen, env.now, freeze, work.written))

    def work_of(self, box: _Box, chosen: TurnClass) -> OperationCost:
        """What a checkpoint of that class takes of this sandbox now."""
        load = box.session[max(0, box.at - 1)]
        return self.costs.checkpoint(
            chosen, memory=load.memory, processes=load.processes, dirty=box.dirty, files=box.files
        )

    # --- losing a host

    def _drain(self, host: TwinHost, seconds: float) -> None:
        host.draining = True
        unsaved: dict[str, _Box] = {}
        for box in self.boxes:
            if box.host is not host or box.life is None or not box.life.is_alive:
                continue
            job = box.jobs[-1] if box.jobs else None
            runs = job is not None and not job.done.triggered and not host.drop(job)
            if runs and not box.in_command:
                continue  # the checkpoint that runs covers it
            if box.needs or box.in_command:
                unsaved[f"{box.number:09}"] = box
        endangered = tuple(self._endangered(name, box) for name, box in unsaved.items())
        order = POLICIES[self.policy](Notice(seconds, self.machine.lanes, endangered))
        assert isinstance(order, SaveOrder)
        for planned in order.saves:
            box = unsaved[planned.name]
            box.planned = planned.most
            if not box.in_command:
                self._save(box, planned.most)

    def _endangered(self, name: str, box: _Box) -> Endangered:
        # a command that runs may yet need everything
        needs = TurnClass.FULL if box.in_command else max(box.needs.values())
        files, full = (self.work_of(box, chosen).seconds for chosen in (TurnClass.FILES, TurnClass.FULL))
        return Endangered(name, needs, files, full)

    def _save(self, box: _Box, most: TurnClass) -> CheckpointJob | None:
        return self._submit(box, self._decide(box, Occasion.NOTICE, most), urgent=True)

    def _die(self, host: TwinHost) -> None:
        for box in self.boxes:
            if box.host is not host or box.life is None or self.outcome.ends[box.number]:
                continue
            kill(box.life)
            for job in box.jobs:
                if not host.drop(job) and job.process is not None:
                    kill(job.process)
            self.outcome.losses.append(Loss(box.at, box.covered, self._again(box)))

    def _again(self, box: _Box) -> float:
        """Seconds that a death now undoes."""
        covered, last = box.covered, self.env.now if box.in_command else box.ended
        if covered == box.at:
            return last - box.began if box.in_command else 0.0
        return last - (box.turn_ends[covered - 1] if covered else box.start)
