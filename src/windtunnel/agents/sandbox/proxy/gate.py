"""A reply of the model that is arriving, and the gate of one sandbox, behind which it stays until the
checkpoint of its turn is safe.

Each request of the main loop has a *window*. One thread of the sandbox takes them in order: it ends the turn
and waits for the checkpoint; then the window is safe, with a fault that the policy lets pass, or held back. A
held reply is recorded: whoever asks for it again opens another window, which has the turn's checkpoint made
anew. A window that is not settled in time is held, whatever the thread still does.

A request once sent is read to its end, whether its client still waits or has died: a restored sandbox asks
again, and is given this reply. A reply counts as complete when its last byte is recorded; its closing event
is held back until then, so that an agent never acts on a reply that a restore could not give it again. Of a
stream, everything before the closing event is passed on as it comes.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import httpx

from windtunnel.agents.sandbox.errors import IncompleteError
from windtunnel.agents.sandbox.protocol import PendingTurn
from windtunnel.agents.sandbox.proxy import limits
from windtunnel.agents.sandbox.proxy.upstream import (
    AgentRequest,
    Headers,
    ProxyFault,
    Upstream,
    forward,
    reply_headers,
)

if TYPE_CHECKING:
    from windtunnel.agents.sandbox.box import Box

CLOSING = (b"[DONE]", b"message_stop", b"response.completed", b"response.incomplete", b"response.failed")
"""What the last event of a stream holds, in the shapes that are understood."""
LONGEST = max(map(len, CLOSING))


@dataclass(frozen=True)
class Reply:
    """What the model service answered: status, headers that belong to the end of it, and the bytes."""

    status: int
    headers: Headers
    body: bytes


class ArrivingReply:
    """A reply that is arriving. Lives on the event loop."""

    def __init__(self) -> None:
        self.began = asyncio.Event()
        """Status and headers are there, or a fault before them."""
        self.status = 0
        self.headers: Headers = ()
        self.fault: ProxyFault | None = None
        self._released: list[bytes] = []
        self._withheld: list[bytes] = []
        self._tail = b""
        self._size = 0
        self._ended = False
        self._grown = asyncio.Event()

    async def run(
        self,
        client: httpx.AsyncClient,
        upstream: Upstream,
        request: AgentRequest,
        record: Callable[[Reply], Awaitable[None]],
    ) -> None:
        """Ask, collect, and record."""
        try:
            async with forward(client, upstream, request) as response:
                self.status, self.headers = response.status_code, reply_headers(response)
                self.began.set()
                stream = dict(self.headers).get("content-type", "").startswith("text/event-stream")
                async for chunk in response.aiter_raw():
                    self._take(chunk, stream)
            if 200 <= self.status < 300:
                await record(Reply(self.status, self.headers, b"".join(self._released + self._withheld)))
        except ProxyFault as fault:
            self._fail(fault)
        except BaseException:
            self._fail(ProxyFault(503, "ending", "the model proxy is ending"))
            raise
        finally:
            self._released += self._withheld
            self._withheld, self._ended = [], True
            self._wake()

    async def chunks(self) -> AsyncIterator[bytes]:
        """The body from its beginning, as it comes. Raises ProxyFault where it ends too soon."""
        place = 0
        while True:
            while place < len(self._released):
                place += 1
                yield self._released[place - 1]
            if self._ended:
                if self.fault is not None:
                    raise self.fault
                return
            await self._grown.wait()

    def _take(self, chunk: bytes, stream: bool) -> None:
        self._size += len(chunk)
        if self._size > limits.REPLY:
            raise ProxyFault(502, "reply_too_large", f"the reply is larger than {limits.REPLY} bytes")
        near = self._tail + chunk  # an event may come in several pieces
        self._tail = near[-LONGEST:]
        if self._withheld or not stream or any(mark in near for mark in CLOSING):
            self._withheld.append(chunk)
        else:
            self._released.append(chunk)
            self._wake()

    def _fail(self, fault: ProxyFault) -> None:
        # what was held back stays back: an agent that saw the closing event would act on this reply
        self.fault, self._withheld = fault, []
        self.began.set()

    def _wake(self) -> None:
        """Tell all readers; each waits for the next event from then on."""
        self._grown.set()
        self._grown = asyncio.Event()


@dataclass(eq=False)
class ReplyWindow:
    """The time between a request of the main loop and the moment its reply may go out. ``turn``: 0 until the
    turn has ended. ``fault``: what is wrong with its checkpoint; ``blocked``: the reply is held for that."""

    request: str
    turn: int = 0
    doing: str = "the end of the turn"
    fault: str = ""
    blocked: bool = True
    settled: asyncio.Event = field(default_factory=asyncio.Event)
    _urgent: bool = False
    _pending: PendingTurn | None = None

    @property
    def safe(self) -> bool:
        return self.settled.is_set() and not self.blocked

    def promote(self) -> None:
        """The reply is there: whatever still runs is urgent. May wait for the sandbox's engine."""
        self._urgent = True
        if self._pending is not None and not self._pending.done:
            self._pending.promote()

    def attach(self, pending: PendingTurn) -> None:
        """The checkpoint has been started. Whoever comes second, this or `promote`, knows of both."""
        self._pending = pending
        if self._urgent:
            self.promote()


