"""How trainers reach the store, which has no authentication of its own (PyTorch's TCPStore).

The store listens on the loopback of its host; beside it, in its process, `serve` admits who knows the
secret of the job and passes bytes on to it. On every other host the agent listens on the loopback for its
trainers (`Door`) and passes their bytes on over such a connection, in frames of `wire`, each with its tag.
When one end closes, or dies, so does the other: who waits in the store comes out as if it were next door.

What is left open: on the store's own host a process of another user can reach the store's loopback port.
"""

from __future__ import annotations

import contextlib
import socket
import threading
from collections.abc import Callable

from windtunnel.base import handshake, wire
from windtunnel.base.keys import Keys
from windtunnel.base.listener import Listener
from windtunnel.training.elastic.model import STORE

CHUNK = 64 << 10
CONNECT = 5.0
"""Seconds."""
LOOPBACK = "127.0.0.1"


def service(address: str) -> str:
    """The name of the store that is reached at ``address`` (`handshake`)."""
    return f"{STORE} {address}"


def serve(listener: socket.socket, address: str, port: int, keys: Keys) -> Listener:
    """Admit to the store at ``port`` of the loopback who comes to ``listener``, known as ``address``."""

    def admitted(sock: socket.socket) -> None:
        with socket.create_connection((LOOPBACK, port), CONNECT) as plain:
            join(plain, sock)

    return Listener(listener, admitted, keys=keys, services=lambda: (service(address),), name="store")


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


def join(plain: socket.socket, sealed: socket.socket) -> None:
    """Pass bytes on in both directions until one end closes."""
    for sock in (plain, sealed):
        sock.settimeout(None)
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    back = threading.Thread(target=_until_closed, args=(_unpack, plain, sealed), daemon=True)
    back.start()
    _until_closed(_pack, plain, sealed)
    back.join()


def _until_closed(
    move: Callable[[socket.socket, socket.socket], None], plain: socket.socket, sealed: socket.socket
) -> None:
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
