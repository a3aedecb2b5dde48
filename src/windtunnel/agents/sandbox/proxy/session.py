"""What the model proxy does for one sandbox: judge its requests, answer them, end its turns.

A request of the main loop is sent to the model at once, or found in the record; in the same moment the turn
ends and its checkpoint starts. Its reply passes the gate when both are done. Everything else (helpers,
counting, listing, what is no model request at all) is passed through as it comes, both ways.
"""

from __future__ import annotations

import asyncio
import logging
import socket
import sqlite3
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar
from uuid import uuid4

import httpx
import uvicorn
from starlette.types import Message, Receive, Scope, Send

from windtunnel.agents.sandbox.proxy import limits
from windtunnel.agents.sandbox.proxy.classify import AgentLoops, Outline, Unreadable, classify, read
from windtunnel.agents.sandbox.proxy.conversation import Conversation, MainLoopRequest
from windtunnel.agents.sandbox.proxy.gate import ArrivingReply, Gate, ReplyWindow
from windtunnel.agents.sandbox.proxy.upstream import (
    AgentRequest,
    Headers,
    ProxyFault,
    Upstream,
    forward,
    reply_headers,
    steps_up,
)
from windtunnel.agents.sandbox.proxy.wire import (
    AgentConnection,
    read_request,
    send_fault,
    send_reply,
    send_whole,
    while_connected,
)
from windtunnel.base.web import WebServer

if TYPE_CHECKING:
    from windtunnel.agents.sandbox.box import Box

T = TypeVar("T")
LOG = logging.getLogger("windtunnel.sandbox.proxy")
WARNING = "x-windtunnel-checkpoint"
"""Header of a reply that goes out though its turn's checkpoint is not whole: what lacks, and why."""
RETRY = 5
"""Seconds after which to ask again for a reply that is held back."""


