"""The model proxy: one event loop in a thread of its own, with a listening socket for each sandbox.

A sandbox reaches it by a socket that the host made inside the sandbox's network namespace, or under
``/box/<name>/`` on a port that all share. Its methods may be called from any thread; they return when what
they ask for is in force.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import re
import socket
import threading
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import Any, TypeVar

import httpx
import uvicorn
from starlette.types import Message, Receive, Scope, Send

from windtunnel.agents.sandbox.place import Home
from windtunnel.agents.sandbox.proxy.classify import AGENTS, AgentRules
from windtunnel.agents.sandbox.proxy.conversation import Conversation
from windtunnel.agents.sandbox.proxy.events import (
    Bounds,
    Failed,
    ProxyEvent,
    Turning,
    Upstream,
)
from windtunnel.agents.sandbox.proxy.session import AgentSession
from windtunnel.agents.sandbox.proxy.strict import StrictProtocol
from windtunnel.agents.sandbox.proxy.upstream import timeouts
from windtunnel.agents.sandbox.proxy.wire import Gone, Refused, read_asking, send_fault
from windtunnel.base.errors import UserError
from windtunnel.base.web import Server

LOG = logging.getLogger("windtunnel.sandbox.proxy")
SHARED = re.compile(r"/box/([^/?]+)(/.*)?")
ENDING_SECONDS = 10.0
T = TypeVar("T")


def conversation_file(home: Home, box: str) -> Path:
    """Where a sandbox's conversation is recorded: on the host, out of the sandbox's reach."""
    return home.box(box) / "conversation.sqlite"


class ModelProxy:
    """The model proxy of a host's sandboxes.

    ``on_event`` is called on the model proxy's own thread and must not block. ``trust_env``: use the host's
    proxy settings to reach the model service.
    """

    def __init__(
        self,
        home: Home,
        *,
        bounds: Bounds | None = None,
        on_event: Callable[[ProxyEvent], None] = lambda event: None,
        trust_env: bool = True,
    ) -> None:
        self._home = home
        self._bounds = bounds or Bounds()
        self._on_event = on_event
        self._sessions: dict[str, AgentSession] = {}
        self._servers: dict[str, tuple[uvicorn.Server, asyncio.Task[None]]] = {}
        self._open = 0
        self._closed = False
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="model-proxy", daemon=True)
        self._thread.start()
        self._client = self._call(self._new_client(trust_env))

    # --- sandboxes
    # --------------------------------------------------------------------------------------------

    def serve(
        self,
        box: Turning,
        upstream: Upstream | str,
        *,
        listener: socket.socket | None = None,
        agent: str = "generic",
        rules: AgentRules | None = None,
    ) -> None:
        """Be the model API of a sandbox, on ``listener`` (which is the model proxy's from then on) and on the
        shared port. ``agent``: whose rules tell helper requests apart, unless ``rules`` are given."""
        if rules is None and agent not in AGENTS:
            raise UserError(f"model proxy: agent {agent!r} is not known; known are {', '.join(AGENTS)}")
        where = Upstream(upstream) if isinstance(upstream, str) else upstream
        conversation = self._conversation(box.name)

        async def begin() -> None:
            if box.name in self._sessions:
                conversation.close()
                raise UserError(f"model proxy: sandbox {box.name!r} is served already")
            self._sessions[box.name] = AgentSession(
                box,
                where,
                conversation,
                self._client,
                rules=rules or AGENTS[agent],
                bounds=self._bounds,
                tell=self._tell,
            )
            if listener is not None:
                await self._listen(listener, box.name)

        self._call(begin())

    def listen(self, name: str, listener: socket.socket) -> None:
        """Serve a sandbox on another socket from now on: a restore gives it a new network namespace."""

        async def change() -> None:
            await self._hang_up(name)
            if name not in self._sessions:
                listener.close()
                raise UserError(f"model proxy: sandbox {name!r} is not served")
            await self._listen(listener, name)

        self._call(change())

    def forget(self, name: str) -> None:
        """Serve a sandbox no more. Its record stays."""

        async def end() -> None:
            session = self._sessions.pop(name, None)
            if session is not None:
                await session.close()
            await self._hang_up(name)

        self._call(end())

    def restored(self, name: str, turn: int) -> None:
        """To be called before the processes of a sandbox run again as they were after ``turn``: what they
        ask again is answered from the record."""
        self._begin_anew(name, turn, replay=True)

    def rolled_back(self, name: str, turn: int, *, fast_forward: bool = False) -> None:
        """As ``restored``, after a rollback on purpose: the replies that followed ``turn`` are kept but not
        given again, unless ``fast_forward`` says so."""
        self._begin_anew(name, turn, replay=fast_forward)

    def forked(self, source: str, name: str, turn: int, *, fast_forward: bool = False) -> None:
        """To be called before ``serve`` of a fork: it has the conversation of ``source`` up to ``turn``."""
        if name in self._sessions:
            raise UserError(f"model proxy: sandbox {name!r} is served already")
        there = conversation_file(self._home, name)
        if there.exists():
            raise UserError(f"model proxy: sandbox {name!r} has a conversation already")
        session = self._sessions.get(source)
        if session is not None:
            self._call(session.copy_to(there))
        else:
            with contextlib.closing(self._conversation(source)) as conversation:
                conversation.copy_to(there)
        self._begin_anew(name, turn, replay=fast_forward)

    def share(self, host: str = "127.0.0.1", port: int = 0) -> tuple[str, int]:
        """Listen on a port for all sandboxes, each under ``/box/<name>/``; where that is."""
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        listener = socket.socket(family, socket.SOCK_STREAM)
        try:
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            listener.bind((host, port))
            listener.listen(1024)
        except OSError as error:
            listener.close()
            raise UserError(f"model proxy: cannot listen on {host}:{port}: {error.strerror}") from error
        where = listener.getsockname()
        self._call(self._listen(listener, ""))
        return str(where[0]), int(where[1])

    def close(self) -> None:
        """Stop listening, give what is under way ``Bounds.ending`` seconds, and close the records."""
        if self._closed:
            return
        self._closed = True

        async def end() -> None:
            for server, _ in self._servers.values():
                server.should_exit = True
            deadline = self._loop.time() + self._bounds.ending
            while self._open and self._loop.time() < deadline:
                await asyncio.sleep(0.02)
            await asyncio.gather(*(session.close() for session in self._sessions.values()))
            await asyncio.gather(*(self._hang_up(name) for name in list(self._servers)))
            await self._client.aclose()
            await self._loop.shutdown_default_executor()

        try:
            asyncio.run_coroutine_threadsafe(end(), self._loop).result(
                2 * self._bounds.ending + ENDING_SECONDS
            )
        finally:
            self._loop.call_soon_threadsafe(self._loop.stop)
            self._thread.join()
            self._loop.close()

    def __enter__(self) -> ModelProxy:
        return self

    def __exit__(self, *fault: object) -> None:
        self.close()

    # --- inside
    # -----------------------------------------------------------------------------------------------

    def _conversation(self, name: str) -> Conversation:
        return Conversation(conversation_file(self._home, name))

    def _begin_anew(self, name: str, turn: int, *, replay: bool) -> None:
        session = self._sessions.get(name)
        if session is not None:
            self._call(session.restored(turn) if replay else session.rolled_back(turn))
        elif conversation_file(self._home, name).exists():
            with contextlib.closing(self._conversation(name)) as conversation:
                (conversation.restored if replay else conversation.rolled_back)(turn)

    async def _new_client(self, trust_env: bool) -> httpx.AsyncClient:
        limits = httpx.Limits(max_connections=self._bounds.open_total, max_keepalive_connections=64)
        return httpx.AsyncClient(timeout=timeouts(self._bounds), limits=limits, trust_env=trust_env)

    async def _listen(self, listener: socket.socket, name: str) -> None:
        async def app(scope: Scope, receive: Receive, send: Send) -> None:
            if scope["type"] == "http":
                await self._answer(name, scope, receive, send)

        server = Server(
            uvicorn.Config(
                app,
                http=StrictProtocol,
                lifespan="off",
                ws="none",
                access_log=False,
                log_config=None,
                proxy_headers=False,
                server_header=False,
                date_header=False,
                limit_concurrency=2 * self._bounds.open_box if name else 2 * self._bounds.open_total,
                timeout_keep_alive=75,
                timeout_graceful_shutdown=max(int(self._bounds.ending), 1),
            )
        )
        listener.setblocking(False)
        if listener.family != socket.AF_UNIX:
            # connections inherit it; else each reply waits 40 ms for an acknowledgement between head and body
            listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        serving = asyncio.create_task(server.serve(sockets=[listener]))
        while not server.started and not serving.done():
            await asyncio.sleep(0.001)
        if serving.done():
            serving.result()
        self._servers[name] = (server, serving)

    async def _hang_up(self, name: str) -> None:
        server, serving = self._servers.pop(name, (None, None))
        if server is not None and serving is not None:
            server.should_exit = True
            await serving

    async def _answer(self, name: str, scope: Scope, receive: Receive, send: Send) -> None:
        target = scope["target"]
        if not name:
            found = SHARED.fullmatch(target)
            if found is None:
                await send_fault(send, 404, "not_found", "requests are made under /box/<name>/")
                return
            name, target = found[1], found[2] or "/"
        session = self._sessions.get(name)
        if session is None:
            await send_fault(send, 404, "unknown_sandbox", f"no sandbox {name!r} is served here")
            return
        if self._open >= self._bounds.open_total or session.open >= self._bounds.open_box:
            await send_fault(send, 503, "overloaded", "too many requests are under way")
            return
        started = False

        async def noticed(message: Message) -> None:
            nonlocal started
            started = True
            await send(message)

        self._open += 1
        session.open += 1
        try:
            await session.answer(await read_asking(scope, target, receive, self._bounds), receive, noticed)
        except Refused as refusal:
            self._tell(Failed(name, "", str(refusal)))
            if not started:
                await send_fault(send, refusal.status, refusal.kind, str(refusal), refusal.retry_after)
        except Gone:
            return
        finally:
            self._open -= 1
            session.open -= 1

    def _tell(self, event: ProxyEvent) -> None:
        if isinstance(event, Failed):
            LOG.warning("sandbox %s: %s", event.box, event.what)
        try:
            self._on_event(event)
        except Exception:
            LOG.exception("an event's receiver failed")

    def _call(self, work: Coroutine[Any, Any, T]) -> T:
        """Run ``work`` on the loop and wait for it."""
        if self._closed:
            work.close()
            raise UserError("model proxy: it is closed")
        return asyncio.run_coroutine_threadsafe(work, self._loop).result()