class Gate:
    """The windows of one sandbox. Its methods are called on the event loop."""

    def __init__(self, box: Box) -> None:
        self._box = box
        self._open: dict[ReplyWindow, asyncio.Task[None]] = {}
        self._thread = ThreadPoolExecutor(1, f"turn-of-{box.name}")

    def open(self, request: str, started: Callable[[ReplyWindow], None], *, ended: int = 0) -> ReplyWindow:
        """End the sandbox's turn in the background. ``started`` is told, on the loop, once the turn has its
        number. ``ended``: the turn has ended with that number, and only wants its checkpoint."""
        window = ReplyWindow(request, ended)

        def ended_by(_: asyncio.Task[None]) -> None:
            self._open.pop(window)
            window.settled.set()

        self._open[window] = asyncio.create_task(self._settle(window, started))
        self._open[window].add_done_callback(ended_by)
        return window

    def close(self, why: str) -> None:
        """Hold what is open back, and open no more; a turn that is ending goes on to its end by itself."""
        for window, task in self._open.items():
            window.fault, window.blocked = why, True
            task.cancel()
        # the thread may wait for a checkpoint that nobody wants any more
        self._thread.shutdown(wait=False)

    async def _settle(self, window: ReplyWindow, started: Callable[[ReplyWindow], None]) -> None:
        loop = asyncio.get_running_loop()

        def placed() -> object:
            return loop.call_soon_threadsafe(started, window)

        try:
            async with asyncio.timeout(limits.GATE):
                kept = await loop.run_in_executor(self._thread, self._keep, window, placed)
        except TimeoutError:
            kept = self._late(window), True
        window.fault, window.blocked = kept

    def _keep(self, window: ReplyWindow, placed: Callable[[], object]) -> tuple[str, bool]:
        """End the turn and wait until it is kept: what is wrong, and whether the reply is held for it."""
        try:
            if window.turn:
                window.doing = "the checkpoint"
                lacks = self._box.checkpoint().lacks
            else:
                pending = self._box.end_turn(request=window.request)
                window.turn, window.doing = self._box.turns, "the checkpoint"
                window.attach(pending)
                placed()
                lacks = pending.wait(limits.GATE).lacks
        except IncompleteError as error:
            return str(error), True
        except TimeoutError:
            return self._late(window), True
        except Exception as error:
            try:
                blocked = not self._box.passes()
            except Exception:
                blocked = True
            return f"{window.doing} failed: {error}", blocked
        return "; ".join(map(str, lacks)), False

    def _late(self, window: ReplyWindow) -> str:
        return f"{window.doing} was not done within {limits.GATE:g} s"
