"""The engine: one for a host, it runs the checkpoint jobs of all its sandboxes.

Workers are as many as CPUs: more would only stretch the tails, because a checkpoint is bound by the CPU and
the disk. A job waits in the normal queue until somebody waits for it (the model's reply is there): then it is
promoted to the urgent one. A sandbox has at most one job at a time, since its next turn waits for the job of
the last one; that is the back-pressure, and it bounds the queue by the number of sandboxes.

Source: Crab (arXiv 2604.28138), section 5.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future, wait

from windtunnel.agents.sandbox.model import Turn
from windtunnel.agents.sandbox.policy import Pick, Queued, Queues, picked


class EngineClosed(Exception):
    """The host was closed before the job could run."""


class Pending:
    """The checkpoint of a turn, under way. ``finished``: when it was settled, by the monotonic clock;
    ``reported``: its fault was raised to somebody."""

    def __init__(self, box: str, job: str = "", engine: Engine | None = None) -> None:
        self.box, self.job, self.finished, self.reported = box, job, 0.0, False
        self._engine = engine
        self._outcome: Future[Turn] = Future()

    @property
    def done(self) -> bool:
        return self._outcome.done()

    def wait(self, timeout: float | None = None) -> Turn:
        """The turn's line of the log once its checkpoint is safe.

        Raises TimeoutError when it is not after ``timeout`` seconds, and whatever the checkpoint failed with.
        """
        if not wait((self._outcome,), timeout).done:
            raise TimeoutError(f"the checkpoint of sandbox {self.box} is not done after {timeout} s")
        self.reported |= self._outcome.exception() is not None
        return self._outcome.result()

    def promote(self) -> None:
        """Somebody waits for this job now."""
        if self._engine is not None and not self.done:
            self._engine.promote(self)

    def settle(self, outcome: Turn | BaseException) -> None:
        """End it: with the turn's line, or with the fault."""
        self.finished = time.monotonic()
        if isinstance(outcome, BaseException):
            self._outcome.set_exception(outcome)
        else:
            self._outcome.set_result(outcome)


def settled(box: str, turn: Turn) -> Pending:
    """A pending checkpoint that has nothing left to do."""
    pending = Pending(box)
    pending.settle(turn)
    return pending


class Engine:
    """Runs jobs on a few threads, in the order that ``decide`` gives.

    ``chosen`` is told of each choice among several jobs, with the sandbox that comes next.
    """

    def __init__(
        self,
        workers: int | None = None,
        *,
        decide: Callable[[Queued], Pick] = picked,
        chosen: Callable[[str, Queued, Pick], None] = lambda *_: None,
    ) -> None:
        self._decide, self._chosen = decide, chosen
        self.workers = workers or os.cpu_count() or 1
        self._queues = Queues()
        self._jobs: dict[str, tuple[Pending, Callable[[], Turn]]] = {}
        self._changed = threading.Condition()
        self._count = 0
        self._closing = False
        self._threads = [
            threading.Thread(target=self._work, name=f"sandbox-engine-{n}", daemon=True)
            for n in range(self.workers)
        ]
        for thread in self._threads:
            thread.start()

    def submit(self, box: str, work: Callable[[], Turn], *, urgent: bool = False) -> Pending:
        """Queue ``work``; what it returns or raises settles the pending checkpoint."""
        with self._changed:
            if self._closing:
                raise EngineClosed("the host is being closed")
            self._count += 1
            pending = Pending(box, f"{box}/{self._count}", self)
            self._jobs[pending.job] = (pending, work)
            self._queues.add(pending.job, urgent=urgent)
            self._changed.notify()
        return pending

    def promote(self, pending: Pending) -> None:
        with self._changed:
            self._queues.promote(pending.job)

    def waiting(self) -> int:
        """Jobs that no worker has taken yet."""
        with self._changed:
            return len(self._queues)

    def close(self) -> None:
        """Finish what is queued, then end the workers."""
        with self._changed:
            self._closing = True
            self._changed.notify_all()
        for thread in self._threads:
            thread.join()

    def _work(self) -> None:
        while True:
            with self._changed:
                while (queued := self._queues.queued()) is None:
                    if self._closing:
                        return
                    self._changed.wait()
                pick = self._decide(queued)
                pending, work = self._jobs.pop(self._queues.take(pick))
            try:
                if len(queued.urgent) + len(queued.normal) > 1:
                    self._chosen(pending.box, queued, pick)
                pending.settle(work())
            except BaseException as error:  # it belongs to whoever waits for the job
                pending.settle(error)
