"""One emulated host and its engine, and what comes out of an emulation: arms, checkpoints, losses.

The engine hands jobs to free workers in the order that the live queues give.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from windtunnel.agents.sandbox.model import TurnClass
from windtunnel.agents.sandbox.policy import DEFAULT, Keep, PolicyName, Queues, Rules
from windtunnel.engines.events import Wait


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


@dataclass
class CheckpointJob:
    """A checkpoint that waits, runs or is done; ``wait`` is for whoever needs its end."""

    name: str
    work: Callable[[CheckpointJob], None]
    """Starts it; it must call ``Scheduler.finished`` at its end."""
    submitted: float = 0.0
    started: float = -1.0
    finished: float = -1.0
    done: bool = False
    dropped: bool = False
    """Taken out of the queue before it began."""
    _waiting: list[Callable[[], None]] = field(default_factory=list)

    def wait(self) -> Wait:
        def wait(resume: Callable[[], None]) -> None:
            if self.done:
                resume()
            else:
                self._waiting.append(resume)

        return wait

    def settle(self) -> None:
        self.done = True
        waiting, self._waiting = self._waiting, []
        for resume in waiting:
            resume()


class Scheduler:
    """Hands jobs to free workers in the order that the live queues give."""

    def __init__(self, now: Callable[[], float], workers: int, *, fifo: bool = False) -> None:
        self._now = now
        self._free = workers
        self._queues = Queues(fifo=fifo)
        self._jobs: dict[str, CheckpointJob] = {}

    def submit(self, job: CheckpointJob, *, urgent: bool = False) -> None:
        job.submitted = self._now()
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
        job.dropped = True
        job.settle()
        return True

    def finished(self, job: CheckpointJob) -> None:
        job.finished = self._now()
        self._free += 1
        job.settle()
        self._hand_out()

    def _hand_out(self) -> None:
        while self._free and (name := self._queues.take()) is not None:
            job = self._jobs.pop(name)
            self._free -= 1
            job.started = self._now()
            job.work(job)
