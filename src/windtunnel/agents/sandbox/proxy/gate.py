"""The gate of one sandbox: a reply stays behind it until the checkpoint of its turn is safe.

Each request of the main loop opens a *window* with a generation number. The window runs the end of the turn
in a thread of its own, since that may wait for locks and disks, and settles once: safe, with a fault that the
policy lets pass, or held back. A held reply is recorded: whoever asks for it again opens another window,
which has the turn's checkpoint made anew. A checkpoint covers all turns before it, so a window that becomes
safe releases the older ones too, and never a newer one.

Whatever the sandbox does, a window settles: every wait has a bound. A call of the sandbox that hangs keeps
its thread until it returns; meanwhile later windows fail at once, so that there is never more than one such
thread.
"""

from __future__ import annotations

import asyncio
import contextlib
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TypeVar

from windtunnel.agents.sandbox.errors import LessError
from windtunnel.agents.sandbox.proxy.events import Checkpointing, Turning

T = TypeVar("T")


@dataclass(eq=False)
class Window:
    """The time between a request of the main loop and the moment its reply may go out."""

    generation: int
    request: str
    opened: float = field(default_factory=time.monotonic)
    turn: int = 0
    fault: str = ""
    held: bool = False
    promoted: bool = False
    settled: asyncio.Event = field(default_factory=asyncio.Event)
    _pending: Checkpointing | None = None
    _lock: threading.Lock = field(default_factory=threading.Lock)

    @property
    def safe(self) -> bool:
        return self.settled.is_set() and not self.held

    def promote(self) -> None:
        """The reply is there: whatever still runs is urgent. May block as long as the sandbox's own
        ``promote`` does, so it is called in a thread."""
        with self._lock:
            if self.promoted or self.settled.is_set():
                return
            self.promoted = True
            pending = self._pending
        if pending is not None and not pending.done:
            pending.promote()

    def attach(self, pending: Checkpointing) -> None:
        """The checkpoint has been started."""
        with self._lock:
            self._pending = pending
            urgent = self.promoted
        if urgent and not pending.done:
            pending.promote()


class Gate:
    """The windows of one sandbox. Its methods are called on the event loop."""

    def __init__(self, box: Turning, *, seconds: float) -> None:
        self._box = box
        self._seconds = seconds
        self._generation = 0
        self._open: dict[int, Window] = {}
        self._ending = asyncio.Lock()
        self._in_box = False
        self._tasks: set[asyncio.Task[None]] = set()

    def open(
        self, request: str, started: Callable[[Window], None] = lambda window: None, *, ended: int = 0
    ) -> Window:
        """End the sandbox's turn in the background. ``started`` is told, on the loop, once the turn has its
        number. ``ended``: the turn has ended with that number, and only wants its checkpoint."""
        self._generation += 1
        window = Window(self._generation, request, turn=ended)
        self._open[window.generation] = window
        task = asyncio.create_task(self._run(window, started))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return window

    def abandon(self, why: str) -> None:
        """The sandbox was brought back to an earlier state: what was open says nothing about it."""
        for window in list(self._open.values()):
            self._settle(window, why, held=True)

    async def close(self) -> None:
        """Stop waiting; a turn that is ending goes on to its end by itself."""
        for task in list(self._tasks):
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    def _settle(self, window: Window, fault: str = "", *, held: bool = False) -> None:
        if window.settled.is_set():
            return
        window.fault, window.held = fault, held
        if held:
            del self._open[window.generation]
            window.settled.set()
            return
        for generation in [one for one in self._open if one <= window.generation]:
            self._open.pop(generation).settled.set()

    async def _run(self, window: Window, started: Callable[[Window], None]) -> None:
        deadline, doing = window.opened + self._seconds, "the end of the turn"
        allowed = False
        try:
            async with asyncio.timeout(self._seconds):
                covering = None
                async with self._ending:  # turns end in the order of their requests
                    if window.turn:
                        doing = "the checkpoint"
                        covering = await self._in_box_alone(self._box.checkpoint)
                    else:
                        pending = await self._in_box_alone(lambda: self._end_turn(window))
                if covering is None:
                    started(window)
                    doing = "the checkpoint"
                    left = max(deadline - time.monotonic(), 0.0)
                    covering = await self._in_thread(lambda: pending.wait(left))
        except LessError as error:
            self._settle(window, str(error), held=True)
            return
        except TimeoutError:
            fault = f"{doing} was not done within {self._seconds:g} s"
        except Exception as error:
            fault = f"{doing} failed: {error}"
        else:
            self._settle(window, "; ".join(map(str, covering.lacks)))
            return
        with contextlib.suppress(Exception):
            async with asyncio.timeout(self._seconds):
                allowed = await self._in_thread(self._box.passes)
        self._settle(window, fault, held=not allowed)

    def _end_turn(self, window: Window) -> Checkpointing:
        pending = self._box.end_turn(request=window.request)
        window.turn = self._box.turns
        window.attach(pending)
        return pending

    async def _in_box_alone(self, work: Callable[[], T]) -> T:
        """Run ``work``, which the sandbox may hold up, where no other such work is under way."""
        if self._in_box:
            raise TimeoutError

        def alone() -> T:
            try:
                return work()
            finally:
                self._in_box = False

        self._in_box = True
        return await self._in_thread(alone)

    async def _in_thread(self, work: Callable[[], T]) -> T:
        """Run ``work`` in a thread that may be left behind."""
        loop = asyncio.get_running_loop()
        answer: asyncio.Future[T] = loop.create_future()

        def tell(result: T | None, error: Exception | None) -> None:
            if answer.done():
                return
            if error is not None:
                answer.set_exception(error)
            else:
                answer.set_result(result)  # type: ignore[arg-type]

        def run() -> None:
            result, fault = None, None
            try:
                result = work()
            except Exception as error:
                fault = error
            try:
                loop.call_soon_threadsafe(tell, result, fault)
            except RuntimeError:
                return  # the loop has ended, and nobody waits any more

        threading.Thread(target=run, name=f"turn-of-{self._box.name}", daemon=True).start()
        return await answer
