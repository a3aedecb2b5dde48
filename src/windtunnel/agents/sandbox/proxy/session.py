"""What the model proxy does for one sandbox: judge its requests, answer them, end its turns.

A request of the main loop is sent to the model at once, or found in the record; in the same moment the turn
ends and its checkpoint starts. Its reply passes the gate when both are done. Everything else (helpers,
counting, listing, what is no model request at all) is passed through as it comes, both ways.
"""

from __future__ import annotations

import asyncio
import contextlib
import sqlite3
import time
from collections import OrderedDict
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import Any
from uuid import uuid4

import httpx
from starlette.types import Receive, Send

from windtunnel.agents.sandbox.proxy.classify import (
    AgentRules,
    Asked,
    Kind,
    Unreadable,
    classify,
    counts_tokens,
    read,
    shape_of,
)
from windtunnel.agents.sandbox.proxy.conversation import Conversation, Entry, Headers, Reply
from windtunnel.agents.sandbox.proxy.events import (
    Bounds,
    Classified,
    Failed,
    ProxyEvent,
    Replayed,
    Turning,
    TurnServed,
    Upstream,
)
from windtunnel.agents.sandbox.proxy.gate import Gate, Window
from windtunnel.agents.sandbox.proxy.upstream import (
    Asking,
    BrokeOff,
    Exchange,
    UpstreamFault,
    asked_upstream,
    reply_headers,
)
from windtunnel.agents.sandbox.proxy.wire import (
    Refused,
    send_fault,
    send_reply,
    send_whole,
    stays_below,
    while_connected,
)

WARNING = "x-windtunnel-checkpoint"
"""Header of a reply that goes out though its turn's checkpoint is not whole: what lacks, and why."""
RETRY = 5
"""Seconds after which to ask again for a reply that is held back."""
WINDOWS_KEPT = 64
READ_ON_LOOP = 64 * 1024
"""Bytes of a body up to which reading it is quicker than starting a thread for it."""


