"""The model proxy: one event loop in a thread of its own, with a listening socket for each sandbox.

Its methods may be called from any thread; they return when what they ask for is in force.
"""

from __future__ import annotations

import asyncio
import contextlib
import socket
from pathlib import Path

import httpx
import uvicorn

from windtunnel.agents.sandbox.place import Home
from windtunnel.agents.sandbox.proxy import LoopThread
from windtunnel.agents.sandbox.proxy.conversation import Conversation
from windtunnel.agents.sandbox.proxy.gate import Turning
from windtunnel.agents.sandbox.proxy.session import AgentSession
from windtunnel.agents.sandbox.proxy.upstream import Upstream
from windtunnel.agents.sandbox.proxy.wire import AgentConnection, ProxyLimits
from windtunnel.base.web import WebServer


def conversation_file(home: Home, box: str) -> Path:
    """Where a sandbox's conversation is recorded: on the host, out of the sandbox's reach."""
    return home.box(box) / "conversation.sqlite"


class ModelProxy:
    """The model proxy of a host's sandboxes. ``trust_env``: use the host's proxy settings to reach the model
    service."""

    def __init__(self, home: Home, bounds: ProxyLimits | None = None, *, trust_env: bool = True) -> None:
        self._home = home
        self._bounds = bounds or ProxyLimits()
        self._sessions: dict[str, AgentSession] = {}
        self._servers: dict[str, tuple[uvicorn.Server, asyncio.Task[None]]] = {}
        self._loop = LoopThread("model-proxy")
        self._client = self._loop.call(self._new_client(trust_env))

    def serve(self, box: Turning, upstream: Upstream, listener: socket.socket) -> None:
        """Be the model API of a sandbox on ``listener``, which is the model proxy's from then on. Where it is
        served already, ``listener`` takes the place of the last: a restore gives it a new network."""

        async def begin() -> None:
            session = self._sessions.get(box.name)
            if session is None:
                conversation = self._conversation(box.name)
                session = AgentSession(box, upstream, conversation, self._client, self._bounds)
                self._sessions[box.name] = session
            await self._hang_up(box.name)
            await self._listen(listener, session)

        self._loop.call(begin())

    def forget(self, name: str) -> None:
        """Serve a sandbox no more. Its record stays."""

        async def end() -> None:
            session = self._sessions.pop(name, None)
            if session is not None:
                await session.close()
            await self._hang_up(name)

        self._loop.call(end())

    def restored(self, name: str, turn: int, *, on_purpose: bool) -> None:
        """To be called before the processes of a sandbox run again as they were after ``turn``: what they
        ask again is answered from the record. Where it was brought back ``on_purpose``, the replies that
        followed ``turn`` are kept but not given again."""
        session = self._sessions.get(name)
        if session is not None:
            self._loop.call(session.restored(turn, on_purpose=on_purpose))
        else:
            with contextlib.closing(self._conversation(name)) as conversation:
                conversation.begin_anew(turn, on_purpose)

    def forked(self, source: str, name: str, turn: int) -> None:
        """To be called before ``serve`` of a fork: it has the conversation of ``source`` up to ``turn``."""
        there = conversation_file(self._home, name)
        session = self._sessions.get(source)
        if session is not None:
            self._loop.call(session.copy_to(there))
        elif conversation_file(self._home, source).exists():
            with contextlib.closing(self._conversation(source)) as conversation:
                conversation.copy_to(there)
        self.restored(name, turn, on_purpose=True)

    def close(self) -> None:
        """Stop listening, give what is under way ``ProxyLimits.ending`` seconds, and close the records."""

        async def end() -> None:
            for server, _ in self._servers.values():
                server.should_exit = True
            if self._servers:
                serving = [serving for _, serving in self._servers.values()]
                await asyncio.wait(serving, timeout=self._bounds.ending)
            await asyncio.gather(*(session.close() for session in self._sessions.values()))
            await asyncio.gather(*(self._hang_up(name) for name in list(self._servers)))
            await self._client.aclose()

        if not self._loop.closed:
            with contextlib.suppress(TimeoutError):
                self._loop.call(end(), 4 * self._bounds.ending)
            self._loop.close()

    def _conversation(self, name: str) -> Conversation:
        return Conversation(conversation_file(self._home, name))

    async def _new_client(self, trust_env: bool) -> httpx.AsyncClient:
        bounds = self._bounds
        timeout = httpx.Timeout(bounds.silence, connect=bounds.connect, pool=bounds.connect)
        limits = httpx.Limits(max_connections=bounds.open_total, max_keepalive_connections=64)
        return httpx.AsyncClient(timeout=timeout, limits=limits, trust_env=trust_env)

    async def _listen(self, listener: socket.socket, session: AgentSession) -> None:
        config = uvicorn.Config(
            session, http=AgentConnection, lifespan="off", ws="none", access_log=False, log_config=None,
            proxy_headers=False, server_header=False, date_header=False, timeout_keep_alive=75,
            limit_concurrency=2 * self._bounds.open_box,
            timeout_graceful_shutdown=int(2 * self._bounds.ending) + 1,
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
        self._servers[session.name] = (server, serving)

    async def _hang_up(self, name: str) -> None:
        server, serving = self._servers.pop(name, (None, None))
        if server is not None and serving is not None:
            server.should_exit = True
            await serving