class AgentSession:
    """One sandbox's way to its model, as an ASGI application. Lives on the event loop."""

    def __init__(
        self,
        box: Box,
        upstream: Upstream,
        conversation: Conversation,
        client: httpx.AsyncClient,
    ) -> None:
        self.name = box.name
        self._box = box
        self._upstream = upstream
        self._conversation = conversation
        self._agent = AgentLoops()
        self._client = client
        self._gate = Gate(box)
        self._disk = ThreadPoolExecutor(1, f"conversation-of-{box.name}")
        self._ending = asyncio.Event()
        self._exchanges: set[asyncio.Task[None]] = set()
        self._server: tuple[WebServer, asyncio.Task[None]] | None = None

    async def listen(self, listener: socket.socket) -> None:
        """Be asked at ``listener``, and no more where it was: a restore gives a sandbox a new network."""
        await self._hang_up()
        config = uvicorn.Config(
            self, http=AgentConnection, lifespan="off", ws="none", access_log=False, log_config=None,
            proxy_headers=False, server_header=False, date_header=False, timeout_keep_alive=75,
            limit_concurrency=2 * limits.OPEN_BOX,
            timeout_graceful_shutdown=int(2 * limits.ENDING) + 1,
        )  # fmt: skip
        server = WebServer(config)
        listener.setblocking(False)
        # connections inherit it; else each reply waits 40 ms for an acknowledgement between head and body
        listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        serving = asyncio.create_task(server.serve(sockets=[listener]))
        while not server.started and not serving.done():
            await asyncio.sleep(0.001)
        if serving.done():
            serving.result()
        self._server = server, serving

    async def _hang_up(self, patience: float | None = None) -> None:
        """Listen no more, and let what is under way end, for at most ``patience`` seconds."""
        if self._server is not None:
            server, serving = self._server
            server.should_exit = True
            await asyncio.wait([serving], timeout=patience)

    # --- requests
    # ---------------------------------------------------------------------------------------------

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer one request, whatever it is."""
        started = False

        async def send_noted(message: Message) -> None:
            nonlocal started
            started = True
            await send(message)

        try:
            request = await read_request(scope, receive)
            await while_connected(receive, self._answer(request, send_noted), self._ending)
        except ProxyFault as fault:
            LOG.info("sandbox %s: %s", self.name, fault)
            if not started:
                await send_fault(send, fault)

    async def _answer(self, request: AgentRequest, send: Send) -> None:
        if steps_up(request.path):
            words = "the path has a step up, '..', which could leave the base path of the upstream"
            raise ProxyFault(400, "bad_request", words)
        outline = await self._of_main_loop(request)
        if outline is not None:
            return await self._main(request, outline, send)
        async with forward(self._client, self._upstream, request) as response:
            await send_reply(send, response.status_code, reply_headers(response), response.aiter_raw())

    async def _of_main_loop(self, request: AgentRequest) -> Outline | None:
        """The request as the main loop's; None where it is another one."""
        if request.method != "POST":
            return None
        headers, limit = dict(request.headers), limits.BODY
        try:
            outline = await asyncio.to_thread(read, request.route, headers, request.body, limit=limit)
        except Unreadable as error:
            LOG.info("sandbox %s: a request is passed on, not understood: %s", self.name, error)
            return None
        verdict = classify(outline, self._agent)
        LOG.info("sandbox %s: a request is %s: %s", self.name, verdict.kind, verdict.reason)
        self._agent = verdict.agent
        return outline if verdict.kind == "main" else None

    async def _main(self, request: AgentRequest, outline: Outline, send: Send) -> None:
        conversation, incarnation = self._conversation, self._conversation.incarnation
        entry = conversation.find(outline.digest)
        if entry is None or not (entry.complete or entry.arriving):
            entry = self._ask(request, outline, entry)
        await self._deliver(entry, entry.arriving, self._window(entry), send)
        if entry.complete:
            entry.window = None
            if conversation.incarnation == incarnation and not entry.aside:
                entry.served = incarnation
                self._write(conversation.save, entry)

    def _ask(self, request: AgentRequest, outline: Outline, entry: MainLoopRequest | None) -> MainLoopRequest:
        """Send the request to the model, whoever waits for it later. ``entry``: where that was done before,
        and there was no reply worth keeping."""
        if len(self._exchanges) >= limits.OPEN_BOX:
            raise ProxyFault(503, "overloaded", "too many requests of this sandbox are under way")
        if entry is None:
            name = f"{outline.digest[:12]}-{uuid4().hex[:12]}"
            entry = self._conversation.begin(name, outline.digest)
        entry.arriving = ArrivingReply()
        exchange = asyncio.create_task(self._run(entry, entry.arriving, request))
        self._exchanges.add(exchange)
        exchange.add_done_callback(self._exchanges.discard)
        return entry

    async def _run(self, entry: MainLoopRequest, arriving: ArrivingReply, request: AgentRequest) -> None:
        record = partial(self._write, self._conversation.answered, entry)
        try:
            await arriving.run(self._client, self._upstream, request, record)
        finally:
            entry.arriving = None
            if not entry.complete:
                what = arriving.fault or f"the model service answered with status {arriving.status}"
                LOG.warning("sandbox %s: %s", self.name, what)

    def _window(self, entry: MainLoopRequest) -> ReplyWindow | None:
        """The window that this reply has to wait for; None when a restored checkpoint covers its turn."""
        window = entry.window
        if window is not None and (window.safe or not window.settled.is_set()):
            return window
        if 0 < entry.turn <= self._conversation.covered:
            return None
        incarnation = self._conversation.incarnation

        def placed(window: ReplyWindow) -> None:
            if self._conversation.incarnation == incarnation:
                entry.turn = window.turn
                self._write(self._conversation.save, entry)

        # a turn that has ended, and is not kept, is not ended again: its checkpoint is
        ended = window.turn if window is not None else 0
        entry.window = self._gate.open(entry.request, placed, ended=ended)
        return entry.window

    async def _deliver(
        self, entry: MainLoopRequest, arriving: ArrivingReply | None, window: ReplyWindow | None, send: Send
    ) -> None:
        """Wait for the reply and for the checkpoint, and send the one once the other is safe."""
        if arriving is not None:
            await arriving.began.wait()
        warning: Headers = ()
        if window is not None:
            if not window.settled.is_set():
                asyncio.get_running_loop().run_in_executor(None, window.promote)
                await window.settled.wait()
            if window.blocked:
                words = f"the reply is held back, since its turn is not kept: {window.fault}"
                raise ProxyFault(503, "held", f"{words}; it is recorded, ask again", RETRY)
            warning = ((WARNING, _single_line(window.fault)),) if window.fault else ()
        if arriving is None:
            reply = await self._on_disk(self._conversation.reply, entry)
            await send_whole(send, reply.status, reply.headers + warning, reply.body)
            return
        if arriving.fault is not None and not arriving.status:
            raise arriving.fault
        await send_reply(send, arriving.status, arriving.headers + warning, arriving.chunks())

    # --- restores
    # ---------------------------------------------------------------------------------------------

    async def restored(self, turn: int, *, on_purpose: bool) -> None:
        """The sandbox begins anew after ``turn``. Replies under way go to whoever asks for them again, but
        where it was brought back ``on_purpose``, to have others."""
        self._gate.close("the sandbox was restored meanwhile")
        self._gate = Gate(self._box)
        for entries in self._conversation.entries.values():
            for entry in entries:
                entry.window = None
        await self._on_disk(self._conversation.begin_anew, turn, on_purpose)

    async def copy_to(self, path: Path) -> None:
        """Write a second record of the conversation, as it is now."""
        await self._on_disk(self._conversation.copy_to, path)

    async def close(self, patience: float = 0.0) -> None:
        """End what is under way after ``patience`` seconds. A reply that is held for its checkpoint stays
        back: the agent asks again, and whoever serves the sandbox then gives it from the record."""
        await self._hang_up(patience)
        self._ending.set()
        for task in list(self._exchanges):
            task.cancel()
        await asyncio.gather(*self._exchanges, return_exceptions=True)
        self._gate.close("the model proxy is ending")
        await self._hang_up()
        await self._on_disk(self._conversation.close)
        self._disk.shutdown(wait=False)

    # --- the record is read and written in the order of these calls, and never on the loop
    # ---------------------------------------------------------------------------------------------

    def _on_disk(self, work: Callable[..., T], *what: Any) -> asyncio.Future[T]:
        return asyncio.get_running_loop().run_in_executor(self._disk, work, *what)

    def _write(self, change: Callable[..., None], *what: Any) -> asyncio.Future[None]:
        def write() -> None:
            try:
                change(*what)
            except (sqlite3.Error, OSError) as error:
                LOG.warning("sandbox %s: the conversation cannot be written: %s", self.name, error)

        return self._on_disk(write)


def _single_line(words: str) -> str:
    return " ".join(words.split()).encode("ascii", "replace").decode()[:300].rstrip()