class AgentSession:
    """One sandbox's way to its model. Lives on the event loop."""

    def __init__(
        self,
        box: Turning,
        upstream: Upstream,
        conversation: Conversation,
        client: httpx.AsyncClient,
        *,
        rules: AgentRules,
        bounds: Bounds,
        tell: Callable[[ProxyEvent], None],
    ) -> None:
        self.name = box.name
        self.open = 0
        self._box = box
        self._upstream = upstream
        self._conversation = conversation
        self._client = client
        self._rules = rules
        self._bounds = bounds
        self._tell = tell
        self._gate = Gate(box, seconds=bounds.gate)
        self._windows: OrderedDict[str, Window] = OrderedDict()
        self._under_way: dict[str, Exchange] = {}
        self._writing = asyncio.Lock()
        self._ending = asyncio.Event()
        self._exchanges: set[asyncio.Task[None]] = set()
        self._tasks: set[asyncio.Task[Any]] = set()

    # --- requests
    # ---------------------------------------------------------------------------------------------

    async def answer(self, asking: Asking, receive: Receive, send: Send) -> None:
        """Answer one request, whatever it is."""
        stays_below(self._upstream, asking)
        kind, asked = await self._judge(asking)
        if kind == "main" and asked is not None:
            await self._main(asking, asked, receive, send)
        else:
            await self._serve(receive, self._through(asking, send, self._upstream))

    async def _judge(self, asking: Asking) -> tuple[Kind, Asked | None]:
        if asking.method != "POST" or shape_of(asking.route) is None:
            kind: Kind = "count-tokens" if counts_tokens(asking.route) else "other"
            self._tell(Classified(self.name, "", kind, "its path"))
            return kind, None
        try:
            asked = await self._understood(asking)
        except Unreadable as error:
            self._tell(Classified(self.name, "", "other", f"not understood: {error}"))
            return "other", None
        verdict = classify(asked.outline, self._conversation.known, self._rules)
        self._tell(Classified(self.name, asked.digest, verdict.kind, verdict.reason))
        if verdict.known != self._conversation.known:
            self._conversation.known = verdict.known
            self._write(self._conversation.learn, verdict.known)
        return verdict.kind, asked

    async def _understood(self, asking: Asking) -> Asked:
        headers = dict(asking.headers)

        def understood() -> Asked:
            return read(asking.route, headers, asking.body, limit=self._bounds.body)

        return understood() if len(asking.body) <= READ_ON_LOOP else await asyncio.to_thread(understood)

    async def _through(self, asking: Asking, send: Send, upstream: Upstream) -> None:
        """Pass a request on, and its reply back, without looking at either."""
        started = False
        try:
            async with asked_upstream(self._client, upstream, asking) as response:
                headers = reply_headers(response.headers.multi_items())
                started = True
                await send_reply(send, response.status_code, headers, response.aiter_raw())
        except UpstreamFault as fault:
            self._tell(Failed(self.name, "", str(fault)))
            if not started:
                await send_fault(send, fault.status, fault.kind, str(fault))

    async def _main(self, asking: Asking, asked: Asked, receive: Receive, send: Send) -> None:
        conversation, incarnation = self._conversation, self._conversation.incarnation
        exchange = self._under_way.get(asked.digest)
        entry = exchange.entry if exchange is not None else conversation.find(asked.digest)
        asked_now = False
        if entry is None:
            exchange = self._ask(asking, asked)
            entry, asked_now = exchange.entry, True
        window = self._window(entry)
        if not asked_now:
            self._tell(Replayed(self.name, entry.request, entry.turn, exchange is not None))
        if await self._serve(receive, self._deliver(entry, exchange, window, send)) and entry.complete:
            self._windows.pop(entry.digest, None)
            if conversation.incarnation == incarnation and not entry.aside:
                entry.served = incarnation
                self._write(conversation.serve, entry, incarnation)

    def _ask(self, asking: Asking, asked: Asked) -> Exchange:
        """Send the request to the model, whoever waits for it later."""
        if len(self._under_way) >= self._bounds.open_box:
            raise Refused(503, "overloaded", "too many requests of this sandbox are under way")
        entry = self._conversation.begin(f"{asked.digest[:12]}-{uuid4().hex[:12]}", asked.digest)
        exchange = self._under_way[asked.digest] = Exchange(entry)
        written = self._write(self._conversation.arrived, entry, asked)

        async def record(reply: Reply) -> None:
            await written
            if not written.result() or not await self._write(self._conversation.answered, entry, reply):
                self._tell(Failed(self.name, entry.request, "the reply is not recorded"))

        async def run() -> None:
            try:
                await exchange.run(self._client, self._upstream, asking, self._bounds, record)
            finally:
                if self._under_way.get(asked.digest) is exchange:
                    del self._under_way[asked.digest]
                if not entry.complete:
                    what = exchange.fault or f"the model service answered with status {exchange.status}"
                    self._tell(Failed(self.name, entry.request, what))
                    self._write(self._conversation.drop, entry)

        asking_now = asyncio.create_task(run())
        self._exchanges.add(asking_now)
        asking_now.add_done_callback(self._exchanges.discard)
        return exchange

    def _window(self, entry: Entry) -> Window | None:
        """The window that this reply has to wait for; None when a restored checkpoint covers its turn."""
        window = self._windows.get(entry.digest)
        if window is not None and (window.safe or not window.settled.is_set()):
            return window
        if 0 < entry.turn <= self._conversation.covered:
            return None
        incarnation = self._conversation.incarnation
        # a turn that has ended, and is not kept, is not ended again: its checkpoint is
        ended = window.turn if window is not None else 0

        def placed(window: Window) -> None:
            if self._conversation.incarnation == incarnation:
                entry.turn = window.turn
                self._write(self._conversation.place, entry, window.turn)

        window = self._windows[entry.digest] = self._gate.open(entry.request, placed, ended=ended)
        while len(self._windows) > WINDOWS_KEPT:
            self._windows.popitem(last=False)
        return window

    async def _deliver(
        self, entry: Entry, exchange: Exchange | None, window: Window | None, send: Send
    ) -> None:
        """Wait for the reply and for the checkpoint, and send the one once the other is safe."""
        if exchange is not None:
            await exchange.began.wait()
        think = exchange.think if exchange is not None else 0.0
        warning: Headers = ()
        if window is not None:
            came = time.monotonic()
            if not window.settled.is_set():
                self._spawn(asyncio.to_thread(window.promote))
                await window.settled.wait()
            if window.held:
                words = f"the reply is held back, since its turn is not kept: {window.fault}"
                raise Refused(503, "held", f"{words}; it is recorded, ask again", RETRY)
            warning = ((WARNING, _one_line(window.fault)),) if window.fault else ()
            self._served(entry, window, think, time.monotonic() - came)
        if exchange is None:
            reply = await asyncio.to_thread(self._conversation.reply, entry)
            await send_whole(send, reply.status, reply.headers + warning, reply.body)
            return
        with contextlib.suppress(BrokeOff):
            await send_reply(send, exchange.status, exchange.headers + warning, exchange.chunks())

    def _served(self, entry: Entry, window: Window, think: float, held: float) -> None:
        self._tell(
            TurnServed(self.name, entry.request, window.turn, think, held, window.promoted, window.fault)
        )

    # --- restores
    # ---------------------------------------------------------------------------------------------

    async def restored(self, turn: int) -> None:
        """The sandbox begins anew after ``turn``. Replies under way go to whoever asks for them again."""
        self._gate.abandon("the sandbox was restored meanwhile")
        self._windows.clear()
        await self._change(self._conversation.restored, turn)

    async def rolled_back(self, turn: int) -> None:
        """The sandbox begins anew after ``turn`` and wants other replies than it had."""
        self._gate.abandon("the sandbox was rolled back meanwhile")
        self._windows.clear()
        self._under_way.clear()
        await self._change(self._conversation.rolled_back, turn)

    async def copy_to(self, path: Path) -> None:
        """Write a second record of the conversation, as it is now."""
        await self._change(self._conversation.copy_to, path)

    async def close(self) -> None:
        """End everything under way. A reply that is held for its checkpoint is not let out: the agent asks
        again, and whoever serves the sandbox then gives it from the record."""
        self._ending.set()
        for task in list(self._exchanges):
            task.cancel()
        await asyncio.gather(*self._exchanges, return_exceptions=True)
        await self._gate.close()
        if self._tasks:
            await asyncio.wait(self._tasks, timeout=self._bounds.ending)
        await asyncio.to_thread(self._conversation.close)

    async def _serve(self, receive: Receive, work: Coroutine[Any, Any, None]) -> bool:
        return await while_connected(receive, work, self._ending)

    # --- the record is written in the order of these calls, and never on the loop
    # ---------------------------------------------------------------------------------------------

    def _write(self, change: Callable[..., None], *what: Any) -> asyncio.Task[bool]:
        async def write() -> bool:
            try:
                await self._change(change, *what)
            except (sqlite3.Error, OSError) as error:
                self._tell(Failed(self.name, "", f"the conversation cannot be written: {error}"))
                return False
            return True

        return self._spawn(write())

    async def _change(self, change: Callable[..., None], *what: Any) -> None:
        async with self._writing:
            await asyncio.to_thread(change, *what)

    def _spawn(self, work: Coroutine[Any, Any, Any]) -> asyncio.Task[Any]:
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task


def _one_line(words: str) -> str:
    return " ".join(words.split()).encode("ascii", "replace").decode()[:300].rstrip()
