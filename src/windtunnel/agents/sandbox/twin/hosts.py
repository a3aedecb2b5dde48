"""One emulated host and its engine, and what comes out of an emulation: arms, checkpoints, losses.

The engine hands jobs to free workers in the order that the live queues give.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from windtunnel.agents.sandbox.model import TurnClass
from windtunnel.agents.sandbox.policy import DEFAULT, Keep, PolicyName, Queues, Rules, picked
from windtunnel.engines.events import Environment, Process, ProcessGenerator


@dataclass(frozen=True)
class Arm:
    """A policy with its rules, and whether those who are waited for go first (not with ``fifo``)."""

    name: str
    policy: PolicyName
    fifo: bool = False
    rules: Rules = DEFAULT


ARMS = {
    arm.name: arm
    for arm in (
        Arm("conversation", "conversation"),
        Arm("files", "files"),
        Arm("full", "full"),
        Arm("full-fifo", "full", fifo=True),
        Arm("semantic", "semantic"),
        Arm("semantic-fifo", "semantic", fifo=True),
    )
}


@dataclass(frozen=True)
class EmulatedHost:
    """One host of the emulation; all are alike. Bytes, and bytes a second. ``workers``: None: one a core.
    ``images``: processes can be kept."""

    cores: int = 32
    memory: float = 256e9
    disk: float = 1e9
    network: float = 1.25e9
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

    box: int
    at: float
    turns: int
    kept: int
    seconds: float
    recovered: float = 0.0
    """Seconds from the host's death until the sandbox runs again."""


@dataclass(frozen=True)
class Made:
    """One checkpoint that exists. ``freeze`` and ``seconds`` (since it was asked for) as they turned out."""

    box: int
    turn: int
    turn_class: TurnClass
    at: float
    freeze: float
    seconds: float
    written: float
    memory: float


@dataclass
class SessionsOutcome:
    """What happened in a run. ``gates``: for each turn but the last of a session, seconds that the reply
    waited for the checkpoint. ``asked`` and ``hidden``: checkpoints of those turns, and how many were safe
    when the reply came. ``ends``: seconds that each session took. ``decided``: what the policy said of each
    turn's end, with the sandbox and the turn."""

    ends: list[float] = field(default_factory=list)
    gates: list[float] = field(default_factory=list)
    asked: int = 0
    hidden: int = 0
    made: list[Made] = field(default_factory=list)
    losses: list[Loss] = field(default_factory=list)
    cpu_served: float = 0.0
    decided: list[tuple[int, int, Keep]] = field(default_factory=list)


class CheckpointJob:
    """A checkpoint that waits for a worker, runs or is done; ``done`` is for whoever needs its end, which
    comes too when it is taken out of the queue."""

    def __init__(self, env: Environment, name: str, activity: ProcessGenerator) -> None:
        self.name = name
        self.activity = activity
        self.done = env.event()
        self.process: Process | None = None


class Scheduler:
    """Hands jobs to free workers in the order that the live queues give."""

    def __init__(self, env: Environment, workers: int, *, fifo: bool = False) -> None:
        self._env = env
        self._free = workers
        self._queues = Queues(fifo=fifo)
        self._jobs: dict[str, CheckpointJob] = {}

    def submit(self, job: CheckpointJob, *, urgent: bool = False) -> None:
        self._jobs[job.name] = job
        self._queues.add(job.name, urgent=urgent)
        self._hand_out()

    def promote(self, job: CheckpointJob) -> bool:
        """Somebody waits for the job now; False when it runs already, or is done."""
        return self._queues.promote(job.name)

    def drop(self, job: CheckpointJob) -> bool:
        """Take a job that has not begun out of the queue; whoever waits for it goes on."""
        if not self._queues.remove(job.name):
            return False
        del self._jobs[job.name]
        job.done.succeed()
        return True

    def _hand_out(self) -> None:
        while self._free and (seen := self._queues.seen()) is not None:
            self._free -= 1
            job = self._jobs.pop(self._queues.take(picked(seen)))
            job.process = self._env.process(self._work(job))

    def _work(self, job: CheckpointJob) -> ProcessGenerator:
        yield from job.activity
        self._free += 1
        job.done.succeed()
        self._hand_out()
