"""Serve a listening socket with a thread for each connection, and let in only who belongs here.

Over TCP a peer is a stranger until the handshake has shown that it knows the job's secret. A stranger has
`handshake.PATIENCE` seconds in all for it and holds a thread and some hundred bytes meanwhile; of more than
`MOST_STRANGERS` the one that came first has to go. On a Unix socket the peer must be a process of the same
user, or root's.
"""

from __future__ import annotations

import contextlib
import os
import socket
import struct
import threading
from collections.abc import Callable

from windtunnel.base import handshake
from windtunnel.base.keys import Keys
from windtunnel.base.wire import Secured

MOST_STRANGERS = 64
_BREATH = 0.05  # seconds after an accept that failed: there are no descriptors left, or no memory
_CREDENTIALS = struct.Struct("3i")


class Listener:
    """``serve(sock)`` is called in the thread of each connection; it may raise OSError, which ends that
    connection and nothing else. ``keys``: None for a Unix socket. ``services``: the names under which this
    one is meant now (`handshake`).
    """

    def __init__(
        self,
        sock: socket.socket,
        serve: Callable[[socket.socket], None],
        *,
        keys: Keys | None = None,
        services: Callable[[], tuple[str, ...]] = tuple,
        name: str = "listener",
    ) -> None:
        assert keys is not None or sock.family == socket.AF_UNIX
        self._sock, self._serve, self._keys, self._services = sock, serve, keys, services
        self._open: set[socket.socket] = set()
        self._strangers: dict[socket.socket, None] = {}  # in the order in which they came
        self._lock = threading.Lock()
        self._closed = False
        self._thread = threading.Thread(target=self._accept, name=name, daemon=True)
        self._thread.start()

    def refuse(self) -> None:
        """Take no more connections; those that there are go on."""
        self._closed = True
        _shut(self._sock)

    def close(self) -> None:
        """Take no more connections, end those that there are."""
        self.refuse()
        with self._lock:
            for sock in self._open:
                _shut(sock)
        self._thread.join(2.0)
        self._sock.close()

    def _accept(self) -> None:
        while not self._closed:
            try:
                accepted, _ = self._sock.accept()
            except OSError:
                if not self._closed:
                    threading.Event().wait(_BREATH)
                continue
            try:
                sock = secured(accepted, self._keys)
            except OSError:  # the peer has gone already
                continue
            with self._lock:
                if self._closed:
                    sock.close()
                    return
                self._open.add(sock)
                if self._keys is not None:
                    self._strangers[sock] = None
                    if len(self._strangers) > MOST_STRANGERS:
                        first = next(iter(self._strangers))
                        del self._strangers[first]
                        _shut(first)
            name = f"{self._thread.name}-peer"
            threading.Thread(target=self._converse, args=(sock,), name=name, daemon=True).start()

    def _converse(self, sock: Secured) -> None:
        try:
            if self._keys is None:
                if peer(sock)[1] not in (0, os.getuid()):
                    return
            else:
                sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
                handshake.admit(sock, self._keys, self._services())
                with self._lock:
                    self._strangers.pop(sock, None)
                sock.settimeout(None)
            self._serve(sock)
        except OSError:
            return
        finally:
            with self._lock:
                self._strangers.pop(sock, None)
                self._open.discard(sock)
            sock.close()


def secured(accepted: socket.socket, keys: Keys | None) -> Secured:
    """A connection that was accepted, with TLS where the ``keys`` have certificates: not heard yet.

    Raises:
        OSError: the peer has gone already.
    """
    if keys is not None and keys.tls is not None:
        return keys.tls.accepted(accepted)
    return Secured(fileno=accepted.detach())


def peer(sock: socket.socket) -> tuple[int, int]:
    """The process and the user at the other end of a Unix socket, as the kernel says."""
    size = _CREDENTIALS.size
    pid, user, _ = _CREDENTIALS.unpack(sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, size))
    return pid, user


def _shut(sock: socket.socket) -> None:
    with contextlib.suppress(OSError):
        sock.shutdown(socket.SHUT_RDWR)
