"""The store at which process groups meet: its process, and how trainers reach it.

It is a TCPStore of PyTorch, in a process of its own since it needs torch. The supervisor keeps one, `Stores`:
it is started by a function that the supervisor is given, in a thread, since that may take seconds. It
outlives a supervisor that dies; the next one takes it up by process id and start time, so that the present
generation keeps it.

A TCPStore has no authentication of its own. So it listens behind a gate on the loopback of its host, through
which its own process alone comes; there `serve` admits who knows the secret of the job and passes bytes on to
it. On every host the agent listens on the loopback for its trainers (`Door`) and passes their bytes on over
such a connection, in frames of `wire`, each with its tag. When one end closes, or dies, so does the other:
who waits in the store comes out as if it were next door.
"""

from __future__ import annotations

import contextlib
import queue
import socket
import threading
import time
from collections.abc import Callable
from typing import Any

from windtunnel.base import handshake, wire
from windtunnel.base.keys import Keys
from windtunnel.base.listener import Listener
from windtunnel.base.processes import Adopted, Identity, boot_id, start_time
from windtunnel.linux.gate import ListeningGate
from windtunnel.training.elastic.model import STORE

RETRY = 0.5
"""Seconds between tries to start a store."""


StartStore = Callable[[], tuple[str, Adopted]]


class Stores:
    """At most one store. `look` is called often by the supervisor's thread, and says what changed."""

    def __init__(self, start: StartStore, wake: Callable[[], None]) -> None:
        self._start = start
        self._wake = wake
        self._process: Adopted | None = None
        self._starting: threading.Thread | None = None
        self._started: queue.SimpleQueue[tuple[str, Adopted | None]] = queue.SimpleQueue()
        self._retry_at = 0.0
        self._closed = False

    def adopt(self, before: dict[str, Any] | None) -> str | None:
        """Take up the store of the event ``before``, if it lives: its address."""
        if before is None or before.get("started") is None:
            return None
        process = Adopted(Identity(int(before["pid"]), int(before["started"]), boot_id()))
        if process.poll() is not None:
            return None
        self._process = process
        return str(before["address"])

    def look(self, now: float) -> tuple[str, str, dict[str, Any]] | None:
        """("up", address, fields for the log) or ("down", reason, {}), when that is new."""
        if self._process is not None:
            status = self._process.poll()
            if status is None:
                return None
            self._process = None
            return "down", f"it ended with status {status}", {}
        if not self._started.empty():
            self._starting = None
            text, process = self._started.get()
            if process is None:
                self._retry_at = now + RETRY
                return "down", text, {}
            self._process = process
            return "up", text, {"pid": process.pid, "started": start_time(process.pid)}
        if self._starting is None and now >= self._retry_at:
            self._starting = threading.Thread(target=self._run, name="store-start", daemon=True)
            self._starting.start()
        return None

    def _run(self) -> None:
        try:
            address, process = self._start()
        except Exception as error:
            self._started.put((f"it did not start ({error})", None))
        else:
            if self._closed:
                process.kill()
                process.poll()
            self._started.put((address, process))
        self._wake()

    def close(self, *, kill: bool, wait: float = 5.0) -> None:
        """End the store, also one that is just starting; bounded by ``wait`` seconds for each."""
        self._closed = kill
        if self._starting is not None:
            self._starting.join(wait)
        if not self._started.empty():
            self._process = self._started.get()[1]
        if kill and self._process is not None:
            self._process.kill()
            last = time.monotonic() + wait
            while self._process.poll() is None and time.monotonic() < last:
                time.sleep(0.005)
            self._process = None


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
