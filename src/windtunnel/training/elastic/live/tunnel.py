"""How trainers reach the store, which has no authentication of its own (PyTorch's TCPStore).

The store listens behind a gate on the loopback of its host, through which its own process alone comes; there
`serve` admits who knows the secret of the job and passes bytes on to it. On every host the agent listens on
the loopback for its trainers (`Door`) and passes their bytes on over such a connection, in frames of `wire`,
each with its tag.
When one end closes, or dies, so does the other: who waits in the store comes out as if it were next door.
"""

from __future__ import annotations

import contextlib
import socket
import threading
from collections.abc import Callable

from windtunnel.base import handshake, wire
from windtunnel.base.keys import Keys
from windtunnel.base.listener import Listener
from windtunnel.linux.gate import ListeningGate
from windtunnel.training.elastic.model import STORE

CHUNK = 64 << 10
CONNECT = 5.0
"""Seconds."""
LOOPBACK = "127.0.0.1"
BEHIND = "127.0.0.2"
"""The store's own address, at the port of `LOOPBACK` where its own client looks for it."""


def service(address: str) -> str:
    """The name of the store that is reached at ``address`` (`handshake`)."""
    return f"{STORE} {address}"


def serve(listener: socket.socket, address: str, gate: ListeningGate, keys: Keys) -> Listener:
    """Admit to the store behind the ``gate`` who comes to ``listener``, known as ``address``."""

    def admitted(sock: socket.socket) -> None:
        with gate.connect(CONNECT) as plain:
            join(plain, sock)

    return Listener(listener, admitted, keys=keys, services=lambda: (service(address),), name="store")


def serve_own(listener: socket.socket, gate: ListeningGate) -> Listener:
    """The same, on the loopback, for processes of the same user: the store has a client of its own, which
    connects from where it likes."""

    def admitted(sock: socket.socket) -> None:
        with gate.connect(CONNECT) as plain:
            join(plain, sock, _copy, _copy_back)

    return Listener(listener, admitted, name="store-own")


class Door:
    """The way of one host's trainers to the store at ``store()``. ``address``: "host:port", where they find
    it; processes of other users do not come in."""

    def __init__(self, keys: Keys, store: Callable[[], str]) -> None:
        self._keys, self._store = keys, store
        sock = socket.create_server((LOOPBACK, 0), backlog=256)
        self.address = f"{LOOPBACK}:{sock.getsockname()[1]}"
        self._listener = Listener(sock, self._serve, name="store-door")

    def close(self) -> None:
        """End all connections."""
        self._listener.close()

    def _serve(self, plain: socket.socket) -> None:
        address = self._store()
        with handshake.connect(address, CONNECT, self._keys, service(address)) as sealed:
            join(plain, sealed)


Move = Callable[[socket.socket, socket.socket], None]


def join(
    plain: socket.socket, sealed: socket.socket, there: Move | None = None, back: Move | None = None
) -> None:
    """Pass bytes on in both directions until one end closes."""
    for sock in (plain, sealed):
        sock.settimeout(None)
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    second = threading.Thread(target=_until_closed, args=(back or _unpack, plain, sealed), daemon=True)
    second.start()
    _until_closed(there or _pack, plain, sealed)
    second.join()


def _until_closed(move: Move, plain: socket.socket, sealed: socket.socket) -> None:
    try:
        with contextlib.suppress(OSError):
            move(plain, sealed)
    finally:
        for sock in (plain, sealed):
            with contextlib.suppress(OSError):
                sock.shutdown(socket.SHUT_RDWR)


def _pack(plain: socket.socket, sealed: socket.socket) -> None:
    while data := plain.recv(CHUNK):
        wire.send(sealed, {}, data)


def _unpack(plain: socket.socket, sealed: socket.socket) -> None:
    while True:
        _, following = wire.receive(sealed)
        if following > CHUNK:
            raise wire.WireError(f"{following} bytes at once, more than {CHUNK}")
        plain.sendall(wire.rest(sealed, following))


def _copy(plain: socket.socket, other: socket.socket) -> None:
    while data := plain.recv(CHUNK):
        other.sendall(data)


def _copy_back(plain: socket.socket, other: socket.socket) -> None:
    _copy(other, plain)
