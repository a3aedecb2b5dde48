"""The supervisor's connections: frames of `wire` in and out without ever waiting for a peer.

One thread serves all; a peer that does not read (its host is stopped) only fills its own buffer, up to a
bound, and loses its connection there. Nobody is heard before the handshake (`base.handshake`): of more than
`MOST_STRANGERS` whose handshake is under way the one that came first has to go.
"""

from __future__ import annotations

import contextlib
import selectors
import socket
import time
from collections.abc import Iterator
from typing import Any

from windtunnel.base import schema, tls, wire
from windtunnel.base.handshake import STRANGE, Server
from windtunnel.base.keys import Keys
from windtunnel.base.listener import MOST_STRANGERS, secured
from windtunnel.base.wire import Secured, Session
from windtunnel.training.elastic.live.messages import FROM_AGENT
from windtunnel.training.elastic.model import SUPERVISOR

MOST_UNSENT = 64 << 20
"""Bytes that a peer may leave unread."""


class Connection:
    """One peer: what it sent in part, and what it has not read. ``since``: when it came. A stranger until its
    handshake is over (that of TLS, where there is one, is made by reading); a stranger's bytes are read in
    small parts and not kept beyond it."""

    def __init__(self, sock: Secured, since: float, keys: Keys) -> None:
        self.sock = sock
        self.since = since
        self.greeted = False
        self.leaving = False
        self.unsent = bytearray()
        self._unread = bytearray()
        self._keys = keys
        self._handshake: Server | None = None
        self._session: Session | None = None

    @property
    def strange(self) -> bool:
        return self._session is None

    def read(self) -> list[dict[str, Any]] | None:
        """The messages that are complete now, None when the peer is gone.

        Raises:
            WireError: the peer does not know the secret, or speaks something else.
        """
        messages: list[dict[str, Any]] = []
        while True:
            try:
                part = self.sock.recv(STRANGE if self._session is None else 1 << 18)
            except BlockingIOError:
                return messages
            except tls.Untrusted:
                raise
            except OSError:
                return None
            if not part:
                return None
            self._unread += part
            if self._session is None:
                # Only now are the certificates known.
                self._handshake = self._handshake or Server(self._keys, (SUPERVISOR,), self.sock.binding)
                answer, self._session = self._handshake.take(self._unread)
                self.unsent += answer
            messages += self._messages()
            if not self.sock.pending():  # of what is, the selector says nothing
                return messages

    def _messages(self) -> Iterator[dict[str, Any]]:
        while self._session is not None:
            message = wire.parse(self._unread, self._session)
            if message is None:
                return
            yield schema.require(message, FROM_AGENT)

    def write(self, message: dict[str, Any]) -> None:
        assert self._session is not None
        self.unsent += wire.frame(message, 0, self._session)

    def flush(self) -> bool:
        """Send what the peer takes now; False when it is gone or takes too little."""
        try:
            while self.unsent:
                del self.unsent[: self.sock.send(self.unsent)]
        except BlockingIOError:
            return len(self.unsent) <= MOST_UNSENT
        except OSError:
            return False
        return True


class Connections:
    """A listening socket and all that came over it, each by a number that is never used again."""

    def __init__(self, listener: socket.socket, keys: Keys) -> None:
        self._keys = keys
        self._selector = selectors.DefaultSelector()
        self._listener = listener
        self._open: dict[int, Connection] = {}
        self._next = 0
        self._wake_read, self._wake_write = socket.socketpair()
        for sock in (listener, self._wake_read, self._wake_write):
            sock.setblocking(False)
        self._selector.register(listener, selectors.EVENT_READ, "listener")
        self._selector.register(self._wake_read, selectors.EVENT_READ, "wake")

    def __len__(self) -> int:
        return len(self._open)

    def wake(self) -> None:
        """End a `poll` that is under way; from any thread."""
        with contextlib.suppress(OSError):  # the buffer is full of earlier ones, or all is closed
            self._wake_write.send(b"x")

    def poll(self, seconds: float, now: float) -> Iterator[tuple[int, dict[str, Any] | str]]:
        """What came within ``seconds``: messages with their connection's number, and for a connection that
        is gone the reason as text.
        """
        for key, mask in self._selector.select(seconds):
            if key.data == "wake":
                self._wake_read.recv(4096)
            elif key.data == "listener":
                self._accept(now)
            else:
                yield from self._serve(key.data, mask)

    def _accept(self, now: float) -> None:
        try:
            accepted, _ = self._listener.accept()
            sock = secured(accepted, self._keys)
        except OSError:
            return
        sock.setblocking(False)
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        strangers = [link for link, connection in self._open.items() if connection.strange]
        if len(strangers) >= MOST_STRANGERS:
            self.close(strangers[0])  # nobody has heard of it
        self._open[self._next] = Connection(sock, now, self._keys)
        self._selector.register(sock, selectors.EVENT_READ, self._next)
        self._next += 1

    def _serve(self, link: int, mask: int) -> Iterator[tuple[int, dict[str, Any] | str]]:
        connection = self._open.get(link)
        if connection is None:
            return
        if mask & selectors.EVENT_READ:
            try:
                messages = connection.read()
            except wire.WireError as error:
                self.close(link)
                yield link, str(error)
                return
            if messages is None:
                self.close(link)
                yield link, ""
                return
            if connection.unsent:
                self._watch(link, connection, writing=True)
            for message in messages if not connection.leaving else ():
                yield link, message
        if mask & selectors.EVENT_WRITE and link in self._open and not self._flush(link, connection):
            yield link, "it does not read"

    def send(self, link: int, message: dict[str, Any]) -> None:
        """Nothing is lost when the peer is gone: `poll` reports it."""
        connection = self._open.get(link)
        if connection is not None and not connection.leaving and not connection.strange:
            connection.write(message)
            self._watch(link, connection, writing=True)

    def drop(self, link: int) -> None:
        """Close once everything is sent."""
        connection = self._open.get(link)
        if connection is not None:
            connection.leaving, connection.since = True, time.monotonic()
            self._watch(link, connection, writing=True)

    def greeted(self, link: int) -> bool:
        return link in self._open and self._open[link].greeted

    def greet(self, link: int) -> None:
        if link in self._open:
            self._open[link].greeted = True

    def silent(self, before: float) -> list[int]:
        """Connections that since ``before`` have not said who they are, or have not gone when told to."""
        return [
            link
            for link, connection in self._open.items()
            if (connection.leaving or not connection.greeted) and connection.since < before
        ]

    def close(self, link: int) -> None:
        connection = self._open.pop(link, None)
        if connection is not None:
            self._selector.unregister(connection.sock)
            connection.sock.close()

    def close_all(self) -> None:
        for link in list(self._open):
            self.close(link)
        self._selector.close()
        for sock in (self._listener, self._wake_read, self._wake_write):
            sock.close()

    def _flush(self, link: int, connection: Connection) -> bool:
        if not connection.flush():
            self.close(link)
            return False
        if not connection.unsent:
            if connection.leaving:
                # the agent closes when it has read the end; closing first could cut off what it has not read
                try:
                    connection.sock.shutdown(socket.SHUT_WR)
                except OSError:
                    self.close(link)
                    return False
            self._watch(link, connection, writing=False)
        return True

    def _watch(self, link: int, connection: Connection, *, writing: bool) -> None:
        events = selectors.EVENT_READ | (selectors.EVENT_WRITE if writing else 0)
        self._selector.modify(connection.sock, events, link)
