"""The engine in a thread of the server's process: jobs go in, what comes of them goes to asyncio's loop.

The thread takes steps while anybody is served, and waits otherwise. A job whose step fails gets the reason.
An error that is no job's (a policy's, the engine's own) ends the thread: every job fails with it, `wrong`,
and the server ends. A native one ends the process. Who started the server starts it again.
"""

from __future__ import annotations

import asyncio
import queue
import threading
import traceback
from collections.abc import Callable
from dataclasses import dataclass

import torch

from windtunnel.base.errors import HostError, LessError, WindtunnelError
from windtunnel.serving.engine.live.loop import EngineJob, Report, ServingEngine, Token

FACTS_EVERY = 0.25
"""Seconds between facts, while there are steps."""
STOP_SECONDS = 10.0
"""How long the step under way may take at the end."""


@dataclass(frozen=True, slots=True)
class Begun:
    """The job is admitted; ``cached`` tokens of its prompt need no computing."""

    job: int
    cached: int


@dataclass(frozen=True, slots=True)
class Over:
    """The job is done, or ``refused`` or ``failed`` for a reason."""

    job: int
    refused: str = ""
    failed: str = ""


Event = Begun | Token | Over


class EngineThread:
    """Runs ``engine`` for the loop of asyncio that it is made in. ``facts``: the latest of the engine;
    ``wrong``: why nothing is served any more."""

    def __init__(self, engine: ServingEngine) -> None:
        self.engine, self.facts = engine, engine.facts()
        self.wrong: WindtunnelError | None = None
        self.ended = asyncio.Event()
        self._loop = asyncio.get_running_loop()
        self._inbox: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._jobs: dict[int, asyncio.Queue[Event]] = {}
        self._threads = torch.get_num_threads()
        self._thread = threading.Thread(target=self._run, name="engine", daemon=True)
        self._thread.start()

    async def close(self) -> None:
        """Ends the thread after the step under way, and all jobs."""
        self._inbox.put(None)
        await asyncio.to_thread(self._thread.join, STOP_SECONDS)
        self._end(self.wrong or HostError("the server is being stopped"))

    def submit(self, job: EngineJob, events: asyncio.Queue[Event]) -> None:
        """What comes of it is put into ``events``, an `Over` at last."""
        self._jobs[job.id] = events
        if self.wrong is not None:
            self._over(job.id, failed=str(self.wrong))
        self._inbox.put(lambda: self.engine.add(job))

    def cancel(self, job: int) -> None:
        """Nobody waits for it any longer."""
        if self._jobs.pop(job, None) is not None:
            self._inbox.put(lambda: self.engine.cancel(job))

    def end(self, job: int, unit: int) -> None:
        """The unit needs no more tokens."""
        self._inbox.put(lambda: self.engine.end((job, unit)))

    # in the thread

    def _run(self) -> None:
        wrong: WindtunnelError
        try:
            torch.set_num_threads(self._threads)  # which a thread has of its own
            self._serve()
            return
        except WindtunnelError as error:  # of a user's policy
            wrong = error
        except Exception as error:
            what = f"serve: the engine failed, {type(error).__name__}: {error}; start the server again"
            wrong = LessError(what, traceback.format_exc())
        self._loop.call_soon_threadsafe(self._end, wrong)

    def _serve(self) -> None:
        engine, facts_at = self.engine, 0.0
        while True:
            while not self._inbox.empty() or not engine.busy:
                message = self._inbox.get()
                if message is None:
                    return
                message()
            report, now = engine.step(), engine.clock()
            facts = None
            if now - facts_at > FACTS_EVERY or not engine.busy:
                facts, facts_at = engine.facts(), now
            self._loop.call_soon_threadsafe(self._deliver, report, facts)

    # in the loop

    def _deliver(self, report: Report, facts: dict[str, float] | None) -> None:
        self.facts = facts or self.facts
        news: list[Event] = [*map(Begun, report.cached, report.cached.values()), *report.tokens]
        for event in news:
            if (events := self._jobs.get(event.job)) is not None:
                events.put_nowait(event)
        for number in report.finished:
            self._over(number)
        for number, why in report.refused:
            self._over(number, refused=why)
        for number, why in report.failed:
            self._over(number, failed=why)

    def _over(self, number: int, *, refused: str = "", failed: str = "") -> None:
        if (events := self._jobs.pop(number, None)) is not None:
            events.put_nowait(Over(number, refused, failed))

    def _end(self, wrong: WindtunnelError) -> None:
        self.wrong = wrong
        for number in list(self._jobs):
            self._over(number, failed=str(wrong))
        self.ended.set()
