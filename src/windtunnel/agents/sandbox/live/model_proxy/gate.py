"""The gate of one sandbox: a reply stays behind it until the checkpoint of its turn is safe.

Each request of the main loop opens a *window* with a generation number. The window runs the end of the turn
in a thread of its own, since that may wait for locks and disks, and settles once: safe, or with a fault in
words. A checkpoint covers all turns before it, so a window that becomes safe releases the older ones too, and
never a newer one.

Whatever the sandbox does, a window settles: every wait has a bound. A turn whose end hangs keeps its thread
until it returns; meanwhile later windows fail at once, so that there is never more than one such thread.
"""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TypeVar

from windtunnel.agents.sandbox.live.model_proxy.events import Checkpointing, OnFailure, Turning

T = TypeVar("T")


@dataclass(eq=False)
class Window:
    """The time between a request of the main loop and the moment its reply may go out."""

    generation: int
    request: str
    opened: float = field(default_factory=time.monotonic)
    turn: int = 0
    fault: str = ""
    promoted: bool = False
    settled: asyncio.Event = field(default_factory=asyncio.Event)
    _pending: Checkpointing | None = None
    _lock: threading.Lock = field(default_factory=threading.Lock)

    @property
    def safe(self) -> bool:
        return self.settled.is_set() and not self.fault

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

    def __init__(self, box: Turning, *, seconds: float, on_failure: OnFailure) -> None:
        self._box = box
        self._seconds = seconds
        self._on_failure = on_failure
        self._generation = 0
        self._open: dict[int, Window] = {}
        self._ending = asyncio.Lock()
        self._in_box = False
        self._tasks: set[asyncio.Task[None]] = set()

    def open(self, request: str, started: Callable[[Window], None] = lambda window: None) -> Window:
        """End the sandbox's turn in the background. ``started`` is told, on the loop, once the turn has its
        number."""
        self._generation += 1
        window = Window(self._generation, request)
        self._open[window.generation] = window
        task = asyncio.create_task(self._run(window, started))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return window

    def abandon(self, why: str) -> None:
        """The sandbox was brought back to an earlier state: what was open says nothing about it."""
        for window in list(self._open.values()):
            self._settle(window, why)

    async def close(self) -> None:
        """Stop waiting; a turn that is ending goes on to its end by itself."""
        for task in list(self._tasks):
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    def _settle(self, window: Window, fault: str = "") -> None:
        if window.settled.is_set():
            return
        if fault:
            window.fault = fault
            del self._open[window.generation]
            window.settled.set()
            return
        for generation in [one for one in self._open if one <= window.generation]:
            self._open.pop(generation).settled.set()

    async def _run(self, window: Window, started: Callable[[Window], None]) -> None:
        deadline = window.opened + self._seconds
        try:
            # turns end in the order of their requests
            async with asyncio.timeout(self._seconds), self._ending:
                if self._in_box:
                    raise TimeoutError
                pending = await self._end_turn(window)
        except TimeoutError:
            self._settle(window, f"the end of the turn did not return within {self._seconds:g} s")
            return
        except Exception as error:
            await self._failed(window, f"the turn could not be ended: {error}", deadline)
            return
        started(window)
        try:
            async with asyncio.timeout_at(_loop_time(deadline)):
                await self._in_thread(lambda: pending.wait(max(deadline - time.monotonic(), 0.0)))
        except TimeoutError:
            self._settle(window, f"the checkpoint was not done after {self._seconds:g} s")
        except Exception as error:
            await self._failed(window, f"the checkpoint failed: {error}", deadline)
        else:
            self._settle(window)

    async def _end_turn(self, window: Window) -> Checkpointing:
        def end() -> Checkpointing:
            try:
                pending = self._box.end_turn(request=window.request)
                window.turn = self._box.turns
            finally:
                self._in_box = False
            window.attach(pending)
            return pending

        self._in_box = True
        return await self._in_thread(end)

    async def _failed(self, window: Window, why: str, deadline: float) -> None:
        if self._on_failure == "retry" and not window.settled.is_set():
            try:
                async with asyncio.timeout_at(_loop_time(deadline)):
                    await self._in_thread(lambda: self._box.checkpoint(full=True))
            except TimeoutError:
                why += f", and a full one was not done within {self._seconds:g} s"
            except Exception as error:
                why += f", and so did a full one: {error}"
            else:
                why = ""
        self._settle(window, why)

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


def _loop_time(deadline: float) -> float:
    """A moment of ``time.monotonic`` on the running loop's clock."""
    return asyncio.get_running_loop().time() + deadline - time.monotonic()
