"""Connections that outlive the daemon: what was asked on them is answered by the next one.

Each connection is given to the supervisor, with a note of what arrived since the last answer, in memory that
both share. A daemon that is killed leaves the connections open there; the next one takes them, reads the
notes as if they had just arrived, and answers: from the record, where the reply was there already, or by
asking the model again. Only a reply that had begun cannot be taken up: its connection is closed, and the
client sees that it broke off.

A note begins with ``+`` and holds the bytes that are not answered, or is ``-``: an answer has begun.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import secrets
import socket
import stat
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any, cast

import h11
import uvicorn

from windtunnel.agents.sandbox.kept import Kept
from windtunnel.agents.sandbox.proxy.strict import StrictProtocol

WAITING, BEGUN = b"+", b"-"
LARGEST = 80 * 2**20
"""Bytes of requests up to which they are noted."""


@dataclass(frozen=True)
class Lasting:
    """Where the connections of one sandbox in one network namespace are kept; ``stem`` names it."""

    kept: Kept
    stem: str


def protocol(lasting: Lasting | None, ending: Callable[[], bool]) -> type[asyncio.Protocol]:
    """What uvicorn is to make of each connection. ``ending``: whether this process ends, and not only what
    is served."""
    if lasting is None or not lasting.kept.lasts:
        return StrictProtocol
    return cast(type[asyncio.Protocol], partial(LastingProtocol, lasting, ending))


class LastingProtocol(StrictProtocol):
    """A connection that is kept. ``taken``: the name and the note of one that was kept before."""

    def __init__(
        self,
        lasting: Lasting,
        ending: Callable[[], bool],
        *,
        taken: tuple[str, int] | None = None,
        **options: Any,
    ) -> None:
        super().__init__(**options)
        self._kept, self._ending = lasting.kept, ending
        self._name, self._note = taken or (f"call.{secrets.token_hex(6)}.{lasting.stem}", -1)
        self._size = 0
        self._left = False

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        if self._note >= 0:
            asked = os.pread(self._note, LARGEST, 1)
            self._size = 1 + len(asked)
            if asked:
                super().data_received(asked)
            return
        self._note = os.memfd_create("call", os.MFD_CLOEXEC)
        self._waits(b"")
        if not self._kept.keep(self._name, _plug(transport).fileno(), self._note, wait=False):
            self._close_note()

    def data_received(self, data: bytes) -> None:
        if self._note >= 0 and os.pread(self._note, 1, 0) == WAITING:
            if self._size + len(data) > LARGEST:
                self.answering()
            else:
                os.pwrite(self._note, data, self._size)
                self._size += len(data)
        super().data_received(data)

    def answering(self) -> None:
        if self._note >= 0:
            os.pwrite(self._note, BEGUN, 0)
            os.ftruncate(self._note, 1)

    def on_response_complete(self) -> None:
        # what is left of a request that was answered early is no request
        if self._note >= 0 and self.conn.their_state is h11.DONE:
            self._waits(self.conn.trailing_data[0])
        super().on_response_complete()

    def send_400_response(self, msg: str) -> None:
        self.answering()
        super().send_400_response(msg)

    def leave(self) -> bool:
        if self._note < 0 or not self._ending() or os.pread(self._note, 1, 0) != WAITING:
            return False
        self._left = True
        if self.cycle is not None:
            self.cycle.disconnected = True
        self.transport.abort()
        return True

    def shutdown(self) -> None:
        idle = self.cycle is None or self.cycle.response_complete
        if not idle or not self.leave():
            super().shutdown()

    def connection_lost(self, exc: Exception | None) -> None:
        if self._note >= 0:
            if not self._left:
                # the supervisor has it open still
                with contextlib.suppress(OSError):
                    _plug(self.transport).shutdown(socket.SHUT_RDWR)
                self._kept.drop(self._name)
            self._close_note()
        super().connection_lost(exc)

    def _waits(self, arrived: bytes) -> None:
        os.pwrite(self._note, WAITING + arrived, 0)
        self._size = 1 + len(arrived)
        os.ftruncate(self._note, self._size)

    def _close_note(self) -> None:
        os.close(self._note)
        self._note = -1


async def take_up(lasting: Lasting, server: uvicorn.Server) -> None:
    """Answer, as ``server`` does, on the connections that an earlier process has left."""
    kept = lasting.kept
    for name in kept.names():
        if not name.startswith("call.") or name.split(".", 2)[2] != lasting.stem:
            continue
        plugs: list[int] = []
        notes: list[int] = []
        for fd in kept.take(name):
            (plugs if stat.S_ISSOCK(os.fstat(fd).st_mode) else notes).append(fd)
        if kept.lasts and len(plugs) == len(notes) == 1 and os.pread(notes[0], 1, 0) == WAITING:
            plug = socket.socket(fileno=plugs[0])
            plug.setblocking(False)
            made = partial(
                cast(Any, server.config.http_protocol_class),
                taken=(name, notes[0]),
                config=server.config,
                server_state=server.server_state,
                app_state=server.lifespan.state,
            )
            await asyncio.get_running_loop().connect_accepted_socket(made, plug)
            continue
        for fd in plugs:
            with socket.socket(fileno=fd) as plug, contextlib.suppress(OSError):
                plug.shutdown(socket.SHUT_RDWR)
        for fd in notes:
            os.close(fd)
        kept.drop(name)


def _plug(transport: asyncio.BaseTransport) -> socket.socket:
    plug: socket.socket = transport.get_extra_info("socket")
    return plug
