"""The network of a host's sandboxes: the model API, the way out and ports, served while they run and told of
restores and forks. `HostProxy` is what a host uses.

A sandbox whose network is ``proxy`` finds the model API at ``http://127.0.0.1:7080``, one whose network is
``egress`` an HTTP proxy at port 3128: sockets that the host made inside the sandbox's network namespace;
nothing else is reachable from there. What serves them starts with the first such sandbox. The journal of
side effects is one for the host, outside every sandbox, so no rollback takes it back.

A port of the host that leads to a server inside is chosen once and written down beside the sandbox's record,
so its URL stays the same after a restore and for the next daemon. Each connection is made anew inside the
network that the sandbox has at that moment; a fork has a network, and so URLs, of its own.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import os
import socket
import threading
from collections.abc import Callable, Coroutine
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from windtunnel.agents.sandbox.errors import MachineError
from windtunnel.agents.sandbox.machine.walls import netns_file, socket_inside
from windtunnel.agents.sandbox.model import SandboxSpec
from windtunnel.agents.sandbox.place import Home
from windtunnel.agents.sandbox.proxy import egress, limits
from windtunnel.agents.sandbox.proxy.conversation import Conversation, conversation_file
from windtunnel.agents.sandbox.proxy.egress import copy_stream
from windtunnel.agents.sandbox.proxy.upstream import Upstream, new_client, read_key
from windtunnel.agents.sandbox.side_effects import Journal
from windtunnel.base import atomic
from windtunnel.base.errors import UserError

if TYPE_CHECKING:
    import httpx

    from windtunnel.agents.sandbox.box import Box
    from windtunnel.agents.sandbox.proxy.session import AgentSession


T = TypeVar("T")


class LoopThread:
    """An event loop in a thread of its own, for what listens while the rest of the host works in threads.
    ``call`` may be used from any thread."""

    def __init__(self, name: str) -> None:
        self._name = name
        self.closed = False
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name=name, daemon=True)
        self._thread.start()

    def call(self, work: Coroutine[Any, Any, T], seconds: float | None = None) -> T:
        """Run ``work`` on the loop and wait for it. Raises what it raises, UserError after `close`, and
        TimeoutError where it takes longer than ``seconds``."""
        if self.closed:
            work.close()
            raise UserError(f"{self._name}: it is closed")
        return asyncio.run_coroutine_threadsafe(work, self._loop).result(seconds)

    def close(self) -> None:
        """End; what still runs on the loop is left where it is."""
        if not self.closed:
            self.closed = True
            self._loop.call_soon_threadsafe(self._loop.stop)
            self._thread.join()
            self._loop.close()


LOG = logging.getLogger("windtunnel.sandbox.ports")
MOST = 256
"""Connections to one port; further ones wait."""


class Ports:
    """The ports of a home's sandboxes. ``loop`` gives the event loop on which they are served. Methods may be
    called from any thread, one at a time for each sandbox."""

    def __init__(self, home: Home, loop: Callable[[], LoopThread]) -> None:
        self._home = home
        self._loop = loop
        self._servers: dict[str, dict[int, asyncio.Server]] = {}

    def open(self, name: str, port: int) -> str:
        """The URL of this host that leads to ``port`` of a sandbox. Raises UserError."""
        if not 0 < port < 2**16:
            raise UserError(f"sandbox {name}: port {port} is not accepted; give 1 to 65535")
        ports = self._read_ports(name)
        servers = self._servers.setdefault(name, {})
        if port not in servers:
            outside = ports.get(port, 0)
            try:
                listener = socket.create_server(("127.0.0.1", outside), backlog=128)
            except OSError as error:
                raise UserError(
                    f"sandbox {name}: port {outside} of this host, which leads to its port {port}, cannot be "
                    f"listened on: {error.strerror}"
                ) from error
            ports[port] = listener.getsockname()[1]
            atomic.replace(self._file(name), json.dumps(ports))
            servers[port] = self._loop().call(self._serve(listener, netns_file(self._home, name), port))
        return f"http://127.0.0.1:{ports[port]}"

    def serve(self, name: str) -> None:
        """The sandbox runs: its ports are there again."""
        for port in self._read_ports(name):
            try:
                self.open(name, port)
            except UserError as error:
                LOG.warning("%s", error)

    def forget(self, name: str) -> None:
        """Listen no more. What is written down goes with the sandbox's folder."""

        async def end() -> None:
            for server in servers.values():
                server.close()

        servers = self._servers.pop(name, {})
        if servers:
            self._loop().call(end())

    def close(self) -> None:
        for name in list(self._servers):
            self.forget(name)

    def _file(self, name: str) -> Path:
        return self._home.box(name) / "ports.json"

    def _read_ports(self, name: str) -> dict[int, int]:
        """The host's ports by the sandbox's."""
        try:
            text = self._file(name).read_text()
        except FileNotFoundError:
            return {}
        return {int(port): outside for port, outside in json.loads(text).items()}

    async def _serve(self, listener: socket.socket, netns: Path, port: int) -> asyncio.Server:
        free = asyncio.Semaphore(MOST)

        async def connected(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            async with free:
                await _forward(netns, port, reader, writer)

        return await asyncio.start_server(connected, sock=listener)


async def _forward(
    netns: Path, port: int, reader: asyncio.StreamReader, writer: asyncio.StreamWriter
) -> None:
    with contextlib.closing(writer), contextlib.suppress(OSError, MachineError):
        plug = await asyncio.to_thread(partial(socket_inside, netns, "connect to", port))
        from_inside, to_inside = await asyncio.open_connection(sock=plug)
        with contextlib.closing(to_inside):
            await asyncio.gather(copy_stream(reader, to_inside), copy_stream(from_inside, writer))


PORT = 7080
JOURNAL = "side_effects.sqlite"
CERTIFICATES = (
    *("SSL_CERT_FILE", "SSL_CERT_DIR", "REQUESTS_CA_BUNDLE", "CURL_CA_BUNDLE", "PIP_CERT"),
    *("NODE_EXTRA_CA_CERTS", "GIT_SSL_CAINFO"),
)
"""Variables of the host that name certificates; a sandbox that is let out through it has them too."""
ADDRESS = f"http://127.0.0.1:{PORT}"


def with_address(spec: SandboxSpec) -> SandboxSpec:
    """``spec`` with the variables by which the usual client libraries find the proxy.

    Raises UserError when its key file cannot be used.
    """
    if spec.network != "proxy":
        if spec.proxy_key_file:
            raise UserError(f"sandbox {spec.name}: a key file is for network 'proxy'")
        out = egress_environment() if is_egress(spec) else {}
        return replace(spec, environment={**out, **spec.environment})
    if spec.proxy_key_file:
        usable_key(spec.name, spec.proxy_key_file)
    addresses = {"OPENAI_BASE_URL": f"{ADDRESS}/v1", "ANTHROPIC_BASE_URL": ADDRESS}
    return replace(spec, environment={**addresses, **spec.environment})


def usable_key(name: str, file: str) -> None:
    """Raises UserError unless ``file`` of this host holds a key that can be used for sandbox ``name``."""
    if not Path(file).is_absolute():
        raise UserError(f"sandbox {name}: key file {file!r} must be an absolute path")
    read_key(Path(file))


def is_egress(spec: SandboxSpec) -> bool:
    return spec.network.partition(":")[0] == "egress"


def egress_environment() -> dict[str, str]:
    """The variables by which programs find the way out, and the certificates that the host trusts."""
    proxy = dict.fromkeys(
        ("http_proxy", "https_proxy", "HTTP_PROXY", "HTTPS_PROXY"), f"http://127.0.0.1:{egress.PROXY_PORT}"
    )
    direct = dict.fromkeys(("no_proxy", "NO_PROXY"), "localhost,127.0.0.1,::1")
    # the sandbox is what keeps packages apart: Debian's pip would ask for another one inside
    pip = {"PIP_BREAK_SYSTEM_PACKAGES": "1", "PIP_ROOT_USER_ACTION": "ignore"}
    certificates = {name: os.environ[name] for name in CERTIFICATES if name in os.environ}
    return {**proxy, **direct, **pip, **certificates}


class HostProxy:
    """Starts what a sandbox's network needs; does nothing for sandboxes that need nothing."""

    def __init__(self, home: Home) -> None:
        self._home = home
        self._sessions: dict[str, AgentSession] = {}
        self._egress: dict[str, egress.Egress] = {}
        self._client: httpx.AsyncClient | None = None
        self._loop: LoopThread | None = None
        self.ports = Ports(home, self.loop)
        self._lock = threading.Lock()

    def loop(self) -> LoopThread:
        """Where all is served, started now if it was not yet."""
        with self._lock:
            if self._loop is None:
                self._loop = LoopThread("sandbox-network")
            return self._loop

    def serve(self, box: Box, spec: SandboxSpec, netns: Path) -> None:
        """Be the model API, the way out and the ports of a sandbox that has just begun to run, or to run
        again, in that namespace.

        Requests that were at the model when it died go on: their replies answer the agent when it asks again.
        """
        if spec.network == "proxy":
            key_file = Path(spec.proxy_key_file) if spec.proxy_key_file else None
            upstream = Upstream(spec.proxy_upstream, key_file=key_file)
            self.serve_model(box, upstream, socket_inside(netns, "listen on", PORT))
        if is_egress(spec):
            self._end(self._egress, box.name)
            way = egress.Egress(spec.network, self._home.box(box.name) / "egress.log")
            listener = socket_inside(netns, "listen on", egress.PROXY_PORT)
            names = socket_inside(netns, "receive on", egress.DNS_PORT)
            self.loop().call(way.listen(listener, names))
            self._egress[box.name] = way
        self.ports.serve(box.name)

    def serve_model(self, box: Box, upstream: Upstream, listener: socket.socket) -> None:
        """Be the model API of a sandbox on ``listener``, which is the proxy's from then on."""
        # a host without such a sandbox does without an HTTP server
        from windtunnel.agents.sandbox.proxy.session import AgentSession

        async def begin() -> None:
            session = self._sessions.get(box.name)
            if session is None:
                self._client = self._client or new_client()
                record = Conversation(conversation_file(self._home, box.name))
                session = AgentSession(box, upstream, record, self._client)
                self._sessions[box.name] = session
            await session.listen(listener)

        self.loop().call(begin())

    def _end(self, ways: dict[str, Any], name: str) -> None:
        way = ways.pop(name, None)
        if way is not None:
            self.loop().call(way.close())

    def forget(self, name: str) -> None:
        """The sandbox is removed: another of its name is another one."""
        self._end(self._egress, name)
        self._end(self._sessions, name)
        self.ports.forget(name)
        if (journal_file := self._home.path / JOURNAL).exists():
            with Journal(journal_file) as journal:
                journal.retire(name)

    def restored(self, name: str, turn: int, *, on_purpose: bool) -> None:
        """Before the processes run again as they were after ``turn``. What they ask again is answered from
        the record. Where somebody rolled back ``on_purpose``, the replies that followed ``turn`` are kept but
        not given again."""
        session = self._sessions.get(name)
        record = conversation_file(self._home, name)
        if session is not None:
            self.loop().call(session.restored(turn, on_purpose=on_purpose))
        elif record.exists():
            with contextlib.closing(Conversation(record)) as conversation:
                conversation.begin_anew(turn, on_purpose)

    def forked(self, source: str, name: str, turn: int) -> None:
        """Before a fork of ``source`` runs: it has the conversation, and the side effects, up to ``turn``."""
        session = self._sessions.get(source)
        record, there = conversation_file(self._home, source), conversation_file(self._home, name)
        if session is not None:
            self.loop().call(session.copy_to(there))
        elif record.exists():
            with contextlib.closing(Conversation(record)) as conversation:
                conversation.copy_to(there)
        self.restored(name, turn, on_purpose=True)
        if (journal_file := self._home.path / JOURNAL).exists():
            with Journal(journal_file) as journal:
                journal.fork(source, name, turn)

    def close(self) -> None:
        """Stop listening, give what is under way `limits.ENDING` seconds, then end."""

        async def end() -> None:
            await asyncio.gather(*(session.close(limits.ENDING) for session in self._sessions.values()))
            await asyncio.gather(*(way.close() for way in self._egress.values()))
            if self._client is not None:
                await self._client.aclose()

        self.ports.close()
        if self._loop is not None and not self._loop.closed:
            with contextlib.suppress(TimeoutError):
                self._loop.call(end(), 4 * limits.ENDING)
            self._loop.close()
