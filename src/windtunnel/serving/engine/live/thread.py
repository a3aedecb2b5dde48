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
from collections.abc import Callable, Iterable

import torch

from windtunnel.base.errors import HostError, LessError, WindtunnelError
from windtunnel.serving.engine.live.loop import EngineJob, Event, Over, ServingEngine

STOP_SECONDS = 10.0
"""How long the step under way may take at the end."""


class EngineThread:
    """Runs ``engine`` for the loop of asyncio that it is made in. ``wrong``: why nothing is served now."""

    def __init__(self, engine: ServingEngine) -> None:
        self.engine = engine
        self.wrong: WindtunnelError | None = None
        self.at_end: Callable[[], object] = lambda: None
        """What is called when the thread has ended."""
        self._loop = asyncio.get_running_loop()
        self._inbox: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._jobs: dict[int, Callable[[Event], None]] = {}
        self._threads = torch.get_num_threads()
        self._thread = threading.Thread(target=self._run, name="engine", daemon=True)
        self._thread.start()

    async def close(self) -> None:
        """Ends the thread after the step under way, and all jobs."""
        self._inbox.put(None)
        await asyncio.to_thread(self._thread.join, STOP_SECONDS)
        self._end(self.wrong or HostError("the server is being stopped"))

    def submit(self, job: EngineJob, take: Callable[[Event], None]) -> None:
        """What comes of it is given to ``take``, an `Over` at last."""
        self._jobs[job.id] = take
        if self.wrong is not None:
            self._deliver([Over(job.id, failed=str(self.wrong))])
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
        try:
            torch.set_num_threads(self._threads)  # which a thread has of its own
            while True:
                while not self._inbox.empty() or not self.engine.busy:
                    change = self._inbox.get()
                    if change is None:
                        return
                    change()
                self._loop.call_soon_threadsafe(self._deliver, self.engine.step())
        except WindtunnelError as error:  # of a user's policy
            wrong = error
        except Exception as error:
            message = f"serve: the engine failed, {type(error).__name__}: {error}; start the server again"
            wrong = LessError(message, traceback.format_exc())
        self._loop.call_soon_threadsafe(self._end, wrong)

    # in the loop

    def _deliver(self, events: Iterable[Event]) -> None:
        for event in events:
            taker_of = self._jobs.pop if isinstance(event, Over) else self._jobs.get
            if (take := taker_of(event.job, None)) is not None:
                take(event)

    def _end(self, wrong: WindtunnelError) -> None:
        self.wrong = wrong
        self._deliver([Over(number, failed=str(wrong)) for number in self._jobs])
        self.at_end()
