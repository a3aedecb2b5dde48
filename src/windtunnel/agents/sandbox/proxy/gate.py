"""The gate of one sandbox: a reply stays behind it until the checkpoint of its turn is safe.

Each request of the main loop opens a *window*. One thread of the sandbox takes them in order: it ends the
turn, waits for the checkpoint, and settles the window once: safe, with a fault that the policy lets pass, or
held back. A held reply is recorded: whoever asks for it again opens another window, which has the turn's
checkpoint made anew. A window that is not settled in time is held, whatever the thread still does.
"""

from __future__ import annotations

import asyncio
import contextlib
import queue
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Protocol, TypeAlias

from windtunnel.agents.sandbox.errors import LessError
from windtunnel.agents.sandbox.model import Manifest
from windtunnel.agents.sandbox.protocol import PendingTurn


class Turning(Protocol):
    """What the model proxy needs of a sandbox."""

    @property
    def name(self) -> str: ...

    @property
    def turns(self) -> int: ...

    def end_turn(self, request: str = "") -> PendingTurn: ...

    def checkpoint(self) -> Manifest: ...

    def passes(self) -> bool:
        """Whether the policy lets a turn's reply out though nothing of the turn may be kept."""


@dataclass(eq=False)
class Window:
    """The time between a request of the main loop and the moment its reply may go out. ``turn``: 0 until the
    turn has ended."""

    request: str
    deadline: float
    turn: int = 0
    doing: str = "the end of the turn"
    fault: str = ""
    held: bool = False
    settled: asyncio.Event = field(default_factory=asyncio.Event)
    _urgent: bool = False
    _pending: PendingTurn | None = None
    _lock: threading.Lock = field(default_factory=threading.Lock)

    @property
    def safe(self) -> bool:
        return self.settled.is_set() and not self.held

    def promote(self) -> None:
        """The reply is there: whatever still runs is urgent. May wait for the sandbox's engine."""
        with self._lock:
            self._urgent = True
            pending = self._pending
        if pending is not None and not pending.done:
            pending.promote()

    def attach(self, pending: PendingTurn) -> None:
        """The checkpoint has been started."""
        with self._lock:
            self._pending = pending
            urgent = self._urgent
        if urgent:
            self.promote()


Jobs: TypeAlias = "queue.SimpleQueue[tuple[Window, Callable[[Window], None]] | None]"


class Gate:
    """The windows of one sandbox. Its methods are called on the event loop."""

    def __init__(self, box: Turning, *, seconds: float) -> None:
        self._box = box
        self._seconds = seconds
        self._loop = asyncio.get_running_loop()
        self._open: dict[Window, asyncio.TimerHandle] = {}
        self._jobs = self._worker()

    def open(self, request: str, started: Callable[[Window], None], *, ended: int = 0) -> Window:
        """End the sandbox's turn in the background. ``started`` is told, on the loop, once the turn has its
        number. ``ended``: the turn has ended with that number, and only wants its checkpoint."""
        window = Window(request, time.monotonic() + self._seconds, ended)
        self._open[window] = self._loop.call_later(self._seconds, self._give_up, window)
        self._jobs.put((window, started))
        return window

    def abandon(self, why: str) -> None:
        """The sandbox was brought back to an earlier state: what was open says nothing about it."""
        for window in list(self._open):
            self._settle(window, why, held=True)
        # the thread may wait for a checkpoint that nobody wants any more
        self._jobs.put(None)
        self._jobs = self._worker()

    def close(self) -> None:
        """Stop waiting; a turn that is ending goes on to its end by itself."""
        for timer in self._open.values():
            timer.cancel()
        self._jobs.put(None)

    def _give_up(self, window: Window) -> None:
        self._settle(window, self._late(window), held=True)

    def _late(self, window: Window) -> str:
        return f"{window.doing} was not done within {self._seconds:g} s"

    def _settle(self, window: Window, fault: str, *, held: bool) -> None:
        timer = self._open.pop(window, None)
        if timer is not None:
            timer.cancel()
            window.fault, window.held = fault, held
            window.settled.set()

    def _worker(self) -> Jobs:
        jobs: Jobs = queue.SimpleQueue()

        def work() -> None:
            with contextlib.suppress(RuntimeError):  # the loop has ended, and nobody waits any more
                while (job := jobs.get()) is not None:
                    window, started = job
                    if not window.settled.is_set():
                        fault, held = self._keep(window, started)
                        self._loop.call_soon_threadsafe(partial(self._settle, window, fault, held=held))

        threading.Thread(target=work, name=f"turn-of-{self._box.name}", daemon=True).start()
        return jobs

    def _keep(self, window: Window, started: Callable[[Window], None]) -> tuple[str, bool]:
        """End the turn and wait until it is kept: what is wrong, and whether the reply is held for it."""
        try:
            if window.turn:
                window.doing = "the checkpoint"
                lacks = self._box.checkpoint().lacks
            else:
                pending = self._box.end_turn(request=window.request)
                window.turn, window.doing = self._box.turns, "the checkpoint"
                window.attach(pending)
                self._loop.call_soon_threadsafe(started, window)
                lacks = pending.wait(max(window.deadline - time.monotonic(), 0.0)).lacks
        except LessError as error:
            return str(error), True
        except TimeoutError:
            return self._late(window), True
        except Exception as error:
            try:
                held = not self._box.passes()
            except Exception:
                held = True
            return f"{window.doing} failed: {error}", held
        return "; ".join(map(str, lacks)), False
