"""Hosts full of sandboxes that play their sessions, checkpoint while the model thinks, and lose their hosts.

A sandbox runs a turn's command on the shared CPUs of its host, decides, hands a checkpoint to the engine,
and waits for the model's reply; with the reply it waits for the checkpoint, if that is still under way (the
gate).
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

from windtunnel.agents.sandbox.costs import SandboxCosts, Work
from windtunnel.agents.sandbox.model import Effects, TurnClass
from windtunnel.agents.sandbox.policy import (
    POLICIES,
    READS_EFFECTS,
    Endangered,
    Keep,
    Look,
    Notice,
    Occasion,
    SaveOrder,
)
from windtunnel.agents.sandbox.twin.hosts import (
    Arm,
    CheckpointJob,
    EmulatedHost,
    Loss,
    Made,
    Scheduler,
    SessionsOutcome,
)
from windtunnel.agents.sandbox.twin.loads import Session, merged, uncovered
from windtunnel.engines.events import (
    Environment,
    Process,
    ProcessGenerator,
    Shared,
    at,
    kill,
    run_through,
)


@dataclass
class _Host:
    cpu: Shared
    disk: Shared
    network: Shared
    engine: Scheduler
    draining: bool = False


@dataclass
class _Box:
    number: int
    session: Session
    host: _Host
    start: float
    at: int = 0
    """Turns whose command has ended."""
    ended: float = 0.0
    """When the last of them did."""
    in_command: bool = False
    began: float = 0.0
    """When the newest command did."""
    needs: dict[int, TurnClass] = field(default_factory=dict)
    """Turns that no checkpoint covers yet, with what they need."""
    dirty: float = 0.0
    files: float = 0.0
    effects: Effects = field(default_factory=Effects)
    """Since the last checkpoint of each part."""
    has_image: bool = True
    """The newest checkpoint has."""
    pending: CheckpointJob | None = None
    planned: TurnClass | None = None
    life: Process | None = None
    jobs: list[CheckpointJob] = field(default_factory=list)
    turn_ends: list[float] = field(default_factory=list)

    @property
    def kept(self) -> int:
        """Turns that a restore brings back."""
        return min(self.needs) - 1 if self.needs else self.at


class SandboxWorld:
    """Sandboxes spread over hosts in turn. Give it failures and notices before ``run``."""

    def __init__(
        self,
        machine: EmulatedHost,
        costs: SandboxCosts,
        arm: Arm,
        sessions: Sequence[Session],
        starts: Sequence[float],
        *,
        hosts: int = 1,
    ) -> None:
        self.env = Environment()
        self.machine, self.costs, self.arm = machine, costs, arm
        self.outcome = SessionsOutcome(ends=[0.0] * len(sessions))
        self.hosts = [self._new_host() for _ in range(hosts)]
        self.boxes = [
            _Box(number, session, self.hosts[number % hosts], start, has_image=machine.images)
            for number, (session, start) in enumerate(zip(sessions, starts, strict=True))
        ]
        for box in self.boxes:
            at(self.env, box.start, partial(self._begin, box))

    def run(self, until: float = float("inf")) -> SessionsOutcome:
        """Let it happen; what is under way at ``until`` is left out."""
        run_through(self.env, until)
        self.outcome.cpu_served = sum(host.cpu.served for host in self.hosts)
        return self.outcome

    def kill(self, place: int, when: float, *, detect: float = 5.0, replace: bool = True) -> None:
        """Host number ``place`` dies at that time. With ``replace`` a new one is there at once, and the
        sandboxes are brought back on the hosts in turn, after ``detect`` seconds; checkpoints lie on storage
        that outlives the host and come over the network."""
        at(self.env, when, lambda: self._die(place, detect, replace))

    def notice(self, place: int, when: float, seconds: float) -> None:
        """Host number ``place`` is told at that time that it goes in so many seconds: no further command
        starts, and what is not covered is saved in the order of the policy."""
        at(self.env, when, lambda: self._drain(place, seconds))

    # --- a sandbox's life

    def _new_host(self) -> _Host:
        env, machine = self.env, self.machine
        return _Host(
            cpu=Shared(env, machine.cores, 1.0),
            disk=Shared(env, self.costs.disk_lanes, 1.0),
            network=Shared(env, machine.network, machine.network),
            engine=Scheduler(env, machine.lanes, fifo=self.arm.fifo),
        )

    def _begin(self, box: _Box) -> None:
        box.life = self.env.process(self._life(box))

    def _life(self, box: _Box) -> ProcessGenerator:
        outcome, env = self.outcome, self.env
        while box.at < len(box.session):
            host = box.host
            if host.draining:
                return
            load = box.session[box.at]
            box.in_command, box.began = True, env.now
            yield host.cpu.use(load.run_cpu)
            # what used several CPUs has more seconds of them than of time
            yield env.timeout(max(0.0, load.run_wall - load.run_cpu))
            if self.arm.policy in READS_EFFECTS:
                yield host.cpu.use(self.costs.decide)
            box.in_command = False
            box.at += 1
            box.ended = env.now
            box.turn_ends.append(env.now)
            box.dirty += load.dirty
            box.files += load.files
            box.effects = load.effects if load.seen_whole else merged(box.effects, load.effects)
            if load.turn_class > TurnClass.NONE:
                box.needs[box.at] = load.turn_class
            job = self._end_turn(box)
            yield env.timeout(load.think)
            if box.at < len(box.session):
                reply = env.now
                if job is not None and not job.done.triggered:
                    host.engine.promote(job)
                    yield job.done
                outcome.gates.append(env.now - reply)
                outcome.asked += job is not None
                outcome.hidden += job is not None and env.now == reply
        outcome.ends[box.number] = env.now - box.start

    def _end_turn(self, box: _Box) -> CheckpointJob | None:
        if box.host.draining:
            return self._save(box, box.planned) if box.planned is not None and box.needs else None
        keep = self._decide(box, Occasion.TURN)
        self.outcome.decided.append((box.number, box.at, keep))
        return self._submit(box, keep)

    def _decide(self, box: _Box, occasion: Occasion, most: TurnClass = TurnClass.FULL) -> Keep:
        load = box.session[max(0, box.at - 1)]
        look = Look(
            occasion,
            box.effects,
            load.references,
            has_image=box.has_image,
            images_possible=self.machine.images,
            most=most,
            memory=int(load.memory),
            processes=load.processes,
            rules=self.arm.rules,
        )
        keep = POLICIES[self.arm.policy](look)
        assert isinstance(keep, Keep)
        return keep

    # --- checkpoints

    def _submit(self, box: _Box, keep: Keep, *, urgent: bool = False) -> CheckpointJob | None:
        if keep.made is TurnClass.NONE:
            return None
        job = CheckpointJob(self.env, f"{box.number}/{box.at}", self._checkpoint(box, keep, self.env.now))
        box.pending = job
        box.jobs = [*(one for one in box.jobs if not one.done.triggered), job]
        box.host.engine.submit(job, urgent=urgent)
        return job

    def _checkpoint(self, box: _Box, keep: Keep, submitted: float) -> ProcessGenerator:
        host, env, turn, chosen = box.host, self.env, box.at, keep.made
        work = self.work_of(box, chosen)
        memory = box.session[turn - 1].memory
        if chosen is TurnClass.FULL:
            box.dirty = 0.0
        if chosen >= TurnClass.FILES:
            box.files = 0.0
        box.effects = uncovered(box.effects, chosen)
        box.has_image = chosen is TurnClass.FULL or (box.has_image and keep.image)
        began = env.now
        yield host.cpu.use(work.freeze * work.cpu)
        yield host.disk.use(work.freeze * (1 - work.cpu))
        freeze = env.now - began
        yield host.cpu.use(work.after * work.cpu)
        yield host.disk.use(work.after * (1 - work.cpu) + work.written / self.machine.disk)
        box.needs = {number: need for number, need in box.needs.items() if number > turn or need > chosen}
        self.outcome.made.append(
            Made(box.number, turn, chosen, env.now, freeze, env.now - submitted, work.written, memory)
        )

    def work_of(self, box: _Box, chosen: TurnClass) -> Work:
        """What a checkpoint of that class takes of this sandbox now."""
        load = box.session[max(0, box.at - 1)]
        return self.costs.checkpoint(
            chosen, memory=load.memory, processes=load.processes, dirty=box.dirty, files=box.files
        )

    # --- losing a host

    def _drain(self, place: int, seconds: float) -> None:
        host = self.hosts[place]
        host.draining = True
        unsaved: dict[str, _Box] = {}
        for box in self._running(host):
            job = box.pending
            runs = job is not None and not job.done.triggered and not host.engine.drop(job)
            if runs and not box.in_command:
                continue  # the checkpoint that runs covers it
            if box.needs or box.in_command:
                unsaved[f"{box.number:09}"] = box
        notice = Notice(
            seconds,
            self.machine.lanes,
            tuple(self._endangered(name, box) for name, box in unsaved.items()),
        )
        order = POLICIES[self.arm.policy](notice)
        assert isinstance(order, SaveOrder)
        for planned in order.saves:
            box = unsaved[planned.name]
            box.planned = planned.most
            if not box.in_command:
                self._save(box, planned.most)

    def _endangered(self, name: str, box: _Box) -> Endangered:
        # a command that runs may yet need everything
        needs = TurnClass.FULL if box.in_command else max(box.needs.values())
        files, full = (self.work_of(box, made).seconds for made in (TurnClass.FILES, TurnClass.FULL))
        return Endangered(name, needs, files, full)

    def _save(self, box: _Box, most: TurnClass) -> CheckpointJob | None:
        return self._submit(box, self._decide(box, Occasion.NOTICE, most), urgent=True)

    def _running(self, host: _Host) -> list[_Box]:
        return [box for box in self.boxes if box.host is host and box.life is not None and box.life.is_alive]

    def _die(self, place: int, detect: float, replace: bool) -> None:
        host, now = self.hosts[place], self.env.now
        lost = [box for box in self.boxes if box.host is host and self._unfinished(box)]
        if replace:
            self.hosts[place] = self._new_host()
        for order, box in enumerate(lost):
            assert box.life is not None
            kill(box.life)
            for job in box.jobs:
                if not host.engine.drop(job) and job.process is not None:
                    kill(job.process)
            kept, done = box.kept, box.at
            loss = Loss(box.number, now, done, kept, self._again(box))
            if not replace:
                self.outcome.losses.append(loss)
                continue
            box.at, box.needs = kept, {}
            box.effects, box.has_image = Effects(), self.machine.images
            box.turn_ends = box.turn_ends[:kept]
            box.pending, box.planned, box.in_command = None, None, False
            box.jobs = []
            box.host = self.hosts[(place + order) % len(self.hosts)]
            box.life = self.env.process(self._recover(box, loss, detect))

    def _again(self, box: _Box) -> float:
        """Seconds that a death now undoes."""
        kept, last = box.kept, self.env.now if box.in_command else box.ended
        if kept == box.at:
            return last - box.began if box.in_command else 0.0
        return last - (box.turn_ends[kept - 1] if kept else box.start)

    def _unfinished(self, box: _Box) -> bool:
        return self.outcome.ends[box.number] == 0.0 and box.life is not None

    def _recover(self, box: _Box, loss: Loss, detect: float) -> ProcessGenerator:
        host, costs = box.host, self.costs
        yield self.env.timeout(detect)
        if loss.kept:
            load = box.session[loss.kept - 1]
            work = costs.bring_back(memory=load.memory, processes=load.processes)
            yield host.network.use(costs.new_per_byte * (costs.image_base + load.memory))
        else:
            work = Work(after=costs.create, cpu=costs.restore_cpu)
        yield host.cpu.use(work.seconds * work.cpu)
        yield host.disk.use(work.seconds * (1 - work.cpu))
        recovered = self.env.now - loss.at
        self.outcome.losses.append(Loss(loss.box, loss.at, loss.turns, loss.kept, loss.seconds, recovered))
        yield from self._life(box)
