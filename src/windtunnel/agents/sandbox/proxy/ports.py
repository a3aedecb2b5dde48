"""Ports of sandboxes on the host: a loopback address that leads to a server inside.

A port of the host is chosen once and written down beside the sandbox's record, so its URL stays the same
after a restore and for the next daemon. Each connection is made anew inside the network that the sandbox has
at that moment; a fork has a network, and so URLs, of its own.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import socket
from collections.abc import Callable
from functools import partial
from pathlib import Path

from windtunnel.agents.sandbox.errors import MachineError
from windtunnel.agents.sandbox.machine import netns_file, socket_inside
from windtunnel.agents.sandbox.place import Home
from windtunnel.agents.sandbox.proxy.loop import LoopThread, copy_stream
from windtunnel.base import atomic
from windtunnel.base.errors import UserError

LOG = logging.getLogger("windtunnel.sandbox.ports")
MOST = 256
"""Connections to one port."""


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
        known = self._known(name)
        servers = self._servers.setdefault(name, {})
        if port not in servers:
            outside = known.get(port, 0)
            try:
                listener = socket.create_server(("127.0.0.1", outside), backlog=128)
            except OSError as error:
                raise UserError(
                    f"sandbox {name}: port {outside} of this host, which leads to its port {port}, cannot be "
                    f"listened on: {error.strerror}"
                ) from error
            known[port] = listener.getsockname()[1]
            atomic.replace(self._file(name), json.dumps(known))
            servers[port] = self._loop().call(self._serve(listener, netns_file(self._home, name), port))
        return f"http://127.0.0.1:{known[port]}"

    def serve(self, name: str) -> None:
        """The sandbox runs: its ports are there again."""
        for port in self._known(name):
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

    def _known(self, name: str) -> dict[int, int]:
        """The host's ports by the sandbox's."""
        try:
            text = self._file(name).read_text()
        except FileNotFoundError:
            return {}
        return {int(port): outside for port, outside in json.loads(text).items()}

    async def _serve(self, listener: socket.socket, netns: Path, port: int) -> asyncio.Server:
        tasks: set[asyncio.Task[None]] = set()

        def connected(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            if len(tasks) >= MOST:
                writer.close()
                return
            task = asyncio.create_task(_forward(netns, port, reader, writer))
            tasks.add(task)
            task.add_done_callback(tasks.discard)

        return await asyncio.start_server(connected, sock=listener)


async def _forward(
    netns: Path, port: int, reader: asyncio.StreamReader, writer: asyncio.StreamWriter
) -> None:
    with contextlib.closing(writer), contextlib.suppress(OSError, MachineError):
        plug = await asyncio.to_thread(partial(socket_inside, netns, "connect to", port))
        from_inside, to_inside = await asyncio.open_connection(sock=plug)
        with contextlib.closing(to_inside):
            await asyncio.gather(copy_stream(reader, to_inside), copy_stream(from_inside, writer))
