"""The engine of one emulated host: the live queues, and as many jobs at once as there are workers."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from windtunnel.agents.sandbox.policy import Queues
from windtunnel.engines.events import Wait


@dataclass
class Job:
    """A checkpoint that waits, runs or is done; ``wait`` is for whoever needs its end."""

    name: str
    work: Callable[[Job], None]
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
        self._jobs: dict[str, Job] = {}

    def submit(self, job: Job, *, urgent: bool = False) -> None:
        job.submitted = self._now()
        self._jobs[job.name] = job
        self._queues.add(job.name, urgent=urgent)
        self._hand_out()

    def promote(self, job: Job) -> bool:
        """Somebody waits for the job now; False when it runs already, or is done."""
        return self._queues.promote(job.name)

    def drop(self, job: Job) -> bool:
        """Take a job that has not begun out of the queue; whoever waits for it goes on."""
        if not self._queues.remove(job.name):
            return False
        del self._jobs[job.name]
        job.dropped = True
        job.settle()
        return True

    def finished(self, job: Job) -> None:
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
