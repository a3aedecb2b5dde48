"""Somebody in the middle of connections: he listens, or does more."""

from __future__ import annotations

import contextlib
import socket
import sys
import threading
from collections.abc import Callable, Iterator


@contextlib.contextmanager
def between(address: str, meddle: Callable[[socket.socket, socket.socket], None]) -> Iterator[str]:
    """Where he waits. ``meddle(client, server)`` is called in a thread for each connection."""
    host, _, port = address.rpartition(":")
    listener = socket.create_server(("127.0.0.1", 0))

    def each(client: socket.socket) -> None:
        with (
            contextlib.suppress(OSError),
            client,
            socket.create_connection((host, int(port))) as server,
        ):
            meddle(client, server)

    def accept() -> None:
        with contextlib.suppress(OSError):
            while True:
                threading.Thread(target=each, args=(listener.accept()[0],), daemon=True).start()

    accepting = threading.Thread(target=accept, daemon=True)
    accepting.start()
    try:
        yield f"127.0.0.1:{listener.getsockname()[1]}"
    finally:
        listener.shutdown(socket.SHUT_RDWR)
        accepting.join(10.0)
        listener.close()


def relay(
    client: socket.socket, server: socket.socket, transcript: bytearray, most: int = sys.maxsize
) -> None:
    """Pass all on, and keep it; after ``most`` bytes of the client the connection ends."""
    back = threading.Thread(target=_one_way, args=(server, client, transcript), daemon=True)
    back.start()
    _one_way(client, server, transcript, most)
    back.join(10.0)


def _one_way(
    source: socket.socket, to: socket.socket, transcript: bytearray, most: int = sys.maxsize
) -> None:
    with contextlib.suppress(OSError):
        while most and (part := source.recv(min(most, 1 << 16))):
            most -= len(part)
            transcript.extend(part)
            to.sendall(part)
    with contextlib.suppress(OSError):
        to.shutdown(socket.SHUT_WR)
